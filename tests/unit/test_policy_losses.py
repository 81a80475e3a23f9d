"""Each page that was known and is no hit has one reason: the last obstacle it met."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stratakv.policy.losses import (
    CAUSES,
    NOTHING_KNOWN,
    Declined,
    Known,
    LossCause,
    bill,
    bill_aborted,
    label,
)
from stratakv.policy.prefetch_reasons import Reason, Tally

THRESHOLD, CAPACITY = Declined.BELOW_THRESHOLD, Declined.DEVICE_CAPACITY


def known(usable, anchor, whole=None, device=0, *, states_only=False, gone=()):
    whole = anchor if whole is None else whole
    return Known(usable, anchor, whole, device, states_only, np.array(gone, np.bool_))


def lost(found):
    assert found.known == found.hits + sum(pages for _, pages in found.lost)
    return dict(found.lost)


def test_what_was_a_hit_has_no_reason():
    found = bill(known(8, 8, device=8), 8, CAPACITY, None)
    assert (found.known, found.hits, found.lost) == (8, 8, ())


def test_behind_the_last_usable_end_it_is_the_other_groups():
    assert lost(bill(known(3, 8, device=6), 3, CAPACITY, None)) == {
        LossCause.DEVICE_WINDOW_INCOMPLETE: 3,
        LossCause.HOST_WINDOW_INCOMPLETE: 2,
    }
    assert lost(bill(known(3, 8, device=2, states_only=True), 3, CAPACITY, None)) == {
        LossCause.HOST_STATE_MISSING: 5
    }


def test_what_a_load_would_have_brought_was_declined_whatever_lies_on_the_device():
    of = known(6, 8, device=8)
    assert lost(bill(of, 2, THRESHOLD, None)) == {
        LossCause.HOST_BELOW_THRESHOLD: 4,
        LossCause.DEVICE_WINDOW_INCOMPLETE: 2,
    }
    assert lost(bill(of, 2, CAPACITY, None))[LossCause.HOST_DEVICE_CAPACITY] == 4


def test_the_page_of_the_last_token_is_lost_where_it_lies():
    assert lost(bill(known(8, 8, 9, 9), 8, CAPACITY, None)) == {LossCause.DEVICE_LAST_TOKEN: 1}
    assert lost(bill(known(8, 8, 9, 8), 8, CAPACITY, None)) == {LossCause.HOST_LAST_TOKEN: 1}


def test_pages_that_have_left_are_lost_where_their_last_copy_was():
    of = known(2, 2, device=2, gone=[True, True, False])
    assert lost(bill(of, 2, CAPACITY, None)) == {
        LossCause.DEVICE_EVICTED: 1,
        LossCause.HOST_EVICTED: 2,
    }


def test_storages_reasons_are_from_the_deepest_page_up():
    tally = Tally(2, 9).cut(7, Reason.CORRUPT).cut(4, Reason.DEADLINE)
    assert lost(bill(known(4, 4), 4, CAPACITY, tally)) == {Reason.CORRUPT: 2, Reason.DEADLINE: 3}


def test_storages_reason_counts_before_what_is_only_missing():
    """The anchor is there to 6 and was there to 8: the fetch would have made all of it usable."""
    tally = Tally(2, 8).cut(2, Reason.IO_ERROR)
    of = known(2, 6, device=6, gone=[True, True])
    assert lost(bill(of, 2, CAPACITY, tally)) == {Reason.IO_ERROR: 6}


def test_what_landed_and_was_not_loaded_is_the_hosts_loss():
    tally = Tally(2, 8).cut(2, Reason.NOT_LOADED)
    assert lost(bill(known(8, 8), 2, CAPACITY, tally)) == {LossCause.HOST_DEVICE_CAPACITY: 6}


def test_what_others_have_brought_meanwhile_is_no_loss():
    tally = Tally(2, 8).cut(2, Reason.DEADLINE)
    found = bill(known(8, 8, device=8), 8, CAPACITY, tally)
    assert (found.known, found.lost) == (8, ())


def test_a_page_that_the_request_had_counted_on_and_nobody_remembers_has_left_the_device():
    tally = Tally(5, 7).cut(5, Reason.DEADLINE)
    assert lost(bill(known(2, 2), 2, CAPACITY, tally)) == {
        LossCause.DEVICE_EVICTED: 3,
        Reason.DEADLINE: 2,
    }


def test_one_that_leaves_before_its_turn_loses_what_is_there():
    tally = Tally(2, 8).cut(6, Reason.CORRUPT).cut(2, Reason.ABORTED)
    of = known(4, 4, 5, 3, gone=[])
    assert lost(bill_aborted(of, tally)) == {
        LossCause.DEVICE_ABORTED: 3,
        LossCause.HOST_ABORTED: 2,
        Reason.ABORTED: 1,
        Reason.CORRUPT: 2,
    }
    assert lost(bill_aborted(known(0, 0, gone=[True]), None)) == {}


def test_of_a_prompt_that_nobody_looked_up_only_storage_knew_anything():
    tally = Tally(0, 3).cut(1, Reason.DEADLINE)
    assert bill(NOTHING_KNOWN, 0, CAPACITY, None) == bill_aborted(NOTHING_KNOWN, None)
    assert bill(NOTHING_KNOWN, 0, CAPACITY, None).known == 0
    assert lost(bill_aborted(NOTHING_KNOWN, tally)) == {
        LossCause.DEVICE_EVICTED: 1,
        Reason.DEADLINE: 2,
    }


def test_these_are_all_causes_by_tier_and_reason():
    """As they are told: who counts them finds them by these words."""
    labels = [label(cause) for cause in CAUSES]
    assert labels == [
        ("device", "evicted"), ("host", "evicted"),
        ("device", "window_incomplete"), ("host", "window_incomplete"),
        ("device", "state_missing"), ("host", "state_missing"),
        ("device", "last_token"), ("host", "last_token"),
        ("host", "below_threshold"), ("host", "device_capacity"),
        ("device", "retracted"), ("device", "aborted"), ("host", "aborted"),
        ("storage", "below_threshold"), ("storage", "rate_limited"), ("storage", "host_capacity"),
        ("storage", "window_incomplete"), ("storage", "state_missing"),
        ("storage", "shard_disagreement"), ("storage", "evicted"), ("storage", "corrupt"),
        ("storage", "io_error"), ("storage", "deadline"), ("storage", "aborted"),
        ("storage", "not_loaded"),
    ]  # fmt: skip
    assert label(LossCause.HOST_EVICTED) == ("host", "evicted")
    assert label(Reason.EVICTED) == ("storage", "evicted")


ENDS = st.lists(st.integers(0, 12), min_size=4, max_size=4).map(sorted)
REASONS = st.lists(st.tuples(st.integers(0, 20), st.sampled_from(list(Reason))), max_size=4)


@given(ENDS, st.booleans(), st.booleans(), st.lists(st.booleans(), max_size=4), REASONS, st.data())
def test_every_known_page_is_a_hit_or_lost_once(ends, last, states_only, gone, cuts, data):
    hit, usable, anchor, far = ends
    whole = anchor + last
    of = known(
        usable, anchor, whole, data.draw(st.integers(0, whole)), states_only=states_only,
        gone=[] if last else gone,
    )  # fmt: skip
    tally = Tally(data.draw(st.integers(0, far)), far)
    for end, reason in cuts:
        tally = tally.cut(end, reason)
    for storage in (None, tally):
        end = 0 if storage is None else storage.base + storage.found
        found = bill(of, hit, data.draw(st.sampled_from(Declined)), storage)
        lost(found)
        assert found.hits == hit
        assert found.known == max(whole, anchor + len(of.gone), end)
        left = bill_aborted(of, storage)
        lost(left)
        assert (left.hits, left.known) == (0, max(whole, end))
