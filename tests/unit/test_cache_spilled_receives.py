"""Requests that receive host pages leave room there for the one that runs, up to its last token."""

from dataclasses import replace

import numpy as np
import pytest

from stratakv.cache.kv_cache import KVCache
from stratakv.cache.prices import AdmissionRequest
from stratakv.cache.records import Admission, CacheUse
from stratakv.core.ids import NONE, GroupId
from stratakv.core.page_keys import PageHasher
from tests.cache_machine import NAMESPACE
from tests.unit.test_cache_spilled_resume import CHUNK, PAGE, asking, cache_of, computed

DEVICE, HOST, TOTAL = (60, 13), (60, 34), 60
OWN = np.arange(100, 125, dtype=np.int32)


def receiving(cache: KVCache, tokens: int) -> int | None:
    """Let in a request whose ``tokens`` another engine computes, on the host; its row."""
    prefix = PageHasher(NAMESPACE, PAGE)
    prefix.extend(np.arange(tokens, dtype=np.int32))
    asked = AdmissionRequest(prefix=prefix, tokens=tokens, total_tokens=tokens + 2, receives=True)
    found = cache.admission.admit(asked)
    if not isinstance(found, Admission):
        return None
    cache.hand_off.reserve(found.row, tokens)
    return found.row


def who_runs_reaches_its_end_beside_all_that_may_receive(tokens: int) -> None:
    """Others receive ``tokens`` each, as many as are let in, and nobody can take that back."""
    cache = cache_of(DEVICE, HOST, rows=4, longest=TOTAL)
    row = computed(cache, OWN, TOTAL)
    cache.progress.settle()
    assert cache.tiers.pools.tiers[0][1].available() < 13
    others = [one for one in (receiving(cache, tokens) for _ in range(3)) if one is not None]
    known = np.concatenate((OWN, np.arange(TOTAL - len(OWN), dtype=np.int32)))
    for end in range(len(OWN) + 1, TOTAL + 1):
        at = np.array([end - 1], np.int64), np.array([end], np.int64)
        while not cache.fits(*at):
            assert cache.progress.wait(), f"no page for token {end} beside {len(others)} others"
        cache.extend(np.array([row], np.int32), *at)
        if not end % PAGE:
            cache.commit(row, known[:end])
        cache.check()
    cache.release(row, known)
    for other in others:
        cache.drop(other)
    cache.progress.settle()
    assert cache.progress.flush()
    assert all(pool.free == pool.total for pool in cache.tiers.pools.stats())


@pytest.mark.parametrize("tokens", [3, 9, 33])
def test_who_runs_reaches_its_end_beside_all_that_may_receive(tokens: int) -> None:
    who_runs_reaches_its_end_beside_all_that_may_receive(tokens)


def test_one_that_leaves_so_much_is_let_in() -> None:
    cache = cache_of(DEVICE, HOST, rows=4, longest=TOTAL)
    computed(cache, OWN, TOTAL)
    cache.progress.settle()
    assert receiving(cache, 33) is None
    assert receiving(cache, 8) is not None


SAME = np.arange(14, dtype=np.int32)
SELECTED = GroupId(1)


def both_have_the_same(*, ok: bool) -> tuple[KVCache, int, int]:
    """One computes what another one receives on the host, and its pages are being saved when the
    other's come. ``ok``: whether the copies will succeed. Both rows, the computing one first."""
    cache = cache_of((60, 15), (60, 40), rows=3, longest=TOTAL, ok=ok)
    mine = cache.admission.admit(asking(SAME, total=20))
    assert isinstance(mine, Admission)
    theirs = cache.admission.admit(replace(asking(SAME, total=20), receives=True))
    assert isinstance(theirs, Admission)
    assert not theirs.computed
    reserved = cache.hand_off.reserve(theirs.row, len(SAME))
    assert sum(len(part.pages) for part in reserved.groups if part.tier) == len(SAME) // PAGE
    at = np.array([mine.row], np.int32)
    for start in range(0, len(SAME), CHUNK):
        end = min(start + CHUNK, len(SAME))
        cache.extend(at, np.array([start]), np.array([end]))
        cache.commit(mine.row, SAME[:end])
    cache.prefilled(mine.row, len(SAME), 20)
    cache.progress.tick()
    host = cache.tiers.pools.tiers[1][SELECTED]
    assert host.available() == 40 - 2 * len(SAME) // PAGE, "they are not being saved"
    cache.hand_off.received(theirs.row, SAME)
    cache.prefilled(theirs.row, len(SAME), 20)
    return cache, mine.row, theirs.row


