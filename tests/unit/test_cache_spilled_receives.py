"""Requests that receive host pages leave room there for the one that runs, up to its last token."""

import numpy as np
import pytest

from stratakv.cache.kv_cache import KVCache
from stratakv.cache.prices import AdmissionRequest
from stratakv.cache.records import Admission
from stratakv.core.page_keys import PageHasher
from tests.cache_machine import NAMESPACE
from tests.unit.test_cache_spilled_resume import PAGE, cache_of, computed

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
