"""What crosses the cache's boundary, and the sums over it."""

from itertools import product

import numpy as np
import pytest

from stratakv.cache.footprint import GroupPages, TransferPages
from stratakv.cache.losses import LossBook, Missed
from stratakv.cache.prices import AdmissionLimits
from stratakv.cache.records import CachedTokens, CacheUse, TierTokens
from stratakv.core.ids import NONE, GroupId
from stratakv.policy.load_back import LoadBackPolicy
from stratakv.policy.losses import Declined, Known, LossCause
from stratakv.policy.prefetch_reasons import Reason, Tally
from tests.engines import cached


def test_all_that_was_cached_is_the_sum_over_the_tiers():
    for device, host, storage in product((0, 4, 8), repeat=3):
        found = cached((0,), device=device, host=host, storage=storage)
        assert found.total == device + host + storage
        assert TierTokens(device, host, storage).total == device + host + storage


def test_what_storage_brought_is_no_more_than_what_the_host_had():
    before = cached((4, 0), (8, 12), device=4, host=8)
    for tokens, first, second in product((0, 4, 8, 12), repeat=3):
        found = before.fetched(tokens, (first, second))
        storage, groups = min(tokens, 8), (min(first, 8), min(second, 12))
        assert (found.device, found.host, found.storage) == (4, 8 - storage, storage)
        assert found.groups_device == (4, 0)
        assert found.groups_host == (8 - groups[0], 12 - groups[1])
        assert found.groups_storage == groups
        assert found.total == before.total
        assert found.use is before.use


def test_a_record_says_all_of_its_use_and_of_no_other_engine_unless_given():
    plain = CachedTokens(
        device=0, host=0, storage=0, groups_device=(), groups_host=(), groups_storage=()
    )
    assert plain.use is CacheUse.ALL
    assert plain.prefill is None
    assert CacheUse.READ | CacheUse.STORE is CacheUse.ALL
    assert CacheUse.NOTHING not in (CacheUse.READ, CacheUse.STORE)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_who_decodes_is_ahead_by_a_token_a_step_and_who_computes_by_a_chunk(steps):
    limits = AdmissionLimits(
        chunk_tokens=8, reserve_tokens=0, load_back=LoadBackPolicy(threshold_tokens=1),
        reuse=True, steps_at_once=steps,
    )  # fmt: skip
    assert limits.ahead_tokens == 8 * steps
    assert [limits.ahead_of(left) for left in (0, 1, 2, 9)] == [steps, steps, 8 * steps, 8 * steps]


# -- losses --------------------------------------------------------------------------------------


def test_every_known_token_is_a_hit_or_lost_for_one_reason():
    book = LossBook(4)
    known = Known(3, 5, 5, 2, states_only=False, gone=np.zeros(0, np.bool_))
    for _ in range(2):
        book.admitted(Missed(known, Declined.DEVICE_CAPACITY), 1, None)
        book.check()
        book.left(known, None)
        book.check()
    book.retracted(7)
    book.retracted(5)
    book.check()
    assert book.lost[LossCause.DEVICE_RETRACTED] == 12
    assert book.hits == 2 * 4
    assert book.known == book.hits + sum(book.lost.values())
    assert book.known % 4 == 0
    assert sum(book.by_tier().values()) == sum(book.lost.values())
    once = LossBook(4)
    once.admitted(Missed(known, Declined.DEVICE_CAPACITY), 1, None)
    once.left(known, None)
    assert {cause: 2 * tokens for cause, tokens in once.lost.items()} == book.lost | {
        LossCause.DEVICE_RETRACTED: 0
    }
    book.lost[LossCause.DEVICE_RETRACTED] += 1
    with pytest.raises(AssertionError, match="a known token has no reason"):
        book.check()


def test_what_storage_had_and_did_not_bring_is_lost_for_its_reason():
    """It had two pages beyond the three that a load makes usable."""
    known = Known(3, 3, 3, 2, states_only=False, gone=np.zeros(0, np.bool_))
    tally = Tally(3, 3, ((Reason.DEADLINE, 2),))
    book = LossBook(4)
    book.admitted(Missed(known, Declined.DEVICE_CAPACITY), 3, tally)
    assert (book.known, book.hits, book.lost[Reason.DEADLINE]) == (5 * 4, 3 * 4, 2 * 4)
    book.left(known, tally)
    assert (book.known, book.hits, book.lost[Reason.DEADLINE]) == (10 * 4, 3 * 4, 4 * 4)
    book.check()


# -- pages that another engine fills -------------------------------------------------------------


def pages(tokens, *groups):
    """Group, first index and count of each; pages are named by their index, and ``100`` a group."""
    return TransferPages(
        tokens,
        tuple(
            GroupPages(
                GroupId(group),
                first,
                np.arange(count, dtype=np.int32) + max(0, first) + 100 * group,
            )
            for group, first, count in groups
        ),
    )


def pairs(here, there):
    return [(to.group, at.pages.tolist(), to.pages.tolist()) for at, to in here.paired(there)]


def test_pages_are_paired_by_their_index_whatever_else_lies_here():
    here = pages(20, (0, 0, 5), (1, 3, 2), (2, NONE, 1))
    assert pairs(here, here) == [
        (0, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), (1, [103, 104], [103, 104]), (2, [200], [200])
    ]  # fmt: skip
    assert pairs(here, pages(20, (0, 3, 2), (1, 3, 1), (2, NONE, 0))) == [
        (0, [3, 4], [3, 4]), (1, [103], [103])
    ]  # fmt: skip
    assert pairs(here, pages(20, (0, 2, 0), (1, 4, 1), (2, NONE, 1))) == [
        (1, [104], [104]), (2, [200], [200])
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (pages(19, (0, 0, 5), (1, 3, 2)), "20 tokens for 19"),
        (pages(20, (1, 0, 5), (0, 3, 2)), "groups in another order"),
        (pages(20, (0, NONE, 1), (1, 3, 2)), "a state for pages of tokens"),
        (pages(20, (0, 0, 5), (1, 2, 3)), "group 1: pages from 2 on, not 3"),
        (pages(20, (0, 0, 5), (1, 4, 2)), "group 1: too few pages"),
        (pages(20, (0, 0, 6), (1, 3, 2)), "group 0: too few pages"),
    ],
)
def test_what_is_not_here_cannot_be_sent(there, why):
    with pytest.raises(AssertionError, match=why):
        pairs(pages(20, (0, 0, 5), (1, 3, 2)), there)


def test_every_group_has_its_other_side():
    with pytest.raises(AssertionError, match="groups in another order"):
        pairs(pages(20, (0, 0, 5), (1, 3, 2)), pages(20, (0, 0, 5)))
