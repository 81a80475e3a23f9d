"""Where the compressed entries lie that queries have chosen: in the pool, or fetched to be read.

Owns the way of one layer's entries that are not on the device. Must not choose any
(``v4_attention``).
"""

import torch

from stratakv.core.ids import LayerId
from stratakv.engine.attention.kernels import SelectedRows
from stratakv.engine.attention.spilled_rows import SpilledContext
from stratakv.engine.deepseek.v4_step import Keys, Queries


class PresentEntries:
    """Of one layer in one step. ``pool``: its entries on the device [rows, d]. ``plan``: which
    selection of a step it makes; None where it attends to all entries, which are there."""

    def __init__(self, layer: LayerId, pool: torch.Tensor, plan: int | None) -> None:
        self._layer, self._pool, self._plan = layer, pool, plan
        self._context: tuple[SpilledContext, torch.Tensor] | None = None

    def rows(self, found: Keys, queries: Queries) -> SelectedRows:
        """What ``found`` names, where it can be read now."""
        if self._plan is None:
            return SelectedRows(self._pool, found.rows, found.hidden)
        if queries.context is not None:
            return SelectedRows(self._whole(queries.context), found.rows, found.hidden)
        if queries.spilled is None:
            return SelectedRows(self._pool, found.rows, found.hidden)
        rows, missing = queries.spilled.read(self._plan, found.rows, found.places, found.hidden)
        missing.load(self._layer)
        if found.hidden is not None:
            rows = _written(rows, found.hidden)
        return SelectedRows(self._pool, rows, found.hidden)

    def _whole(self, context: SpilledContext) -> torch.Tensor:
        """The entries of a chunk, read once for all of its queries; of one chunk at a time."""
        if self._context is None or self._context[0] is not context:
            self._context = None  # or there would be two
            self._context = context, context.pool(self._layer, self._pool)
        return self._context[1]


def _written(rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """``rows`` [n, m] with one that a query does see, its own if it has any, in the place of those
    that are ``hidden``: by table they may be anybody's now."""
    own = rows.gather(1, hidden.long().argmin(1, keepdim=True))
    nothing = hidden.all(1, keepdim=True)
    return torch.where(hidden, torch.where(nothing, own[nothing.long().argmin()], own), rows)
