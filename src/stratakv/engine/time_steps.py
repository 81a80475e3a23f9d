"""One arithmetic of Mamba-2 for any cut of a prompt.

Hugging Face's layers cut time steps off at their limits where several tokens are computed, and do
not where one token meets a state. Owns giving the one-token step the same limits. Must not know how
a model is configured (``spec.time_steps``).
"""

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Final

import torch
from torch import nn
from torch.nn.functional import softplus

from stratakv.spec.time_steps import TimeSteps

STEP: Final = "mamba2_selective_state_update"
"""What the layers of every family call for one token on a state: transformers 5.23."""


def bound_time_steps(model: nn.Module, limits: TimeSteps) -> None:
    """Let each Mamba-2 layer of ``model`` compute one token with the time steps that its chunk scan
    would have. The layers' own code runs, with another function under the step's name; neither
    their class nor another model sees it."""
    steps = {type(part): forward for part in model.modules() if (forward := _stepping(part))}
    bounded = {kind: _with_limits(forward, limits) for kind, forward in steps.items()}
    assert bounded, f"{type(model).__name__}: no layer calls {STEP}"
    for part in model.modules():
        if type(part) in bounded:
            part.forward = MethodType(bounded[type(part)], part)


def _stepping(part: nn.Module) -> FunctionType | None:
    """The forward of a layer that has the one-token step."""
    forward = inspect.unwrap(type(part).forward)
    if isinstance(forward, FunctionType) and STEP in forward.__code__.co_names:
        return forward
    return None


def _with_limits(forward: FunctionType, limits: TimeSteps) -> FunctionType:
    """``forward`` as it is, in a namespace of its own whose step is a limited one."""
    names = forward.__globals__ | {STEP: _limited(forward.__globals__[STEP], limits)}
    copy = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _limited(step: Callable[..., torch.Tensor], limits: TimeSteps) -> Callable[..., torch.Tensor]:
    def limited(
        state: torch.Tensor,
        inputs: torch.Tensor,
        dt: torch.Tensor,
        *matrices: torch.Tensor,
        dt_bias: torch.Tensor,
        dt_softplus: bool,
        **others: object,
    ) -> torch.Tensor:
        """As Hugging Face calls it; dt [n, heads, head_dim], the same for all of a head."""
        assert dt_softplus, "the limits are those of a softplus"
        # The chunk scan's own operations in its own order: not a bit may differ.
        one = dt[..., :1]
        taken = softplus(one + dt_bias[..., :1].to(one.dtype)).clamp(limits.low, limits.high)
        return step(
            state, inputs, taken.expand_as(dt), *matrices,
            dt_bias=None, dt_softplus=False, **others,
        )  # fmt: skip

    return limited
