"""What attends over pages: the protocol, and the records that cross it.

Kernels are chosen once, for a device and a model's dtype, by the assembly (``Device.kernels``);
nothing asks for either in the middle of a step. Owns no arithmetic: ``dense_kernels`` runs on any
device, ``row_kernels`` and ``compiled_row_kernels`` are faster in float32 on a CPU. A third party
checks its own with ``stratakv.testing.kernel_conformance``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from stratakv.core.ids import GroupId
from stratakv.engine.attention.paged_layer import LatentPages, LayerPages, Scoring
from stratakv.engine.attention.step_meta import StepShape
from stratakv.engine.attention.swap_ins import SwapIns, SwapShape
from stratakv.spec.retention import Retention
from stratakv.transfer.host_rows import HostRows


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """One cache group of tokens. ``rule``: which keys a query sees. ``layer_bytes``: of one page in
    one layer."""

    id: GroupId
    rule: Retention
    page_tokens: int
    layer_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """One layer's keys and values on its pages, those of the step among them. ``keys``, ``values``:
    the step's own once more, [heads, T, dim] each, which need not be read back."""

    layer: LayerPages
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Expanded:
    """Keys and values [heads, n, dim] each that a module has made of the n latents which
    ``GroupAttention.gather`` returned, in that order."""

    keys: torch.Tensor
    values: torch.Tensor


Context: TypeAlias = Paged | Expanded


@dataclass(frozen=True, slots=True, eq=False)
class SelectedRows:
    """Keys that n queries attend to, which are their own values: rows of ``pool`` [rows, d].

    rows: int64 [m] that all share, or [n, m], each query's own. hidden: bool [n, m], those that a
    query may not see; None: it sees all. What is hidden is written nonetheless: a weight of zero
    does not undo a NaN.
    """

    pool: torch.Tensor
    rows: torch.Tensor
    hidden: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class IndexKeys:
    """Keys that an indexer's m queries choose from, oldest first: rows of ``pool`` [any, d], int64
    [n] that all share or [m, n], each query's own.

    hidden: bool [m, n], those that a query may not see. counts: int64 [m], it sees so many of the
    first. None: it sees all. What is hidden is written nonetheless, as in ``SelectedRows``.
    """

    pool: torch.Tensor
    rows: torch.Tensor
    hidden: torch.Tensor | None = None
    counts: torch.Tensor | None = None

    def of(self, some: slice) -> "IndexKeys":
        """The same of some of the queries."""
        rows = self.rows if self.rows.dim() == 1 else self.rows[some]
        hidden = None if self.hidden is None else self.hidden[some]
        counts = None if self.counts is None else self.counts[some]
        return IndexKeys(self.pool, rows, hidden, counts)


class GroupAttention(Protocol):
    """One group's attention in one step. Its page table and lengths lie where the kernels want
    them, so that no layer goes back to the host; every layer of the group asks it.

    A step's T tokens are packed: those of ``decodes`` requests with one token each come first, then
    the chunks, request by request.
    """

    @property
    def slots(self) -> torch.Tensor:
        """int64 [T]: the row, page * P + offset, on which each token's key and value belong."""
        ...

    @property
    def decodes(self) -> int: ...

    def gather(self, latents: LatentPages) -> torch.Tensor:
        """The latents of every request's context, the step's own among them, [n, dim] in the pool's
        dtype, in an order of the kernels' own; valid until the next call. Rows that nobody has
        written may be among them: each is expanded by itself, and no query sees what comes of
        those."""
        ...

    def decode(self, query: torch.Tensor, context: Context, scoring: Scoring) -> torch.Tensor:
        """The leading tokens' attention: query [decodes, H, D] -> [decodes, H, value dim]."""
        ...

    def prefill(self, query: torch.Tensor, context: Context, scoring: Scoring) -> torch.Tensor:
        """That of all others: query [T - decodes, H, D] -> [T - decodes, H, value dim]."""
        ...


class AttentionKernels(Protocol):
    """What one runner attends with, one step after the other.

    Of a page nothing may be read but rows that the group's rule shows to a query and rows that the
    step has written: any other may hold NaN, and may be somebody else's. Query head h goes with key
    head h // (H / heads).
    """

    def plan(
        self, group: AttentionGroup, shape: StepShape, table: npt.NDArray[np.int32]
    ) -> GroupAttention:
        """What the layers of ``group`` need in this step. table: [block-table rows, pages], NONE
        where a request holds no page; AssertionError where a token that is needed has none. The
        last step's plan is dead: a device with static buffers fills them again."""
        ...

    def write(self, pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """pool [rows, width], slots int64 [T], rows [T, width], in the pool's dtype from then on.
        No other row changes."""
        ...

    def attend_selected(
        self,
        query: torch.Tensor,
        parts: Sequence[SelectedRows],
        value_dim: int,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention over all ``parts`` together, whose rows somebody else has chosen: query
        [n, H, d] -> [n, H, value_dim]. Of a row the first ``value_dim`` are its value. sinks [H]: a
        logit per head that takes weight and gives no value."""
        ...

    def best_keys(
        self, query: torch.Tensor, weights: torch.Tensor, keys: IndexKeys, k: int
    ) -> torch.Tensor:
        """Places among the n ``keys`` of the k <= n with the highest scores, int64 [m, k],
        ascending; of equal ones the first. A score is the sum over heads of weight * relu(query .
        key), of queries [m, H, d] and weights float32 [m, H] of either sign; it depends on its
        query and its key alone, wherever they are. What is hidden has -inf, what is not finite is
        above all."""
        ...

    def swap_ins(self, host: HostRows, shape: SwapShape) -> SwapIns:
        """Who plans, for a group that has its home on the host, which rows come to the device;
        ``host`` has them. Of the same selections all choose the same places."""
        ...
