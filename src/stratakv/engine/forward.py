"""What a model returns of one step. Owns the record, and the sums that tell whether all is finite.

A token's last hidden state holds whatever its layers have added, so what is not finite in it shows
there; what its keys, values and states hold was computed from the same. Must not choose tokens.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from stratakv.engine.batch import StepBatch
from stratakv.engine.tensors import finite_in, on_device

if TYPE_CHECKING:
    from stratakv.engine.sampling import Sampled

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """logits: float32 [S, vocab] after the last token of each sampled request, in order. finite:
    bool [R] beside them, whether everything that was computed of each request's chunk is. sampled:
    bool [R], the batch's own. scored: [K, vocab] of the batch's scored tokens, in order, in the
    model's own dtype; None: there are none."""

    logits: torch.Tensor
    finite: torch.Tensor
    sampled: Bools
    scored: torch.Tensor | None = None
    chosen: "Sampled | None" = None

    @classmethod
    def of_numbers(cls, logits: torch.Tensor, batch: StepBatch) -> "Forward":
        """Of a runner that computes no hidden states."""
        return cls(
            logits,
            torch.ones(len(batch.rows), dtype=torch.bool, device=logits.device),
            batch.sampled,
        )

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


def finite_tokens(hidden: torch.Tensor) -> torch.Tensor:
    """bool [T], one pass over ``hidden`` [T, ...]. A sum keeps NaN and infinity, and in float32
    nothing that a model computes with makes one of its own."""
    return finite_in(hidden.flatten(1).sum(1, dtype=torch.float32))


def by_request(finite: torch.Tensor, counts: npt.NDArray[np.int32]) -> torch.Tensor:
    """bool [R]: whether all of each chunk's tokens are; ``finite`` [T], chunks in a row."""
    if len(finite) == len(counts):
        return finite
    owners = on_device(np.repeat(np.arange(len(counts)), counts), finite.device)
    broken = torch.zeros(len(counts), dtype=torch.int32, device=finite.device)
    return broken.index_add_(0, owners, (~finite).int()) == 0
