"""One step of a DeepSeek-V4 model, as tensors: what all its layers share.

Owns the records between planner, compressor and attention. Must not compute.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stratakv.engine.attention.kernels import AttentionKernels, IndexKeys
from stratakv.engine.attention.spilled_rows import SpilledContext
from stratakv.engine.attention.swap_ins import SpilledBucket
from stratakv.engine.deepseek.common_rope import Rotation
from stratakv.transfer.engine import LayerGate


@dataclass(frozen=True, slots=True, eq=False)
class ClosingBlocks:
    """The B blocks of one ratio r that become whole in this step, request by request, in order.

    tokens: int64 [B, r], places of their tokens in the packed batch, 0 where an earlier step
    computed them. ``carried`` of those [c]: places in the flat [B * r], the live page and the row
    in its open block. first: int64 [f], blocks whose predecessor is not the block before them here
    but on a window page, ``first_pages`` [f]. none: int64, blocks that begin at token 0. rows:
    int64 [B], where entries go, and ``index_rows`` index keys. rotation: at the blocks' first
    tokens. last: int64 [k], blocks whose part in the next entry is kept, on window pages
    ``last_pages`` [k].
    """

    tokens: torch.Tensor
    carried: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    first: torch.Tensor
    first_pages: torch.Tensor
    none: torch.Tensor
    rows: torch.Tensor
    index_rows: torch.Tensor
    rotation: Rotation
    last: torch.Tensor
    last_pages: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BlockStep:
    """Of one ratio. closing: None where no block becomes whole. ``kept_tokens`` int64 [k], packed
    places of tokens in blocks that stay open; they go to ``kept_pages`` and ``kept_rows`` there."""

    closing: ClosingBlocks | None
    kept_tokens: torch.Tensor
    kept_pages: torch.Tensor
    kept_rows: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """What n queries may see: pool rows int64 [m] that they share, or [n, m] of their own.
    hidden: bool [n, m], those they may not; None where all m are seen. Rows of hidden keys are
    written nonetheless: a weight of zero does not undo a NaN. places: int64 [n, m], which of the
    entries these are; None: all of them."""

    rows: torch.Tensor
    hidden: torch.Tensor | None
    places: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Compressed entries that n queries may choose from, oldest first: pool rows int64 [m] that
    they share, or [n, m] of their own. counts: int64 [n], how many of them each query sees; None
    where it is all m. The others are written nonetheless. index_rows: of their index keys, where
    those have other rows."""

    rows: torch.Tensor
    counts: torch.Tensor | None
    index_rows: torch.Tensor | None = None

    def index(self, index_keys: torch.Tensor) -> IndexKeys:
        """Their index keys, rows of ``index_keys``."""
        rows = self.rows if self.index_rows is None else self.index_rows
        return IndexKeys(index_keys, rows, counts=self.counts)

    def only(self, places: torch.Tensor) -> Keys:
        """places: int64 [n, k] into the m."""
        rows = self.rows[places] if self.rows.dim() == 1 else self.rows.gather(1, places)
        hidden = None if self.counts is None else places >= self.counts[:, None]
        return Keys(rows, hidden, places)

    @property
    def all(self) -> Keys:
        if self.counts is None:
            return Keys(self.rows, None)
        places = torch.arange(self.rows.shape[-1], device=self.rows.device)
        return Keys(self.rows, places >= self.counts[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """n queries that are planned together. tokens: their places in the packed batch. entries: by
    ratio; none where no query sees an entry. spilled: of decoding ones, those whose indexed entries
    are not all on the device; context: where those of a chunk are not. Its indexed entries are then
    places in it."""

    tokens: slice | torch.Tensor
    local: Keys
    entries: Mapping[int, Entries]
    spilled: SpilledBucket | None = None
    context: SpilledContext | None = None


@dataclass(frozen=True, slots=True, eq=False)
class V4Step:
    """slots: int64 [T], the row of each token's latent. rotations: by kind of layer, of all
    tokens."""

    token_ids: torch.Tensor
    slots: torch.Tensor
    rotations: Mapping[str, Rotation]
    blocks: Mapping[int, BlockStep]
    queries: tuple[Queries, ...]
    gate: LayerGate | None
    kernels: AttentionKernels
