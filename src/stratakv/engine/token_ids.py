"""Token ids of a step, on the device that computes it: those that are known, and those that steps
before it choose there. Owns each row's newest token, which nobody has to have read.
"""

from typing import cast

import numpy as np
import torch

from stratakv.core.ids import NONE, RowIds
from stratakv.engine.batch import StepBatch
from stratakv.engine.tensors import on_device


class NewestTokens:
    """By row of the block table, what was chosen for it last. A row is never asked for before."""

    def __init__(self) -> None:
        self._tokens: torch.Tensor | None = None

    def put(self, rows: RowIds, tokens: torch.Tensor) -> None:
        """tokens: int64 [S], of ``rows`` [S]. Who has failed is computed once more before anybody
        knows: any token will do."""
        if not len(rows):
            return
        most = int(rows.max()) + 1
        if self._tokens is None or len(self._tokens) < most:
            wider = torch.zeros(2 * most, dtype=torch.int64, device=tokens.device)
            if self._tokens is not None:
                wider[: len(self._tokens)] = self._tokens
            self._tokens = wider
        at = on_device(rows.astype(np.int64), tokens.device)
        self._tokens.index_copy_(0, at, tokens.clamp(min=0))

    def of(self, rows: RowIds) -> torch.Tensor:
        """int64 [n]."""
        assert self._tokens is not None, "no step has chosen a token"
        return self._tokens[on_device(rows.astype(np.int64), self._tokens.device)]


def token_ids(batch: StepBatch, device: torch.device) -> torch.Tensor:
    """int64 [T]."""
    found = on_device(batch.tokens.astype(np.int64), device)
    if batch.newest is None:
        return found
    at = np.flatnonzero(batch.tokens == NONE)
    rows = np.repeat(batch.rows, batch.counts)[at]
    newest = cast("torch.Tensor", batch.newest.of(rows))
    return found.index_copy(0, on_device(at, device), newest)
