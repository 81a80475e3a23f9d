"""What routers to experts share: logits that do not depend on the batch.

Owns the product of tokens and expert rows. An expert that is chosen by a near tie must be the same
one in every cut of a prompt, so a token's logits are a function of it alone, to the last bit. Must
not choose experts (each model has its own rule).
"""

from typing import Final

import torch
from torch import nn

from stratakv.engine.attention.scratch_limit import pieces
from stratakv.engine.deepseek.common_exact import exact_bits, folded, limbs

_COPIES_BYTES: Final = 5 * 8
"""Scratch of one element of a token while it is split."""


class RouterLogits(nn.Module):
    """``weight`` [experts, hidden], and a float64 copy of it in two limbs: fixed point in one is as
    good as float32 only where no element of a row is much larger than the others."""

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.bits = exact_bits(hidden)
        self._limbs: torch.Tensor | None = None
        self.register_load_state_dict_post_hook(_split)

    def split(self) -> None:
        """After every change of ``weight``; loading a state dict does it."""
        self._limbs = torch.cat(limbs(self.weight.detach(), self.bits))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> x @ weight.T in the dtype of ``x``, rounded once."""
        assert self._limbs is not None, "the weights were never split"
        found = x.new_empty(len(x), len(self.weight))
        each_bytes = _COPIES_BYTES * x.shape[1] + 4 * 8 * 2 * len(self.weight)
        for some in pieces(len(x), each_bytes):
            products = torch.cat(limbs(x[some], self.bits)) @ self._limbs.mT
            found[some] = _sum_of_limbs(products, len(self.weight))
        return found


def _split(module: nn.Module, _: object) -> None:
    assert isinstance(module, RouterLogits)
    module.split()


def _sum_of_limbs(products: torch.Tensor, experts: int) -> torch.Tensor:
    """products [2 t, 2 experts], each exact -> [t, experts], the small ones first."""
    large, small = products.chunk(2)
    mixed = large[:, experts:] + small[:, :experts]
    return small[:, experts:] + mixed + large[:, :experts]


def normalized(weights: torch.Tensor, never_zero: float) -> torch.Tensor:
    """weights [T, k], each row divided by its sum, in the same dtype."""
    total = folded(weights.to(torch.float32, copy=True)).to(weights.dtype)
    return weights / (total[:, None] + never_zero)
