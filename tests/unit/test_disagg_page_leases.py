"""Pages that a remote writer may touch stay leased until it has said so or is behind a fence."""

import numpy as np
import pytest

from stratakv.cache.footprint import GroupPages, TransferPages
from stratakv.core.ids import GroupId, RequestId
from stratakv.disagg.page_leases import PageLeases, Writer
from stratakv.disagg.transport import PeerId

ONE, TWO = PeerId("one"), PeerId("two")


def pages(*ids):
    found = np.array(ids, np.int32)
    return TransferPages(100, (GroupPages(GroupId(0), 0, found), GroupPages(GroupId(1), 3, found)))


def writer(session="r", rank=0, generation=1):
    return Writer(RequestId(session), rank, generation)


@pytest.fixture
def leases():
    return PageLeases()


def lease(leases, session="r", ranks=(ONE, TWO), deadline_s=10.0, generation=1, ids=(1, 2)):
    writers = {writer(session, rank, generation): peer for rank, peer in enumerate(ranks)}
    found = pages(*ids)
    leases.lease(RequestId(session), found, writers, deadline_s)
    return found


def test_pages_are_free_when_the_last_writer_has_finished(leases):
    leased = lease(leases)
    assert leases.acknowledge(writer(rank=0)) is None
    assert leases.acknowledge(writer(rank=1)) is leased
    assert not leases


def test_who_says_it_twice_counts_once(leases):
    lease(leases)
    assert leases.acknowledge(writer(rank=0)) is None
    assert leases.acknowledge(writer(rank=0)) is None
    assert len(leases) == 1
    assert leases.counts().ignored == 1


@pytest.mark.parametrize("wrong", [{"generation": 0}, {"rank": 2}, {"session": "another"}])
def test_a_word_of_somebody_else_frees_nothing(leases, wrong):
    lease(leases, ranks=(ONE,))
    assert leases.acknowledge(writer(**wrong)) is None
    assert len(leases) == 1


def test_a_late_word_of_an_attempt_that_is_over_does_not_free_the_next_one(leases):
    lease(leases, ranks=(ONE,))
    leases.acknowledge(writer())
    again = lease(leases, ranks=(ONE,), generation=2)
    assert leases.acknowledge(writer(generation=1)) is None
    assert leases.acknowledge(writer(generation=2)) is again


def test_a_fence_counts_for_all_writers_behind_it_and_no_other(leases):
    both, mine = lease(leases), lease(leases, "mine", (ONE, ONE))
    theirs = lease(leases, "theirs", (TWO,))
    assert leases.disconnected(ONE) == {RequestId("mine"): mine}
    assert leases.disconnected(ONE) == {}
    found = leases.disconnected(TWO)
    assert found == {RequestId("r"): both, RequestId("theirs"): theirs}
    assert not leases


def test_what_a_lost_peer_may_write_is_in_quarantine_at_once():
    leases = PageLeases()
    lease(leases)
    theirs = lease(leases, "theirs", (TWO,), ids=(7,))
    leases.lost(ONE)
    leases.lost(ONE)
    counts = leases.counts()
    assert (counts.overdue, counts.quarantined[GroupId(0)], counts.leased[GroupId(0)]) == (0, 2, 3)
    assert leases.expire(10.0) == {ONE, TWO}, "a writer that is there yet is torn down in time"
    assert leases.disconnected(ONE) == {}
    assert leases.disconnected(TWO)[RequestId("theirs")] is theirs
    assert not leases


def test_time_frees_nothing_but_puts_in_quarantine_and_names_whom_to_tear_down(leases):
    leased = lease(leases)
    lease(leases, "later", (TWO,), deadline_s=20.0, ids=(7,))
    assert leases.expire(9.9) == frozenset()
    leases.acknowledge(writer(rank=1))
    assert leases.expire(10.0) == {ONE}
    assert leases.expire(11.0) == frozenset()
    counts = leases.counts()
    assert counts.leased == {GroupId(0): 3, GroupId(1): 3}
    assert counts.quarantined == {GroupId(0): 2, GroupId(1): 2}
    assert leases.disconnected(ONE) == {RequestId("r"): leased}
    counts = leases.counts()
    assert (counts.overdue, dict(counts.quarantined)) == (1, {})
    assert counts.leased == {GroupId(0): 1, GroupId(1): 1}


def test_a_word_that_comes_after_the_deadline_still_counts(leases):
    leased = lease(leases, ranks=(ONE,))
    leases.expire(99.0)
    assert leases.acknowledge(writer()) is leased


@pytest.mark.parametrize("writers", [{}, {writer("another"): ONE}])
def test_a_lease_without_a_writer_of_its_own_is_a_bug(leases, writers):
    with pytest.raises(AssertionError):
        leases.lease(RequestId("r"), pages(1), writers, 1.0)
    lease(leases)
    with pytest.raises(AssertionError):
        lease(leases)


def test_a_writer_that_goes_on_has_its_time_anew(leases):
    lease(leases, deadline_s=10.0)
    leases.extend(RequestId("r"), 20.0)
    assert leases.expire(15.0) == frozenset()
    assert leases.expire(20.0) == {ONE, TWO}
