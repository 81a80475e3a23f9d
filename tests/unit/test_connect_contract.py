"""What an engine demands of our adapters, without the engine: its signatures are recorded in
``tests/connect/contracts``, which ``make test-connect`` holds to the released engines."""

import dataclasses
import json
import sys

import pytest

from stratakv.connect.contract import RELIED, Demanded, broken, demanded, misfits, unknown_names
from stratakv.connect.engines import ENGINES
from tests.fixtures import fake_sglang, fake_vllm
from tests.meta.source import ROOT

RECORDED = sorted((ROOT / "tests" / "connect" / "contracts").glob("*.json"))
STAND_INS = {"vllm": fake_vllm, "sglang": fake_sglang}


@pytest.fixture
def adapters(monkeypatch):
    """By engine, over its stand-ins."""
    return {
        "vllm": fake_vllm.install(monkeypatch),
        "sglang": fake_sglang.install(monkeypatch, fake_sglang.arguments("m")),
    }


@pytest.fixture(params=RECORDED, ids=lambda path: path.stem)
def recorded(request):
    return request.param.stem.partition("-")[0], json.loads(request.param.read_text())


def wanted(cls):
    methods = {name: tuple(theirs) for name, theirs in cls["methods"].items()}
    return Demanded(abstract=tuple(cls["abstract"]), methods=methods)


def test_every_tested_release_is_recorded():
    names = {f"{name}-{release}" for name, engine in ENGINES.items() for release in engine.tested}
    assert {path.stem for path in RECORDED} == names


def test_adapters_have_what_a_released_engine_demands(adapters, recorded):
    name, looks = recorded
    assert looks["classes"].keys() == set(ENGINES[name].classes)
    for cls, theirs in looks["classes"].items():
        assert misfits(vars(adapters[name])[cls], wanted(theirs)) == []
    assert sum(len(theirs["methods"]) for theirs in looks["classes"].values()) >= 12


def test_records_of_the_stand_ins_have_fields_that_the_engine_has(recorded):
    name, looks = recorded
    for record, theirs in looks["records"].items():
        ours = dataclasses.fields(vars(STAND_INS[name])[record])
        assert {field.name for field in ours} <= set(theirs), record


@pytest.mark.parametrize("name", ENGINES)
def test_the_stand_ins_are_what_the_adapters_rely_on(adapters, name):
    assert broken(ENGINES[name]) == []
    assert adapters[name].__name__ in RELIED


def test_an_engine_that_has_changed_is_reported_by_name(adapters, recorded):
    name, looks = recorded
    cls, theirs = next(iter(looks["classes"].items()))
    method, given = next(iter(theirs["methods"].items()))
    other = {
        "abstract": [*theirs["abstract"], "that_is_new"],
        "methods": {**theirs["methods"], method: ["first", *given]},
    }
    found = misfits(vars(adapters[name])[cls], wanted(other))
    assert found[0] == f"{cls} has no that_is_new, which is demanded"
    assert found[1].startswith(f"{cls}.{method} is given (first")
    assert len(found) == 2


def test_what_is_demanded_is_read_from_the_classes_above(adapters):
    found = demanded(adapters["sglang"].StrataStorage)
    assert found.methods["register_mem_host_pool_v2"] == ("host_pool", "host_pool_name")
    assert found.abstract == ()


@pytest.mark.parametrize("adapter", RELIED)
def test_a_name_that_has_gone_is_reported(adapters, monkeypatch, adapter):
    (module, classes), *_ = RELIED[adapter].items()
    name, members = next(iter(classes.items()))
    monkeypatch.setattr(sys.modules[module], name, type(name, (), {}))
    assert unknown_names(adapter) == [f"{module}.{name} has no {one}" for one in members]
    monkeypatch.delattr(sys.modules[module], name)
    assert unknown_names(adapter) == [f"{module} has no {name}"]


def test_behaviour_that_has_changed_is_reported(adapters, monkeypatch):
    base = sys.modules["vllm.v1.kv_offload.base"]
    monkeypatch.setattr(base, "get_offload_group_idx", lambda key: key[0])
    monkeypatch.setattr(fake_sglang.HiCacheStorage, "register_mem_pool_host", lambda *_: None)
    assert broken(ENGINES["vllm"]) == ["a key is no longer a block's hash and its group"]
    (text,) = broken(ENGINES["sglang"])
    assert "register_mem_pool_host" in text
