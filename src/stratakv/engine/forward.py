"""What a model returns of one step. Owns the record, and the look at whether all of it is finite.

A token's last hidden state holds whatever its layers have added, so what is not finite in it shows
there; what its keys, values and states hold was computed from the same. Must not choose tokens.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from stratakv.engine.batch import StepBatch
from stratakv.engine.tensors import on_host

if TYPE_CHECKING:
    from stratakv.engine.sampling import Sampled

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """logits: float32 [S, vocab] after the last token of each sampled request, in order. finite:
    bool [R], whether everything that was computed of each request's chunk is. sampled: bool [R],
    the batch's own. scored: [K, vocab] of the batch's scored tokens, in order, in the model's own
    dtype; None: there are none."""

    logits: torch.Tensor
    finite: Bools
    sampled: Bools
    scored: torch.Tensor | None = None
    chosen: "Sampled | None" = None

    @classmethod
    def of_numbers(cls, logits: torch.Tensor, batch: StepBatch) -> "Forward":
        """Of a runner that computes no hidden states."""
        return cls(logits, np.ones(len(batch.rows), np.bool_), batch.sampled)

    @classmethod
    def of_hidden(
        cls,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        batch: StepBatch,
        scored: torch.Tensor | None = None,
    ) -> "Forward":
        """hidden: [T, ...], of every token of ``batch``, after its last layer."""
        return cls(logits, by_request(finite_tokens(hidden), batch.counts), batch.sampled, scored)


def finite_tokens(hidden: torch.Tensor) -> Bools:
    """bool [T], one pass over ``hidden`` [T, ...]. A sum keeps NaN and infinity, and in float32
    nothing that a model computes with makes one of its own."""
    sums = hidden.flatten(1).sum(1, dtype=torch.float32)
    return np.isfinite(on_host(sums)[0])  # torch makes four operations of it


def by_request(finite: Bools, counts: npt.NDArray[np.int32]) -> Bools:
    """bool [R]: whether all of each chunk's tokens are; ``finite`` [T], chunks in a row."""
    if finite.all():
        return np.ones(len(counts), np.bool_)
    return np.logical_and.reduceat(finite, np.cumsum(counts) - counts)
