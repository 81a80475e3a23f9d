"""Attention over rows in C. Owns the way into ``_row_attention``; must not compute anything itself.
Importing this module fails with ImportError where the package was installed without a compiler;
``row_kernels`` then does the same work in torch.

A query's result depends on its own keys alone: nothing is padded, whoever it shares a step with.
"""

from functools import partial
from typing import Final, assert_never

import numpy as np
import numpy.typing as npt
import torch

from stratakv.core.ids import NONE
from stratakv.engine.attention import _row_attention
from stratakv.engine.attention.dense_kernels import DenseAttention
from stratakv.engine.attention.kernels import (
    AttentionGroup,
    Context,
    Expanded,
    GroupAttention,
    Paged,
)
from stratakv.engine.attention.paged_layer import LatentPages, Scoring, Scratch
from stratakv.engine.attention.row_kernels import RowKernels
from stratakv.engine.attention.step_meta import Ints, StepShape
from stratakv.engine.attention.step_plan import GroupPlanner
from stratakv.engine.in_c import cuts_of, parts_of, spread
from stratakv.engine.tensors import on_device
from stratakv.spec.retention import first_key

CPU: Final = torch.device("cpu")
FLOAT_BYTES: Final = 4


class CompiledRowKernels(RowKernels):
    """``RowKernels`` whose one-token queries are done in C."""

    def plan(
        self, group: AttentionGroup, shape: StepShape, table: npt.NDArray[np.int32]
    ) -> GroupAttention:
        planner = self._planner(group)
        return CompiledAttention(planner, shape, np.ascontiguousarray(table), self._scratch)


class CompiledAttention:
    """A ``GroupAttention``. What is no one-token query over pages of keys and values is
    ``DenseAttention``'s, planned where it is asked for. ``table``: the group's block table [rows,
    pages]. AssertionError where a token that is seen has no page, IndexError where its page is
    outside of the pool."""

    def __init__(
        self,
        planner: GroupPlanner,
        shape: StepShape,
        table: npt.NDArray[np.int32],
        scratch: Scratch,
    ) -> None:
        self._planner, self._shape, self._table, self._scratch = planner, shape, table, scratch
        self._dense: DenseAttention | None = None
        self.decodes = shape.decodes
        self.slots = on_device(planner.slots(shape, table), CPU)
        last = shape.starts[: shape.decodes]
        first = first_key(planner.rule, last)
        # [queries, 3]: row of the table, first and last token that is seen
        self._spans = np.stack((shape.rows[: shape.decodes], first, last), 1)
        self._seen = last - first + 1
        self._tokens = int(self._seen.sum())
        assert _all_present(table, self._spans, planner.page_tokens), "a token has no page"
        if shape.decodes < len(shape.rows):
            self._rest()  # a chunk whose tokens have no page is found now

    def gather(self, latents: LatentPages) -> torch.Tensor:
        return self._rest().gather(latents)

    def decode(self, query: torch.Tensor, context: Context, scoring: Scoring) -> torch.Tensor:
        match context:
            case Paged(layer):
                pass
            case Expanded():
                return self._rest().decode(query, context, scoring)
            case _:
                assert_never(context)
        sinks = scoring.sinks
        out = query.new_empty(*query.shape[:2], layer.value_dim)
        attend = partial(
            _row_attention.attend_into,
            query.contiguous().numpy(),
            layer.key_rows.numpy(),
            layer.value_rows.numpy(),
            self._table,
            self._spans,
            out.numpy(),
            None if sinks is None else sinks.detach().float().contiguous().numpy(),
            layer.heads,
            self._planner.page_tokens,
            scoring.scale,
            scoring.softcap or 0.0,
        )
        row_bytes = layer.heads * (layer.key_dim + layer.value_dim) * FLOAT_BYTES
        parts = parts_of(self._tokens * row_bytes)
        if parts == 1:
            attend(0, len(query) * layer.heads)
        else:
            spread(attend, cuts_of(np.repeat(self._seen, layer.heads), parts))
        return out

    def prefill(self, query: torch.Tensor, context: Context, scoring: Scoring) -> torch.Tensor:
        return self._rest().prefill(query, context, scoring)

    def _rest(self) -> DenseAttention:
        if self._dense is None:
            planner = self._planner
            step = planner.plan(self._shape, self._table)
            self._dense = DenseAttention(step, planner.page_tokens, self._scratch)
        return self._dense


def _all_present(table: npt.NDArray[np.int32], spans: Ints, page_tokens: int) -> bool:
    """Whether every page that holds a token of [first, last] is there; spans: [n, 3]."""
    first, last = spans[:, 1:2] // page_tokens, spans[:, 2:] // page_tokens
    columns = np.arange(table.shape[1])
    missing = (table[spans[:, 0]] == NONE) & (columns >= first) & (columns <= last)
    return not missing.any()
