"""Blocks of tokens become compressed entries, on our pages.

Owns the compressor's arithmetic and which of its rows live where: entries on anchor pages, the last
closed block's share in the next entry on the window page that it ends in, open blocks on the
request's live page. At a page boundary no block is open, so nothing of a live page is read there.
Source: transformers 5.23, ``DeepseekV4HCACompressor`` and ``DeepseekV4CSACompressor``.
"""

from dataclasses import dataclass

import torch
from torch import nn

from stratakv.core.ids import LayerId
from stratakv.engine.attention.torch_pools import LayerTensors
from stratakv.engine.deepseek.v4_config import V4Config
from stratakv.engine.deepseek.v4_norm import WideRMSNorm
from stratakv.engine.deepseek.v4_step import BlockStep, ClosingBlocks
from stratakv.spec.compressed import BlockPlace, BufferPlace


@dataclass(frozen=True, slots=True, eq=False)
class BlockPages:
    """One compressor's memory. entries: [rows, d]. open: [pages, 2, r, w], projected values and
    gates. overlap: [pages, 2, r, d] of window pages."""

    entries: torch.Tensor
    open: torch.Tensor
    overlap: torch.Tensor | None

    @classmethod
    def of(cls, place: BlockPlace, pools: LayerTensors, layer: LayerId) -> "BlockPages":
        def view(at: BufferPlace) -> torch.Tensor:
            return pools.layer(at.group, at.buffer.name, layer)

        overlap = None if place.overlap is None else view(place.overlap).squeeze(1)
        return cls(view(place.entries).flatten(0, 1), view(place.open).squeeze(1), overlap)


class Compressor(nn.Module):
    """``dim`` d of an entry, ``width`` w of a token's values: d, or 2 d where blocks overlap. Then
    the first half goes into the next block's entry, the second into the own one's."""

    def __init__(self, config: V4Config, ratio: int, dim: int, width: int) -> None:
        super().__init__()
        self.kv_proj = nn.Linear(config.hidden, width, bias=False)
        self.gate_proj = nn.Linear(config.hidden, width, bias=False)
        self.position_bias = nn.Parameter(torch.empty(ratio, width))
        self.kv_norm = WideRMSNorm(dim, config.norm_eps)
        self.ratio, self.dim, self.width = ratio, dim, width

    def rows(self, closing: ClosingBlocks) -> torch.Tensor:
        """Where entries go."""
        return closing.rows

    def compress(self, x: torch.Tensor, pages: BlockPages, step: BlockStep) -> None:
        """x [T, hidden]: write the entries of all blocks that close, and keep what stays open."""
        new = torch.stack((self.kv_proj(x), self.gate_proj(x)), 1)
        if step.closing is not None:
            whole = _whole_blocks(new, pages.open, step.closing)
            entries = self._entries(whole, pages.overlap, step.closing)
            pages.entries[self.rows(step.closing)] = entries.to(pages.entries.dtype)
        kept = new[step.kept_tokens].to(pages.open.dtype)
        pages.open[step.kept_pages, :, step.kept_rows] = kept

    def _entries(
        self, whole: torch.Tensor, overlap: torch.Tensor | None, closing: ClosingBlocks
    ) -> torch.Tensor:
        """whole [B, r, 2, w] -> [B, d]."""
        if overlap is not None:
            mine, whole = whole[..., : self.dim], whole[..., self.dim :]
            before = _predecessors(mine, overlap, closing)
            values, gates = torch.cat((before, whole), 1).unbind(2)
            halves = self.position_bias.split(self.dim, -1)
            gates = gates + torch.cat(halves)
            gates[closing.none, : self.ratio] = -torch.inf
            overlap[closing.last_pages] = mine[closing.last].transpose(1, 2).to(overlap.dtype)
        else:
            values, gates = whole.unbind(2)
            gates = gates + self.position_bias
        shares = gates.softmax(1, dtype=torch.float32).to(values.dtype)
        return closing.rotation.tail(self.kv_norm((values * shares).sum(1)))


def _whole_blocks(
    new: torch.Tensor, open_blocks: torch.Tensor, closing: ClosingBlocks
) -> torch.Tensor:
    """new [T, 2, w] and what live pages hold -> [B, r, 2, w]."""
    whole = new[closing.tokens]
    places, pages, rows = closing.carried
    whole.flatten(0, 1)[places] = open_blocks[pages, :, rows].to(new.dtype)
    return whole


def _predecessors(
    mine: torch.Tensor, overlap: torch.Tensor, closing: ClosingBlocks
) -> torch.Tensor:
    """What the block before each of B contributes: [B, r, 2, d]; anything finite where none is."""
    before = mine.roll(1, 0)
    before[closing.first] = overlap[closing.first_pages].transpose(1, 2).to(mine.dtype)
    return before
