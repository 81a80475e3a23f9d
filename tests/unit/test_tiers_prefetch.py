"""Prefetches of requests that wait: each way to lose what storage has has its own reason, buffers
stay taken until their I/O has ended, and one request asks for what several wait for.
"""

import logging

import pytest

from stratakv.agreement import ballot
from stratakv.core.ids import GroupId
from stratakv.policy.prefetch_pace import BestEffort, Timeout
from stratakv.policy.prefetch_reasons import Reason
from stratakv.spec.retention import KeepBoundary, KeepWindow
from stratakv.storage.backend import ObjectKey
from stratakv.storage.io_jobs import Kind
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.specs import small_spec
from stratakv.testing.storage_faults import Faults, FaultyBackend
from stratakv.testing.tree_books import HOST
from stratakv.tiers.prefetch.operations import HUNG_S
from stratakv.tiers.prefetch.prefetcher import GRACE_S
from tests.tier_bench import Bench, Store, policy_of

FULL = small_spec([], page_tokens=2)
WINDOW = small_spec([KeepWindow(4)], page_tokens=2)
STATE = small_spec([KeepBoundary()], page_tokens=2)
PROMPT, OTHER, THIRD = 1, 2, 3


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="stratakv")


@pytest.fixture
def benches():
    made = []

    def make(spec, held=(), faults=None, **settings):
        bench = Bench(spec, **settings)
        made.append(bench)
        gate = Store(spec, *held)
        return bench.attach(FaultyBackend(gate, faults) if faults else gate, gate)

    yield make
    for bench in made:
        bench.close()


def over(bench, request="r"):
    """The request goes without anything, and nothing is left of it."""
    assert bench.admitted(request, bench.match(PROMPT, 4).end) is None or bench.hits()
    bench.settle()
    bench.check()
    assert not bench.tree.leases, "a hold was never released"
    assert bench.idle()


def test_a_whole_prompt_lands_and_is_a_hit(benches):
    bench = benches(WINDOW)
    bench.fill(PROMPT, 4)
    bench.fetch("r", PROMPT, 4)
    assert bench.match(PROMPT, 4).end == 4
    bench.landed(PROMPT, 4)
    over(bench)
    assert bench.lost() == {}
    assert bench.hits() == 4


@pytest.mark.parametrize("spec", [FULL, WINDOW, STATE], ids=["full", "window", "state"])
def test_a_prompt_of_more_ends_than_a_ballot_carries_lands_whole(benches, monkeypatch, spec):
    """Also where only its last end can be used, as of a state."""
    monkeypatch.setattr(ballot, "FLAGS", (64, 0, 3, 3, 1024, 0, 0))
    bench = benches(spec)
    bench.fill(PROMPT, 8)
    bench.fetch("r", PROMPT, 8)
    assert bench.match(PROMPT, 8).end == 8
    bench.landed(PROMPT, 8)
    assert bench.admitted("r", 8)
    assert bench.hits() == 8


# -- the reasons ---------------------------------------------------------------------------------


def test_below_the_threshold(benches):
    bench = benches(FULL, policy=policy_of(FULL, threshold=3))
    bench.fill(PROMPT, 2)
    bench.fetch("r", PROMPT, 4)
    assert bench.backend.reads == []
    over(bench)
    assert bench.lost() == {Reason.BELOW_THRESHOLD: 2}


def test_rate_limited_by_what_is_in_flight(benches):
    bench = benches(FULL, held=["contains", "read"], policy=policy_of(FULL, budget=5))
    bench.fill(PROMPT, 4)
    bench.fill(OTHER, 3)
    bench.start("other", OTHER, 3)  # three of five pages are in flight when the second comes
    bench.start("r", PROMPT, 4)
    bench.backend.let("contains", 2)
    bench.answered_all(Kind.QUERY, 2)
    assert bench.abandoned() == {Reason.RATE_LIMITED: 1}
    assert bench.admitted("r", 0) is None
    bench.backend.let("read", 9)
    bench.settle()
    bench.forget("other")
    assert bench.lost() == {Reason.RATE_LIMITED: 4, Reason.ABORTED: 3}


