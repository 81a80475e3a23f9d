"""Sums that are the same to the last bit in any batch, at any position, on any CPU.

Owns fixed point, the order of summation, and the series of sigmoid and softplus: torch's own have
two codes, one for whole vectors and one for the elements that are left over, and they round
differently, so that the same logit would score differently at the end of a batch. A GEMM promises
neither: how it rounds depends on the shape of the call, on the place in a tile and on the
instruction set. What is chosen by such a sum would depend on how a prompt is cut. Here only those
operations count that IEEE 754 rounds in one way, an element at a time, and sums of whole multiples
below 2**53, which no order rounds at all. Must not choose anything.
"""

import math
from typing import Final

import torch

MANTISSA_BITS: Final = 53
"""Of float64: every whole number up to 2**53 has a place there."""
_EXPONENT: Final = 0x7FF0000000000000
_SIGNLESS: Final = {
    2: (torch.int16, 0x7FFF),
    4: (torch.int32, 0x7FFFFFFF),
    8: (torch.int64, 0x7FFFFFFFFFFFFFFF),
}
"""By bytes of a float: a whole number as wide, and what of it is not the sign."""


def exact_bits(terms: int) -> int:
    """So many bits may two factors have each that a sum of ``terms`` products is exact."""
    return (MANTISSA_BITS - (terms - 1).bit_length()) // 2


def on_grid(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """float64 [..., d]: each row rounded to whole multiples of a power of two of its own, at most
    2**bits of them. rows: [..., d], of any float type.

    So the product of two such rows is exact in float64, if ``bits`` are ``exact_bits(d)``: every
    partial sum is a whole multiple of both grids, and small enough. An element is off by no more
    than 2**-bits of its row's largest. A row with an element that is not finite is all NaN.
    """
    largest = _largest(rows).double()
    # Of the largest only the power of two below it: 0, and infinity or NaN, stay what they are.
    power = (largest.view(torch.int64) & _EXPONENT).view(torch.float64)
    # Beside this number float64 has room for multiples of 2**(1 - bits) * power and no finer ones.
    coarse = power.mul_(1.5 * 2.0 ** (MANTISSA_BITS - bits))
    return rows.double().add_(coarse).sub_(coarse)


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each row, [..., 1]; NaN where an element is. By their bits, whose
    order is that of magnitudes with NaN at the end: torch reduces whole numbers two to four times
    as fast as floats."""
    whole, mask = _SIGNLESS[rows.element_size()]
    bits = rows.view(whole).bitwise_and(mask)
    return bits.amax(-1, keepdim=True).view(rows.dtype)


def limbs(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows ``on_grid``, and on a finer grid what was lost: 2 * bits together."""
    coarse = on_grid(rows, bits)
    return coarse, on_grid(rows.double().sub_(coarse), bits)


def folded(terms: torch.Tensor) -> torch.Tensor:
    """The sum over dim 1, [n, ...], in an order that depends on its length alone. terms:
    [n, count, ...]; what they hold is gone."""
    count = terms.shape[1]
    while count > 1:
        half = count // 2
        terms[:, :half] += terms[:, count - half : count]
        count -= half
    return terms[:, 0]


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
