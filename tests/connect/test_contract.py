"""The released engines are what our adapters and the stand-ins of the other tests take them for."""

import dataclasses
import json
import os

import pytest

from tests.connect.environment import HERE, ended, engine_process
from tests.connect.test_traffic import NEWEST, skip_without
from tests.fixtures import fake_sglang, fake_vllm
from tests.meta.source import ROOT

pytestmark = pytest.mark.connect

STAND_INS = {"vllm": fake_vllm, "sglang": fake_sglang}


def paths(*more):
    return os.pathsep.join(map(str, [*more, ROOT / "src", HERE]))


RELEASES = {
    "tested vllm": {},
    "newest vllm": {"PYTHONPATH": paths(NEWEST), "VLLM_TARGET_DEVICE": "cpu"},
    "tested sglang": {"PYTHONPATH": paths(HERE / "sglang_cpu"), "TORCHDYNAMO_DISABLE": "1"},
}


@pytest.fixture(scope="module", params=RELEASES)
def engine(request, tmp_path_factory):
    release, name = request.param.split()
    skip_without(release)
    answers = tmp_path_factory.mktemp("contract") / "answers.json"
    ended(engine_process("contract.py", name, answers, **RELEASES[request.param]))
    return name, json.loads(answers.read_text())


def test_every_method_that_the_engine_demands_is_there(engine):
    _, looks = engine
    assert looks["classes"]
    for name, cls in looks["classes"].items():
        assert cls["abstract"] == [], name


def test_methods_take_what_the_engine_gives_them(engine):
    _, looks = engine
    for name, cls in looks["classes"].items():
        for method, (ours, theirs) in cls["overridden"].items():
            assert ours[: len(theirs)] == theirs, f"{name}.{method} is given {theirs} now"
    assert sum(len(cls["overridden"]) for cls in looks["classes"].values()) >= 12


def test_records_of_the_stand_ins_have_fields_that_the_engine_has(engine):
    name, looks = engine
    for record, theirs in looks["records"].items():
        ours = dataclasses.fields(vars(STAND_INS[name])[record])
        assert {field.name for field in ours} <= set(theirs), record
