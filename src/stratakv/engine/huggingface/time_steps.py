"""One arithmetic of Mamba-2 for any cut of a prompt.

Hugging Face's layers cut time steps off at their limits where several tokens are computed, and do
not where one token meets a state. Owns giving the one-token step the same limits. Must not know how
a model is configured (``spec.time_steps``).
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.nn.functional import softplus

from stratakv.engine.huggingface.other_names import give_names
from stratakv.spec.time_steps import TimeSteps

STEP: Final = "mamba2_selective_state_update"
"""What the layers of every family call for one token on a state: transformers 5.23."""


def bound_time_steps(model: nn.Module, limits: TimeSteps) -> None:
    """Let each Mamba-2 layer of ``model`` compute one token with the time steps that its chunk scan
    would have."""
    bounded = give_names(model, {STEP: partial(_limited, limits=limits)})
    assert bounded, f"{type(model).__name__}: no layer calls {STEP}"


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