def what_is_being_saved_as_it_comes_is_read_on_the_device(*, ok: bool) -> None:
    """The tree keeps its own page, and what has come is given back; when the copy has ended, well
    or not, whoever received reads where the page is."""
    cache, mine, theirs = both_have_the_same(ok=ok)
    table, places = cache.beside[0].pages(SELECTED), cache.beside[0].spilled[SELECTED]
    pages = len(SAME) // PAGE
    assert (table[theirs, :pages] == table[mine, :pages]).all()
    assert (places.host[theirs] == NONE).all()
    assert not cache.hand_off.is_loading(theirs)
    cache.check()
    cache.release(mine, SAME)
    cache.check()
    for end in range(len(SAME) + 1, 21):
        at = np.array([end - 1], np.int64), np.array([end], np.int64)
        while not cache.fits(*at):
            assert cache.progress.wait()
        cache.extend(np.array([theirs], np.int32), *at)
        cache.commit(theirs, np.arange(end, dtype=np.int32))
        cache.progress.settle()
        cache.check()
        away = places.host[theirs, :pages] != NONE
        assert away.all() == ok
        assert ((table[theirs, :pages] == NONE) == away).all()
    cache.release(theirs, np.arange(20, dtype=np.int32))
    cache.progress.settle()
    assert cache.progress.flush()
    assert all(pool.free == pool.total for pool in cache.tiers.pools.stats())


@pytest.mark.parametrize("ok", [True, False])
def test_what_is_being_saved_as_it_comes_is_read_on_the_device(ok: bool) -> None:
    what_is_being_saved_as_it_comes_is_read_on_the_device(ok=ok)


def test_who_comes_first_leaves_room_where_it_may_come_in_spilled() -> None:
    """It was retracted and waits for another engine. All of it fills the device, its buffer does
    not: nobody else waits for that, or is spilled for it."""
    cache = cache_of((60, 16), (60, 60), rows=4, longest=TOTAL)
    computed(cache, OWN[:8], 10)
    cache.progress.settle()
    long = asking(np.arange(24, dtype=np.int32), again=True, total=26)
    short = asking(np.arange(200, 204, dtype=np.int32), total=6)
    found = cache.admission.admit(replace(short, ahead=(replace(long, receives=True),)))
    assert isinstance(found, Admission)
    assert cache.tiers.pools.counters.spilled == 0
    cache.check()


@pytest.mark.parametrize(("use", "pages"), [(CacheUse.ALL, 8), (CacheUse.NOTHING, 16)])
def test_who_comes_first_finds_the_least_that_it_can_come_in_with(
    use: CacheUse, pages: int
) -> None:
    """Its buffer and the pages that it writes, or, of one that is apart, all of its pages."""
    long = asking(np.arange(24, dtype=np.int32), again=True, total=26)
    ahead = (replace(long, receives=True, use=use),)
    short = asking(np.arange(200, 204, dtype=np.int32), total=6)
    answers = [
        cache_of((60, count), (60, 60), rows=4, longest=TOTAL).admission.admit(
            replace(short, ahead=ahead)
        )
        for count in (pages - 1, pages)
    ]
    assert [isinstance(answer, Admission) for answer in answers] == [False, True]
