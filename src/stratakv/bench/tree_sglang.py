# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
"""SGLang's released tree with its Rust core, and ours beside it in one process, for ``bench tree``.

Owns how SGLang's public classes are driven. Runs in SGLang's environment as ``python -m
stratakv.bench.tree_sglang ANSWER SIZE``: the file gets the medians of traffic of that size.
"""

import json
import sys
from array import array
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import publish, reset_context
from sglang.srt.server_args import ServerArgs

from stratakv.bench.tree_subjects import Operation, Strata, Subject
from stratakv.bench.tree_traffic import CASES, Times, TrafficSize, measure, no_collections
from stratakv.core.ids import TokenIds


class Sglang:
    """Its match needs no hash and no pages, which it collects by a call of its own."""

    def __init__(self, page: int, window: int, pages: int) -> None:
        size = page * pages
        components = [ComponentType.FULL]
        if window:
            components.append(ComponentType.SWA)
            pool = SWAKVPool(
                size=size, size_swa=size, page_size=page, dtype=torch.float16, head_num=1,
                head_dim=1, swa_attention_layer_ids=[1], full_attention_layer_ids=[0], device="cpu",
            )  # fmt: skip
            self._allocator = SWATokenToKVPoolAllocator(
                size=size, size_swa=size, page_size=page, dtype=torch.float16, device="cpu",
                kvcache=pool, need_sort=False,
            )  # fmt: skip
        else:
            self._allocator = PagedTokenToKVPoolAllocator(
                size, page, torch.float16, "cpu", None, need_sort=False
            )
        requests = ReqToTokenPool(
            size=8, max_context_len=64, device="cpu", enable_memory_saver=False
        )
        params = CacheInitParams(
            disable=False, req_to_token_pool=requests, page_size=page,
            token_to_kv_pool_allocator=self._allocator, tree_components=tuple(components),
            tree_core_backend="rust", sliding_window_size=window or None,
        )  # fmt: skip
        self._cache = UnifiedRadixCache(params)
        self._page = page
        core = type(self._cache.tree_core).__name__
        if core != "RustUnifiedTreeCore":
            raise SystemExit(f"SGLang has chosen {core} instead of its Rust core")
        self._root = self._cache.root_node_handle(extra_key=None)

    def _key(self, tokens: TokenIds) -> MatchPrefixParams:
        return MatchPrefixParams(key=RadixKey(array("q", tokens.astype(np.int64).tobytes())))

    def _pages(self, node: int) -> torch.Tensor:
        return self._cache.tree_core.collect_full_device_indices(node, self._root)

    def uses(self, tokens: TokenIds) -> Mapping[str, Operation]:
        cache, key = self._cache, self._key(tokens)
        found = cache.match_prefix(key)
        assert found.device_prefix_len == len(tokens), "a prompt is not there"
        node = found.last_device_node

        def lease_release() -> None:
            lock = cache.lock(node)
            self._pages(node)
            cache.unlock(lock)

        return {
            "match": lambda: cache.match_prefix(key),
            "lock_unlock": lambda: cache.unlock(cache.lock(node)),
            "lease_release": lease_release,
        }

    def new(self, tokens: TokenIds) -> Operation:
        key = self._key(tokens)
        return lambda: self._cache.match_prefix(key)

    def insert(self, tokens: TokenIds) -> Operation:
        key = self._key(tokens)
        found = self._cache.match_prefix(key)
        have = found.device_prefix_len
        fresh = self._allocate(len(tokens) - have)
        slots = torch.cat([self._pages(found.last_device_node)[:have], fresh]) if have else fresh
        params = InsertParams(key=key.key, value=slots, prev_prefix_len=have)
        return lambda: self._cache.insert(params)

    def _allocate(self, tokens: int) -> torch.Tensor:
        match self._allocator:
            case SWATokenToKVPoolAllocator() as both:
                slots = both.full_attn_allocator.alloc(tokens)
                both.set_full_to_swa_mapping(slots, both.swa_attn_allocator.alloc(tokens))
            case one:
                slots = one.alloc(tokens)
        return slots

    def evict(self, pages: int) -> Operation:
        params = EvictParams(num_tokens=pages * self._page)
        return lambda: self._cache.evict(params)


def side_by_side(page: int, window: int, size: TrafficSize) -> list[Times]:
    """Of our tree, and of SGLang's."""

    def both(pages: int) -> list[Subject]:
        return [Strata(page, window, pages), Sglang(page, window, pages)]

    with no_collections():
        return measure(both, page, size)


def main() -> None:
    torch.set_num_threads(1)
    reset_context()
    publish(ServerArgs(model_path="dummy", device="cpu"), role="tokenizer")
    size = TrafficSize(**json.loads(sys.argv[2]))
    answer = [side_by_side(page, window, size) for page, window in CASES]
    Path(sys.argv[1]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
