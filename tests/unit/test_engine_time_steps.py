"""One token takes the time steps that a chunk would take, and nobody else's model changes."""

import copy
import math

import pytest
import torch

from stratakv.engine.huggingface.model import wrap
from stratakv.engine.huggingface.time_steps import STEP, bound_time_steps
from stratakv.spec.time_steps import TimeSteps
from tests.fixtures.models import changed_model, model_to_give_away, tiny_model

PAIRS = ("mamba2", "bamba", "falcon_h1", "granitemoehybrid")
LEASTS = ("nemotron_h", "zamba2")


def mixers(model):
    """Every layer with a time step of its own, by what only Hugging Face's own layers have."""
    return [part for part in model.modules() if "time_step_limit" in vars(part)]


@pytest.mark.parametrize("family", [*PAIRS, *LEASTS])
def test_the_limits_are_those_of_hugging_faces_layers(family):
    model = wrap(model_to_give_away(family))
    limits = model.facts.time_steps
    assert limits is not None
    assert len(mixers(model.module)) >= 2
    for mixer in mixers(model.module):
        assert mixer.time_step_limit == (limits.low, limits.high)
        assert "forward" in vars(mixer)


@pytest.mark.parametrize("family", ["mamba2", "falcon_h1"])
def test_a_model_without_limits_stays_as_it_is(family):
    model = changed_model(family, time_step_limit=(0.0, math.inf))
    assert wrap(model).facts.time_steps is None
    steps = [part.forward.__func__.__globals__[STEP] for part in mixers(model)]
    assert not [step for step in steps if step.__module__ == bound_time_steps.__module__]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_and_a_chunk_take_the_same_bits(dtype):
    """Both functions are Hugging Face's; what they make of dt is compared before it is used."""
    torch.manual_seed(0)
    limits = TimeSteps(0.08, 0.2)
    model = model_to_give_away("mamba2").to(dtype)
    bound_time_steps(model, limits)
    names = mixers(model)[0].forward.__func__.__globals__
    seen = {}
    # The function below the limits, in place of Hugging Face's: it only looks.
    inner = dict(zip(names[STEP].__code__.co_freevars, names[STEP].__closure__, strict=True))
    inner["step"].cell_contents = lambda *args, **kwargs: seen.update(dt=args[2], **kwargs)
    dt, bias = torch.randn(3, 8, 1, dtype=dtype) - 2, torch.randn(8, 1, dtype=dtype)
    names[STEP](
        None, None, dt.expand(3, 8, 5), None, None, None, None, z=None,
        dt_bias=bias.expand(8, 5), dt_softplus=True,
    )  # fmt: skip
    wanted = torch.nn.functional.softplus(dt[..., 0] + bias[..., 0])
    assert ((wanted < limits.low) | (wanted > limits.high)).any()
    assert seen["dt"].equal(wanted.clamp(limits.low, limits.high)[..., None].expand(3, 8, 5))
    assert seen["dt_bias"] is None
    assert not seen["dt_softplus"]


def test_only_the_model_that_is_taken_over_changes():
    before = copy.deepcopy(tiny_model("bamba"))
    taken = wrap(model_to_give_away("bamba")).module
    kind = type(mixers(taken)[0])
    assert "forward" in vars(mixers(taken)[0])
    assert "forward" not in vars(mixers(before)[0])
    assert mixers(before)[0].forward.__func__ is kind.forward
    again = copy.deepcopy(taken)
    assert mixers(again)[0].forward.__self__ is mixers(again)[0]


def test_a_model_without_such_layers_cannot_be_bounded():
    with pytest.raises(AssertionError, match=STEP):
        bound_time_steps(model_to_give_away("llama"), TimeSteps(0.1, 1.0))