def test_a_budget_that_is_used_up_puts_a_question_off_until_there_is_some(benches):
    bench = benches(FULL, held=["read"], policy=policy_of(FULL, budget=3, retry_steps=2))
    bench.fill(PROMPT, 4)
    bench.fill(OTHER, 3)
    bench.start("other", OTHER, 3)
    bench.answered()
    bench.start("r", PROMPT, 4)
    assert bench.abandoned() == {Reason.RATE_LIMITED: 1}
    assert not bench.must_wait("r")
    for _ in range(5):
        bench.tick()
    assert ("contains", 4) not in bench.backend.calls, "it asked all the same"
    bench.backend.let("read", 9)
    for _ in range(3):
        bench.settle()
    assert bench.match(PROMPT, 4).end == 4


def test_no_capacity_on_the_host(benches):
    bench = benches(FULL, host=4)
    bench.fill(PROMPT, 3)
    bench.block([4])
    bench.fetch("r", PROMPT, 4)
    assert bench.backend.reads == []
    assert bench.admitted("r", 0) is None
    assert bench.lost() == {Reason.HOST_CAPACITY: 3}


def test_a_window_that_storage_has_not_whole(benches):
    bench = benches(WINDOW)
    bench.fill(PROMPT, 4, groups=[0])
    bench.fill(PROMPT, 2)
    bench.fetch("r", PROMPT, 4)
    over(bench)
    assert bench.lost() == {Reason.WINDOW_INCOMPLETE: 2}
    assert bench.hits() == 2


def test_a_state_that_storage_has_not(benches):
    bench = benches(STATE)
    bench.fill(PROMPT, 4, groups=[0])
    bench.fetch("r", PROMPT, 4)
    over(bench)
    assert bench.lost() == {Reason.STATE_MISSING: 4}


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (Faults(read_misses=1.0), Reason.EVICTED),
        (Faults(read_corrupt=1.0), Reason.CORRUPT),
        (Faults(read_fails=1.0), Reason.IO_ERROR),
    ],
    ids=["evicted", "corrupt", "failed"],
)
def test_what_was_there_does_not_arrive(benches, faults, reason):
    bench = benches(WINDOW, faults=faults)
    bench.fill(PROMPT, 4)
    bench.fetch("r", PROMPT, 4)
    assert bench.abandoned() == {reason: 1}
    assert not len(bench.tree)
    assert bench.free() == bench.hosts
    over(bench)
    assert bench.lost() == {reason: 4}


def test_an_object_that_left_between_question_and_read_cuts_the_prefix(benches):
    bench = benches(FULL, held=["read"])
    names = bench.fill(PROMPT, 4)
    bench.start("r", PROMPT, 4)
    bench.answered()
    bench.backend.wait_entered()
    bench.backend.remove(names[2:])
    bench.backend.let("read")
    bench.settle()
    assert bench.match(PROMPT, 4).end == 2
    over(bench)
    assert bench.lost() == {Reason.EVICTED: 2}
    assert bench.hits() == 2


def test_a_store_that_fails_altogether(benches):
    bench = benches(FULL, faults=Faults(call_fails=1.0))
    bench.fill(PROMPT, 4)
    bench.fetch("r", PROMPT, 4)
    assert bench.abandoned() == {Reason.IO_ERROR: 1}
    over(bench)
    assert bench.lost() == {}  # nothing was found


def test_a_request_that_is_admitted_before_its_pages_arrive(benches):
    bench = benches(FULL, held=["read"], policy=policy_of(FULL, stop=BestEffort()))
    bench.fill(PROMPT, 4)
    bench.start("r", PROMPT, 4)
    bench.answered()
    assert bench.admitted("r", 0) is None
    bench.backend.let("read")
    over(bench)
    assert bench.lost() == {Reason.DEADLINE: 4}


