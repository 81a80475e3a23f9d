"""The released engines are what our adapters take them for, and what is recorded of them in
``contracts``, to which ``make test`` holds adapters and stand-ins without an engine
(``tests/unit/test_connect_contract.py``).
"""

import json
import os

import pytest

from tests.connect.environment import HERE, ended, engine_process
from tests.connect.test_traffic import NEWEST, skip_without
from tests.meta.source import ROOT

pytestmark = pytest.mark.connect


def paths(*more):
    return os.pathsep.join(map(str, [*more, ROOT / "src", HERE]))


RELEASES = {
    "vllm-0.32.0": ("tested", {}),
    "vllm-0.33.0": ("newest", {"PYTHONPATH": paths(NEWEST), "VLLM_TARGET_DEVICE": "cpu"}),
    "sglang-0.5.23": (
        "tested", {"PYTHONPATH": paths(HERE / "sglang_cpu"), "TORCHDYNAMO_DISABLE": "1"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=RELEASES)
def engine(request, tmp_path_factory):
    release, environment = RELEASES[request.param]
    skip_without(release)
    name, _, _ = request.param.partition("-")
    answers = tmp_path_factory.mktemp("contract") / "answers.json"
    ended(engine_process("contract.py", name, answers, **environment))
    return request.param, json.loads(answers.read_text())


def test_the_engine_is_what_its_adapter_relies_on(engine):
    _, found = engine
    assert found["broken"] == []


def test_the_engine_is_what_is_recorded_of_it(engine):
    name, found = engine
    recorded = json.loads((HERE / "contracts" / f"{name}.json").read_text())
    assert found["looks"] == recorded
    assert sum(len(cls["methods"]) for cls in recorded["classes"].values()) >= 12
