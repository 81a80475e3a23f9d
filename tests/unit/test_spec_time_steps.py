"""Between which bounds time steps lie, as each family's configuration says it."""

import json
import math

import pytest

from stratakv.cli import main
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.engine.huggingface.model_facts import read_planned
from stratakv.serve import wiring
from stratakv.serve.wiring import build_service
from stratakv.spec.support import time_steps_of
from stratakv.spec.time_steps import TimeSteps
from tests.fixtures.tiny_configs import tiny_config

BAMBA, NEMOTRON = {"model_type": "bamba"}, {"model_type": "nemotron_h"}


def test_a_pair_of_limits_bounds_both_sides():
    assert time_steps_of(BAMBA | {"time_step_limit": [0, 0.2]}) == TimeSteps(0.0, 0.2)
    assert time_steps_of(BAMBA | {"time_step_limit": (0.1, math.inf)}) == TimeSteps(0.1, math.inf)


def test_limits_that_no_softplus_exceeds_are_none():
    assert time_steps_of(BAMBA | {"time_step_limit": [0.0, math.inf]}) is None
    assert time_steps_of(BAMBA) is None
    assert time_steps_of(NEMOTRON | {"time_step_min": 0.0}) is None
    assert time_steps_of({"model_type": "llama"}) is None


def test_families_with_a_least_step_ignore_the_pair_as_hugging_face_does():
    fields = NEMOTRON | {"time_step_min": 0.001, "time_step_limit": [0.0, 0.2]}
    assert time_steps_of(fields) == TimeSteps(0.001, math.inf)


REFUSED = [
    (BAMBA, "time_step_limit", value, "must be a list of two numbers")
    for value in (None, 0.1, [0.1], [0.0, None], [0.0, math.nan], "0.0, 0.1", [False, 1.0])
] + [
    (NEMOTRON, "time_step_min", value, "must be a number") for value in (None, "0.1", math.nan)
]  # fmt: skip


@pytest.mark.parametrize(("fields", "name", "value", "wanted"), REFUSED)
def test_what_bounds_nothing_is_refused_by_its_field(fields, name, value, wanted):
    with pytest.raises(ConfigError, match=f"{name} {wanted}"):
        time_steps_of(fields | {name: value})


@pytest.fixture
def directory(tmp_path):
    """A checkpoint that looks as if it had weights; whoever opens them fails."""
    tiny_config("bamba").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"time_step_limit": None}))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    return tmp_path


def test_a_server_refuses_before_it_opens_a_weight(directory, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(wiring, "load_model", never)
    with pytest.raises(ConfigError, match="time_step_limit must be a list of two numbers"):
        build_service(directory, EngineConfig(), ServerConfig())


def test_a_plan_refuses_too(directory, capsys):
    with pytest.raises(ConfigError, match="time_step_limit"):
        read_planned(directory)
    assert main(["plan", "bytes", str(directory), "--device-memory", "8MiB"]) != 0
    assert "time_step_limit must be a list of two numbers" in capsys.readouterr().err