def test_a_deadline_keeps_what_has_arrived(benches):
    bench = benches(
        FULL, held=["read"], policy=policy_of(FULL, stop=Timeout(base_s=1.0)), batch_pages=1
    )
    bench.fill(PROMPT, 4)
    bench.start("r", PROMPT, 4)
    bench.answered()
    assert bench.must_wait("r")
    bench.clock.advance(2.0)
    bench.backend.wait_entered()
    assert bench.must_wait("r"), "for what is being read right now"
    bench.backend.let("read")
    bench.settle()
    assert not bench.must_wait("r")
    assert bench.match(PROMPT, 4).end == 1
    assert bench.admitted("r", 1).end == 1
    assert bench.lost() == {Reason.DEADLINE: 3}
    assert bench.hits() == 1


@pytest.mark.parametrize("moment", ["probing", "fetching", "landed"])
def test_a_request_that_ends_first(benches, moment):
    bench = benches(FULL, held=["contains", "read"])
    bench.fill(PROMPT, 4)
    bench.start("r", PROMPT, 4)
    bench.backend.wait_entered()
    if moment != "probing":
        bench.backend.let("contains")
        bench.answered()
        bench.backend.wait_entered()
    if moment == "landed":
        bench.backend.let("read")
        bench.settle()
    bench.forget("r")
    taken = {"probing": 0, "fetching": 4, "landed": 4}[moment]
    assert bench.free() == [bench.hosts[0] - taken], "buffers are the I/O's until it ends"
    assert bench.tier.busy == (moment != "landed")
    assert not bench.tree.leases
    bench.check()
    bench.backend.let("contains")
    bench.backend.let("read")
    bench.settle()
    bench.check()
    assert bench.idle()
    assert bench.free() == [bench.hosts[0] - (4 if moment == "landed" else 0)]
    assert bench.lost() == {Reason.ABORTED: 4}
    assert bench.hits() == 0


def test_what_landed_and_was_not_loaded(benches):
    bench = benches(FULL)
    bench.fill(PROMPT, 4)
    bench.fetch("r", PROMPT, 4)
    bench.admitted("r", 1)
    assert bench.lost() == {Reason.NOT_LOADED: 3}
    assert bench.hits() == 1


# -- several requests ----------------------------------------------------------------------------


def test_followers_of_one_prefix_fetch_once(benches):
    bench = benches(WINDOW, held=["contains"])
    names = bench.fill(PROMPT, 4)
    for request in "abc":
        bench.start(request, PROMPT, 4)
    bench.backend.let("contains", 9)
    bench.settle()
    bench.tick()
    bench.settle()
    needed = [name for name in names if name.group == 0] + names[-3::2]
    assert sorted(bench.backend.reads, key=str) == sorted(needed, key=str)
    assert all(not bench.must_wait(request) for request in "abc")
    assert bench.admitted("a", 4).end == 4
    assert bench.admitted("b", 4) is None
    bench.forget("c")
    assert bench.hits() == 4
    assert bench.lost() == {}
    over(bench, "nobody")


def test_a_follower_waits_for_its_leader_and_asks_itself_when_that_is_gone(benches):
    bench = benches(FULL, held=["contains"])
    bench.fill(PROMPT, 4)
    bench.start("leader", PROMPT, 4)
    bench.start("follower", PROMPT, 4)
    assert bench.must_wait("follower")
    bench.forget("leader")
    assert bench.must_wait("follower"), "it asks itself"
    bench.backend.let("contains", 2)
    bench.settle()
    assert bench.admitted("follower", 4).end == 4
    assert bench.hits() == 4


# -- a store that hangs ---------------------------------------------------------------------------


def test_a_store_that_hangs_holds_a_request_until_its_grace_is_over(benches):
    bench = benches(FULL, held=["read"], policy=policy_of(FULL, stop=Timeout(base_s=1.0)))
    bench.fill(PROMPT, 4)
    bench.start("r", PROMPT, 4)
    bench.answered()
    bench.clock.advance(0.99)
    assert bench.must_wait("r")
    bench.clock.advance(0.02)  # and a little for its length
    assert bench.must_wait("r")
    bench.clock.advance(GRACE_S - 0.01)
    assert bench.must_wait("r")
    bench.clock.advance(0.02)
    assert not bench.must_wait("r")
    assert bench.admitted("r", 0) is None
    assert bench.free() == [bench.hosts[0] - 4]
    bench.backend.let("read")
    bench.settle()
    assert bench.free() == bench.hosts
    assert bench.lost() == {Reason.DEADLINE: 4}


