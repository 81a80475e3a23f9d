"""Sigmoid and softplus whose last bit does not depend on where an element lies.

Owns the two series. torch's own have two codes, one for whole vectors and one for the elements that
are left over, and they round differently: the same logit would score differently at the end of a
batch. Here every step is a single operation that IEEE 754 rounds in one way. Must not know what is
scored.
"""

import math
from typing import Final

import torch

_POWERS: Final = tuple(math.log(2) ** k / math.factorial(k) for k in range(9))
"""Of 2**x, for x in [-0.5, 0.5]: as good as float32 and three digits more."""
_ODD: Final = tuple(2 / (2 * k + 1) for k in range(10))
"""Of log((1 + s) / (1 - s)) / s in s**2, for s in [0, 1/3]."""
_LEAST_EXPONENT: Final = -1000.0
_BIAS: Final = 1023
_FRACTION_BITS: Final = 52
"""Of float64."""


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), to half a unit of the type of ``x`` (float32 or less) and a little."""
    wide = x.double()
    small = _exp_of_minus(wide.abs())
    return (torch.where(wide < 0, small, torch.ones_like(small)) / (small + 1)).to(x.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), as near."""
    wide = x.double()
    small = _exp_of_minus(wide.abs())
    s = small / (small + 2)
    return (_series(_ODD, s * s).mul_(s).add_(wide.relu())).to(x.dtype)


def _exp_of_minus(x: torch.Tensor) -> torch.Tensor:
    """float64, x >= 0."""
    power = (x * -math.log2(math.e)).clamp_(min=_LEAST_EXPONENT)
    whole = power.round()
    scale = (whole.long() + _BIAS << _FRACTION_BITS).view(torch.float64)
    return _series(_POWERS, power.sub_(whole)).mul_(scale)


def _series(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    """The polynomial, the constant first, multiplied and added in turn: never in one."""
    found = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        found.mul_(x).add_(coefficient)
    return found
