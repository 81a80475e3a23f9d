"""KV events in vLLM's msgpack form.

Owns the form: a batch is the array ``[ts, events, data_parallel_rank]``, an event a map tagged with
``type``, fields left at their default are absent. Classes and fields are those of vLLM's
``distributed/kv_events.py`` since its pull request 42892; older releases wrote events as arrays.
Imports msgspec, so only who publishes imports this.

Block hashes are the last 64 bits of a page key, big-endian: what vLLM sends by default, and what
routers keep of a longer one. ``extra_keys`` names the tenant at every block, so that blocks of two
tenants differ for a router that hashes tokens by itself; vLLM names its salt at the first only. An
adapter's name is in ``lora_name`` alone.
"""

from collections.abc import Sequence
from typing import Any, Final, assert_never

import msgspec
import numpy as np

from stratakv.core.ids import PageKey
from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import event_kind
from stratakv.tiers.events import AllCleared, CacheEvent, PagesRemoved, PagesStored

KEY_WORDS: Final = 4
"""64-bit words of a page key."""


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Encoder:
    """From the cache's records to bytes. ``spec`` names the groups."""

    def __init__(self, spec: CacheSpec) -> None:
        self._page_tokens = spec.page_tokens
        self._kinds = [event_kind(group.retention) for group in spec.groups]
        self._pack = msgspec.msgpack.Encoder()

    def encode(self, events: Sequence[CacheEvent], wall_s: float) -> bytes:
        """One batch; ``wall_s``: seconds of the wall clock."""
        batch = KVEventBatch(wall_s, [self._event(event) for event in events], 0)
        return self._pack.encode(batch)

    def _event(self, event: CacheEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
        match event:
            case PagesStored():
                return self._stored(event)
            case PagesRemoved():
                return BlockRemoved(hashes_of(event.keys), event.medium.value, event.group)
            case AllCleared():
                return AllBlocksCleared()
            case _:
                assert_never(event)

    def _stored(self, event: PagesStored) -> BlockStored:
        kind = self._kinds[event.group]
        parent = event.parent
        blocks: list[tuple[Any, ...] | None] = [(event.tenant,)] * len(event.keys)
        return BlockStored(
            block_hashes=hashes_of(event.keys),
            parent_block_hash=None if parent is None else hashes_of((parent,))[0],
            token_ids=event.tokens.tolist(),
            block_size=self._page_tokens,
            lora_id=None,
            medium=event.medium.value,
            lora_name=event.lora or None,
            extra_keys=blocks if event.tenant else None,
            group_idx=event.group,
            kv_cache_spec_kind=kind.name,
            kv_cache_spec_sliding_window=kind.window,
        )


def hashes_of(keys: Sequence[PageKey]) -> list[int]:
    """The 64 bits by which events name pages."""
    words = np.frombuffer(b"".join(keys), ">u8")
    return words[KEY_WORDS - 1 :: KEY_WORDS].tolist()
