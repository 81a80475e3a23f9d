"""One token on the states of linear attention in C, in place of Hugging Face's torch.

Owns the way into ``_state_steps``, and which calls go there: float32 on a CPU, one token. Any other
call is Hugging Face's own. Shapes: n requests, one token of each; a call changes the states that it
is given, and raises ValueError where shapes do not fit each other. Importing this module fails with
ImportError where the package was installed without a compiler.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.activations import ACT2FN

from stratakv.engine.huggingface import _state_steps
from stratakv.engine.huggingface.other_names import Wrap, give_names
from stratakv.engine.in_c import cuts_of, parts_of, spread

Call = Callable[..., Any]
Array = npt.NDArray[np.float32]
DELTA_EPS: Final = 1e-6
"""Of the norm of queries and keys: transformers 5.23."""


def compile_states(model: nn.Module) -> None:
    """Let the layers of ``model`` compute one token in C where they can."""
    give_names(model, WRAPS)


def is_float32_on_cpu(*tensors: torch.Tensor) -> bool:
    return all(one.is_cpu and one.dtype == torch.float32 for one in tensors)


def _each(work: Callable[..., None], requests: Sequence[Array], others: Sequence[Array]) -> None:
    """``work(*requests, *others)``, on torch's threads where there is enough of it: each has some
    rows of all ``requests`` [n, ...], of which states are the first, and all of ``others``."""

    def part(first: int, last: int) -> None:
        work(*(one[first:last] for one in requests), *others)

    state = requests[0]
    spread(part, cuts_of(np.ones(len(state), np.int64), parts_of(2 * state.nbytes)))


def _array(tensor: torch.Tensor) -> Array:
    return tensor.detach().contiguous().numpy()


def _mamba(theirs: Call) -> Call:
    def step(
        state: torch.Tensor,
        inputs: torch.Tensor,
        dt: torch.Tensor,
        decay: torch.Tensor,
        *matrices: torch.Tensor,
        **how: object,
    ) -> torch.Tensor:
        """As Hugging Face calls it: state [n, heads, head_dim, size], which is changed; inputs and
        dt [n, heads, head_dim]; decay [heads, head_dim, size]; matrices b and c [n, groups, size]
        and skip [heads, head_dim]. dt, decay, skip and dt_bias are the same for all of a head.
        Returns [n, heads, head_dim]."""
        fits = len(matrices) == 3 and how.get("z") is None
        if not fits or not is_float32_on_cpu(state, inputs, dt, *matrices):
            return theirs(state, inputs, dt, decay, *matrices, **how)
        b, c, skip = matrices
        one, bias = dt[..., 0], how.get("dt_bias")
        if isinstance(bias, torch.Tensor):
            one = one + bias[..., 0]
        if how.get("dt_softplus"):
            one = nn.functional.softplus(one)
        out = torch.empty(inputs.shape, dtype=inputs.dtype)
        requests = (state.numpy(), *map(_array, (inputs, one, b, c)), out.numpy())
        _each(_state_steps.mamba_into, requests, (_array(decay[:, 0, 0]), _array(skip[:, 0])))
        return out

    return step


def _delta(theirs: Call) -> Call:
    def step(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        **how: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """query and key [n, 1, key_heads, key_dim], value [n, 1, heads, value_dim], g (logarithms
        of the decay) and beta [n, 1, heads]; initial_state [n, heads, key_dim, value_dim], which is
        changed where it lies in one piece. Returns [n, 1, heads, value_dim] and the state."""
        fits = query.shape[1] == 1 and how.get("use_qk_l2norm_in_kernel")
        fits = fits and how.get("output_final_state")
        if (
            initial_state is None
            or not fits
            or not is_float32_on_cpu(query, key, value, g, beta, initial_state)
        ):
            return theirs(query, key, value, g=g, beta=beta, initial_state=initial_state, **how)
        query, key = (_normal(one[:, 0]) for one in (query, key))
        state = initial_state.contiguous()
        out = torch.empty(value.shape, dtype=value.dtype)
        inputs = (query / query.shape[-1] ** 0.5, key, value[:, 0], g[:, 0], beta[:, 0])
        requests = (state.numpy(), *map(_array, inputs), out[:, 0].numpy())
        _each(_state_steps.delta_into, requests, ())
        return out, state

    return step


def _normal(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + DELTA_EPS)


def _convolution(theirs: Call) -> Call:
    def update(
        inputs: torch.Tensor,
        state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **how: object,
    ) -> torch.Tensor:
        """inputs [n, channels, 1]; changes ``state`` [n, channels, width]; weight [channels, taps],
        bias [channels]. Returns [n, channels, 1]."""
        fits = inputs.shape[-1] == 1 and state.is_contiguous() and not how
        if not fits or not is_float32_on_cpu(inputs, state, weight):
            return theirs(inputs, state, weight, bias, activation, **how)
        out = torch.empty(inputs.shape[:2], dtype=inputs.dtype)
        others = [_array(weight)] if bias is None else [_array(weight), _array(bias)]
        requests = (state.numpy(), _array(inputs[..., 0]), out.numpy())
        _each(_state_steps.convolve_into, requests, others)
        return (out if activation is None else ACT2FN[activation](out))[..., None]

    return update


WRAPS: Final[dict[str, Wrap]] = {
    "mamba2_selective_state_update": _mamba,
    "torch_recurrent_gated_delta_rule": _delta,
    "causal_conv1d_update": _convolution,
}
"""By the names that layers call them by: transformers 5.23."""
