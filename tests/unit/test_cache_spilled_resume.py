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
from stratakv.policy import admission
from stratakv.policy.load_back import LoadBackPolicy
from stratakv.policy.losses import LossCause
from stratakv.spec.budget import FILLING_PAGES
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
    buffer: int = BUFFER,
    *,
    ok: bool = True,
) -> KVCache:
    """Pages by group, requests at once, and the longest in tokens. ``ok``: whether copies to the
    host succeed."""
    anchor, selected = wide_spec(PAGE, KeepAll()).groups
    spec = CacheSpec(page_tokens=PAGE, groups=(anchor, replace(selected, home=Home.HOST)))
    arenas = [
        [Arena(pages, group.page_bytes) for pages, group in zip(of, spec.groups, strict=True)]
        for of in (device, host)
    ]
    transfer = HeldTransfer(spec, arenas)

    def work(seconds: float) -> None:
        for way in Direction:
            transfer.end(way, ok=ok or way is Direction.LOAD)

    limits = AdmissionLimits(
        chunk_tokens=CHUNK, reserve_tokens=2, load_back=LoadBackPolicy(threshold_tokens=1),
        reuse=True,
    )  # fmt: skip
    pools = tuple([PageAllocator(pages) for pages in of] for of in (device, host))
    tables = BlockTable(2, rows, longest // PAGE, {GroupId(1): buffer})
    options = CacheOptions(limits=limits, tiers=TierOptions(sleep=work))
    return KVCache(spec, pools, tables, transfer, options, arenas[1])


def asking(
    tokens: npt.NDArray[np.int32], *, again: bool = False, total: int = TOTAL
) -> AdmissionRequest:
    prefix = PageHasher(NAMESPACE, PAGE)
    prefix.extend(tokens)
    return AdmissionRequest(prefix=prefix, tokens=len(tokens), total_tokens=total, again=again)


def computed(
    cache: KVCache, tokens: npt.NDArray[np.int32], total: int, booked: int | None = None
) -> int:
    """Admit a request and compute its prompt, of which ``booked`` tokens are known at first; its
    row."""
    found = cache.admission.admit(asking(tokens[:booked], total=total))
    assert isinstance(found, Admission)
    row = np.array([found.row], np.int32)
    for start in range(0, len(tokens), CHUNK):
        end = min(start + CHUNK, len(tokens))
        ends = np.array([start], np.int64), np.array([end], np.int64)
        while not cache.fits(*ends):
            assert cache.progress.wait()
        cache.extend(row, *ends)
        cache.commit(found.row, tokens[:end])
    cache.prefilled(found.row, len(tokens), total)
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


def test_who_comes_back_keeps_what_it_has_and_another_one_that_waits_lets_go():
    cache = cache_of(host=(42, 13))
    other = np.arange(200, 209, dtype=np.int32)
    first = cache.retract(computed(cache, other, TOTAL), other)
    cache.progress.settle()
    second = cache.retract(computed(cache, TOKENS[:PROMPT], TOTAL), TOKENS[:PROMPT])
    cache.progress.settle()
    assert first in cache.retraction
    assert second in cache.retraction
    back = cache.admission.resume(second, asking(TOKENS[: PROMPT + 1], again=True))
    assert isinstance(back, Admission)
    assert back.computed == PROMPT
    assert first not in cache.retraction, "the host has no room for both"
    cache.check()


def test_what_the_host_had_no_room_for_is_asked_for_again_by_who_runs_alone():
    """It outgrows the device, and all of it is there alone: only what is asked for can leave."""
    cache = cache_of((60, 10), (60, 12), 2, 40)
    other = np.arange(200, 220, dtype=np.int32)
    kept = cache.retract(computed(cache, other, 20), other)
    cache.progress.settle()
    tokens = np.arange(24, dtype=np.int32)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(admission, "GUARDED_TOKENS", 0)
        row = computed(cache, tokens[:20], 24, booked=18)
    cache.progress.settle()
    assert cache.tiers.pools.counters.dropped_backup_pages
    cache.retraction.forget(kept)
    cache.progress.settle()
    starts, ends = np.array([20], np.int64), np.array([21], np.int64)
    while not cache.fits(starts, ends):
        assert cache.progress.wait(), "who runs alone waits for nothing"
    assert cache.tiers.pools.counters.spilled == 1
    cache.extend(np.array([row], np.int32), starts, ends)
    cache.check()


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


def booked(cache: KVCache, group: int) -> npt.NDArray[np.int64]:
    """Pages of a group that each row may still take."""
    columns = dict(column for part in cache.beside for column in part.columns())
    found = columns[f"booked of group {group}"]
    assert found.dtype == np.int64
    return found


def test_who_is_spilled_in_the_middle_of_its_prompt_books_a_chunk():
    cache = cache_of((60, 18), (60, 20), 3, 40)
    tokens = np.arange(30, dtype=np.int32)
    found = cache.admission.admit(asking(tokens, total=32))
    assert isinstance(found, Admission)
    row = np.array([found.row], np.int32)
    for start in (0, CHUNK, 2 * CHUNK):
        cache.extend(row, np.array([start]), np.array([start + CHUNK]))
        cache.commit(found.row, tokens[: start + CHUNK])
    cache.progress.settle()
    other = cache.admission.admit(asking(np.arange(100, 108, dtype=np.int32), total=10))
    assert isinstance(other, Admission)
    assert cache.tiers.pools.counters.spilled == 1
    chunk = -(-CHUNK // PAGE) + FILLING_PAGES
    assert booked(cache, 1)[found.row] == chunk
    cache.prefilled(found.row, 3 * CHUNK, 32)
    assert booked(cache, 1)[found.row] == 1 + FILLING_PAGES
    cache.check()


@pytest.mark.parametrize(("buffer", "spilled"), [(8, 0), (4, 1)])
def test_nobody_is_spilled_whom_the_device_cannot_hold_beside_its_buffer(
    buffer: int, spilled: int
) -> None:
    """Of its nine pages eight may leave, and that is room for the buffer; but not for the pages
    that it still writes."""
    cache = cache_of((60, 10), (60, 20), 3, 40, buffer)
    computed(cache, np.arange(18, dtype=np.int32), 20)
    cache.progress.settle()
    found = cache.admission.admit(asking(np.arange(100, 105, dtype=np.int32), total=6))
    assert cache.tiers.pools.counters.spilled == spilled
    assert isinstance(found, Admission) == bool(spilled)
    cache.check()


def test_a_prefix_that_cannot_leave_the_device_is_computed_again():
    """Copies to the host failed until its request had ended: spilled, the next one would stand on
    all of it on the device, where it leaves no room, and nobody runs who could end."""
    cache = cache_of((60, 14), (60, 40), 1, 60, ok=False)
    tokens = np.arange(24, dtype=np.int32)
    row = computed(cache, tokens, 26)
    cache.release(row, tokens)
    cache.progress.settle()
    longer = np.arange(30, dtype=np.int32)
    found = cache.admission.admit(asking(longer, total=40))
    assert isinstance(found, Admission)
    assert found.computed == 0
    lost = cache.admission.losses.lost
    assert sum(lost.values()) == 24
    assert lost[LossCause.HOST_DEVICE_CAPACITY] == 24
    cache.check()


def test_nobody_is_spilled_whom_the_host_cannot_hold_to_the_end():
    cache = cache_of((60, 18), (60, 12), 3, 40)
    computed(cache, np.arange(30, dtype=np.int32), 32)
    cache.progress.settle()
    found = cache.admission.admit(asking(np.arange(100, 108, dtype=np.int32), total=10))
    assert found is Refusal.NO_PAGES
    assert cache.tiers.pools.counters.spilled == 0
    cache.check()
