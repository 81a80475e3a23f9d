"""Where each layer with compressed entries keeps its bytes (DeepSeek-V4).

Owns finding them in a spec by the names that ``layers.deepseek_v4`` gives. Must not decide shapes.
"""

import re
from dataclasses import dataclass
from typing import Final

from stratakv.core.ids import GroupId, LayerId
from stratakv.spec.groups import BufferSpec, CacheSpec
from stratakv.spec.kinds import LATENT

_ENTRIES: Final = re.compile(r"c\d+")


@dataclass(frozen=True, slots=True)
class BufferPlace:
    group: GroupId
    buffer: BufferSpec


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """One compressor: an entry for every ``ratio`` tokens, the block that is still filling, and,
    where blocks overlap, the last closed block's part in the next entry."""

    ratio: int
    entries: BufferPlace
    open: BufferPlace
    overlap: BufferPlace | None


@dataclass(frozen=True, slots=True)
class CompressedPlaces:
    """One layer: its window of latents, what it compresses, and the keys of the indexer that
    selects among the entries."""

    local: BufferPlace
    blocks: BlockPlace | None
    index: BlockPlace | None


def compressed_places(spec: CacheSpec) -> dict[LayerId, CompressedPlaces]:
    """Every layer that has a latent; its other buffers, where it has any."""
    found: dict[LayerId, dict[str, BufferPlace]] = {}
    for group in spec.groups:
        for buffer in group.buffers:
            for layer in buffer.layers:
                found.setdefault(layer, {})[buffer.name] = BufferPlace(group.id, buffer)
    return {
        layer: _places(named, spec.page_tokens) for layer, named in found.items() if LATENT in named
    }


def _places(named: dict[str, BufferPlace], page_tokens: int) -> CompressedPlaces:
    name = next((name for name in named if _ENTRIES.fullmatch(name)), None)
    if name is None:
        return CompressedPlaces(named[LATENT], None, None)
    ratio = page_tokens // named[name].buffer.rows_per_page
    blocks = BlockPlace(ratio, named[name], named[f"{name}_open"], named.get(f"{name}_overlap"))
    index = None
    if keys := named.get(f"{name}_index_k"):
        part = f"{name}_index"
        index = BlockPlace(ratio, keys, named[f"{part}_open"], named[f"{part}_overlap"])
    return CompressedPlaces(named[LATENT], blocks, index)