def test_a_question_without_an_answer_holds_nobody_behind_the_deadline(benches):
    bench = benches(FULL, held=["contains"], policy=policy_of(FULL, stop=Timeout(base_s=1.0)))
    bench.start("r", PROMPT, 4)
    assert bench.must_wait("r")
    bench.clock.advance(1.0)
    assert not bench.must_wait("r")


def test_a_store_that_is_known_to_hang_holds_nobody_who_comes_later(benches):
    bench = benches(FULL, held=["contains"], policy=policy_of(FULL, stop=Timeout(base_s=1.0)))
    bench.start("r", PROMPT, 4)
    bench.clock.advance(1.0)
    assert not bench.must_wait("r")
    bench.clock.advance(GRACE_S + 0.01)  # one batch may take that long
    bench.start("soon", THIRD, 4)
    assert bench.must_wait("soon")
    bench.clock.advance(HUNG_S)
    bench.start("next", OTHER, 4)
    assert not bench.must_wait("next")


# -- what it says of its work ---------------------------------------------------------------------


def test_from_storage_names_the_pages_that_came(benches):
    """The first two pages and the window's second were on the host before."""
    bench = benches(WINDOW)
    bench.fill(PROMPT, 4)
    bench.tree.leases.release(bench.serve(PROMPT, 2))
    bench.settle()
    bench.backend.reads.clear()
    bench.fetch("r", PROMPT, 4)
    came = bench.admitted("r", 4)
    assert (came.base, came.end) == (2, 4)
    assert [pages.tolist() for pages in came.pages] == [[2, 3], [2, 3]]
    keys = bench.keys(PROMPT, 4)
    assert set(bench.backend.reads) == {
        ObjectKey(keys[at], GroupId(group)) for at in (2, 3) for group in (0, 1)
    }
    assert bench.hits() == 2


def test_what_a_fetch_counts_on_stays_on_the_host(benches):
    bench = benches(FULL, host=6, held=["read"])
    bench.fill(PROMPT, 4)
    bench.tree.leases.release(bench.serve(PROMPT, 2))
    bench.settle()
    bench.start("r", PROMPT, 4)
    bench.answered()
    assert bench.pools.make_room(HOST, GroupId(0), 6) == 2, "the prefix is held"
    bench.backend.let("read")
    bench.settle()
    assert bench.match(PROMPT, 4).end == 4
    assert bench.pools.make_room(HOST, GroupId(0), 6) == 2, "what landed is held"
    bench.admitted("r", 4)
    assert bench.pools.make_room(HOST, GroupId(0), 6) == 6


def test_a_request_that_ends_stops_its_reads(benches):
    """What one batch has begun comes; the rest is not read for nobody."""
    bench = benches(FULL, held=["read"], batch_pages=1)
    bench.fill(PROMPT, 4)
    bench.start("r", PROMPT, 4)
    bench.answered()
    bench.backend.wait_entered()
    bench.forget("r")
    bench.backend.let("read", 9)
    bench.settle()
    assert len(bench.backend.reads) == 1
    assert bench.idle()


def test_a_store_is_left_also_with_more_answers_than_a_ballot_carries(benches, monkeypatch):
    monkeypatch.setattr(ballot, "FLAGS", (64, 0, 3, 3, 1024, 0, 0))
    bench = benches(FULL, held=["read"])
    bench.fill(PROMPT, 8)
    bench.start("r", PROMPT, 8)
    while bench.worker.ready(Kind.FETCH) == bench.worker.left(Kind.FETCH) == 0:
        bench.tick()
    votes = []
    vote = bench.tier.vote

    def voted(cast):
        votes.append(cast)
        assert len(votes) < 9, "it goes round in circles"
        vote(cast)

    bench.tier.vote = voted
    bench.backend.let("read", 9)
    bench.tier.close(PATIENCE_S)
    assert 3 <= len(votes) <= 4
    bench.check()
