"""How likely tokens were, and which were the likeliest beside them.

Owns the sums, which stay on the device until a step's choice is read, and the reports that come of
them. Log-probabilities are of the raw logits, as OpenAI's and vLLM's.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from stratakv.engine.batch import Int32s, PromptTargets
from stratakv.engine.drawing import likeliest
from stratakv.engine.request import TokenLogprob
from stratakv.engine.tensors import on_device

SCORED_AT_ONCE: Final = 64
"""Prompt tokens, each with the logits of a vocabulary in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Reports:
    """Of n tokens. rows: their places among the sampled ones, int64 [n]; wanted: how many of the
    likeliest beside each, [n]. usable: bool [n], false where no token was chosen, or not all logits
    are finite. chosen: [n]. ids, values: [n, m], the likeliest, best first."""

    rows: npt.NDArray[np.intp]
    wanted: Int32s
    usable: torch.Tensor
    chosen: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What ``read`` is given once it is on the host."""
        return self.usable, self.chosen, self.ids, self.values

    def moved(self, by: int) -> "Reports":
        return replace(self, rows=self.rows + by)

    def read(
        self,
        usable: npt.NDArray[np.bool_],
        chosen: npt.NDArray[np.float32],
        ids: npt.NDArray[np.int64],
        values: npt.NDArray[np.float32],
    ) -> list[TokenLogprob | None]:
        """[n]; None where there is nothing to report."""
        each = zip(
            usable.tolist(), chosen.tolist(), ids.tolist(), values.tolist(), self.wanted.tolist(),
            strict=True,
        )  # fmt: skip
        return [
            TokenLogprob(chosen=own, top=tuple(zip(tops[:most], scores[:most], strict=True)))
            if good
            else None
            for good, own, tops, scores, most in each
        ]


def reports(logits: torch.Tensor, tokens: torch.Tensor, wanted: Int32s) -> list[Reports]:
    """Of the sampled rows that want any: ``wanted`` [S] is -1 in the others. tokens: int64 [S]."""
    rows = np.flatnonzero(wanted >= 0)
    if not len(rows):
        return []
    index = on_device(rows, logits.device)
    chosen = tokens[index]
    return [_reports(logits[index], chosen, chosen >= 0, rows, wanted[rows])]


def scores(logits: torch.Tensor, targets: PromptTargets) -> list[Reports]:
    """logits: [K, vocab] -> how likely each target was, a piece at a time; nothing where the logits
    are not finite, and the request fails for it."""
    found: list[Reports] = []
    for at in range(0, len(logits), SCORED_AT_ONCE):
        piece = logits[at : at + SCORED_AT_ONCE].float()
        tokens = targets.tokens[at : at + SCORED_AT_ONCE].astype(np.int64)
        wanted = targets.top[at : at + SCORED_AT_ONCE]
        rows, chosen = np.arange(at, at + len(piece)), on_device(tokens, logits.device)
        found.append(_reports(piece, chosen, piece.amax(-1).isfinite(), rows, wanted))
    return found


def _reports(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    usable: torch.Tensor,
    rows: npt.NDArray[np.intp],
    wanted: Int32s,
) -> Reports:
    vocab = logits.shape[1]
    lp = logits.log_softmax(-1)
    own = lp.gather(1, chosen.clamp(min=0)[:, None])[:, 0]
    most = min(int(wanted.max()), vocab)
    if most < 1:
        nothing = chosen.new_empty(len(rows), 0)
        return Reports(rows, wanted, usable, own, nothing, nothing.float())
    counts = torch.full((len(rows), 1), most, device=logits.device)
    mask = likeliest(lp, counts, lp.topk(most, -1).values[:, -1:])
    # Their ids, the lowest first, without asking how many there are.
    order = torch.arange(vocab, 0, -1, device=logits.device)
    ids = torch.where(mask, order, 0).topk(most, -1).indices
    values, by_value = torch.sort(lp.gather(1, ids), dim=-1, descending=True, stable=True)
    return Reports(rows, wanted, usable, own, ids.gather(1, by_value), values)
