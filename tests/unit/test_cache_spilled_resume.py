"""Spilled requests on a host that is nearly full: one that was retracted comes back also where its
own live page is what fills it, and one that is spilled for others takes what it needs, no more."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from stratakv.cache.kv_cache import CacheOptions, KVCache
from stratakv.cache.prices import AdmissionLimits, AdmissionRequest
from stratakv.cache.records import Admission, Refusal
from stratakv.core.ids import GroupId
from stratakv.core.page_keys import PageHasher
from stratakv.memory.allocator import PageAllocator
from stratakv.memory.block_table import BlockTable
from stratakv.policy.load_back import LoadBackPolicy
from stratakv.spec.groups import CacheSpec, Home
from stratakv.spec.retention import KeepAll
from stratakv.tiers.tiered_cache import TierOptions
from stratakv.transfer.copy_plan import Direction
from tests.cache_machine import NAMESPACE, wide_spec
from tests.tier_bench import Arena
from tests.tier_machine import HeldTransfer

PAGE, CHUNK, PROMPT, TOTAL = 2, 5, 13, 16
DEVICE, HOST, BUFFER = (42, 7), (42, 8), 2
"""The longest request fills the host, and one that is spilled the device."""
TOKENS = np.arange(TOTAL, dtype=np.int32)


def cache_of(
    device: tuple[int, int] = DEVICE,
    host: tuple[int, int] = HOST,
    rows: int = 1,
    longest: int = TOTAL,
) -> KVCache:
    """Pages by group, requests at once, and the longest in tokens."""
    anchor, selected = wide_spec(PAGE, KeepAll()).groups
    spec = CacheSpec(page_tokens=PAGE, groups=(anchor, replace(selected, home=Home.HOST)))
    arenas = [
        [Arena(pages, group.page_bytes) for pages, group in zip(of, spec.groups, strict=True)]
        for of in (device, host)
    ]
    transfer = HeldTransfer(spec, arenas)

    def work(seconds: float) -> None:
        for way in Direction:
            transfer.end(way)

    limits = AdmissionLimits(
        chunk_tokens=CHUNK, reserve_tokens=2, load_back=LoadBackPolicy(threshold_tokens=1),
        reuse=True,
    )  # fmt: skip
    pools = tuple([PageAllocator(pages) for pages in of] for of in (device, host))
    tables = BlockTable(2, rows, longest // PAGE, {GroupId(1): BUFFER})
    options = CacheOptions(limits=limits, tiers=TierOptions(sleep=work))
    return KVCache(spec, pools, tables, transfer, options, arenas[1])


def asking(
    tokens: npt.NDArray[np.int32], *, again: bool = False, total: int = TOTAL
) -> AdmissionRequest:
    prefix = PageHasher(NAMESPACE, PAGE)
    prefix.extend(tokens)
    return AdmissionRequest(prefix=prefix, tokens=len(tokens), total_tokens=total, again=again)


def computed(cache: KVCache, tokens: npt.NDArray[np.int32], total: int) -> int:
    """Admit a request and compute its prompt; its row."""
    found = cache.admission.admit(asking(tokens, total=total))
    assert isinstance(found, Admission)
    row = np.array([found.row], np.int32)
    for start in range(0, len(tokens), CHUNK):
        end = min(start + CHUNK, len(tokens))
        ends = np.array([start], np.int64), np.array([end], np.int64)
        while not cache.fits(*ends):
            assert cache.progress.wait()
        cache.extend(row, *ends)
        cache.commit(found.row, tokens[:end])
    cache.prefilled(found.row, total)
    return found.row


def test_a_request_that_fills_the_host_by_itself_comes_back():
    cache = cache_of()
    row = computed(cache, TOKENS[:PROMPT], TOTAL)
    retracted = cache.retract(row, TOKENS[:PROMPT])
    assert retracted in cache.retraction, "it was saved"
    for _ in range(3):
        cache.progress.settle()
        back = cache.admission.resume(retracted, asking(TOKENS[: PROMPT + 1], again=True))
        cache.check()
        if isinstance(back, Admission):
            break
    assert isinstance(back, Admission), "nobody runs, and nobody else keeps a page: it must come in"
    assert back.computed == PROMPT // PAGE * PAGE
    cache.release(back.row, TOKENS[: back.computed])
    cache.progress.settle()
    assert cache.progress.flush()
    assert all(pool.free == pool.total for pool in cache.tiers.pools.stats())


@pytest.mark.parametrize("longest", [40, 48, 400])
def test_who_is_spilled_for_another_books_what_it_may_take(longest):
    """However long the longest request may be: the host has room for both."""
    cache = cache_of((60, 18), (60, 20), 3, longest)
    computed(cache, np.arange(30, dtype=np.int32), 32)
    cache.progress.settle()
    found = cache.admission.admit(asking(np.arange(100, 108, dtype=np.int32), total=10))
    assert isinstance(found, Admission)
    assert cache.tiers.pools.counters.spilled == 1
    cache.check()


def test_nobody_is_spilled_whom_the_host_cannot_hold_to_the_end():
    cache = cache_of((60, 18), (60, 12), 3, 40)
    computed(cache, np.arange(30, dtype=np.int32), 32)
    cache.progress.settle()
    found = cache.admission.admit(asking(np.arange(100, 108, dtype=np.int32), total=10))
    assert found is Refusal.NO_PAGES
    assert cache.tiers.pools.counters.spilled == 0
    cache.check()
