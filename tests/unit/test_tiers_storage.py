"""The storage tier as a whole: it comes, goes, is emptied, and closes, with work under way."""

import logging

import pytest

from stratakv.policy.prefetch_reasons import Reason
from stratakv.spec.retention import KeepWindow
from stratakv.storage.io_jobs import Kind
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.specs import small_spec
from tests.tier_bench import Bench, Store, StoredObserver

SPEC = small_spec([KeepWindow(2)], page_tokens=1)
PROMPT, OTHER = 1, 2


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="stratakv")


@pytest.fixture
def benches():
    made = []

    def make(held=(), **settings):
        bench = Bench(SPEC, **settings)
        made.append(bench)
        return bench.attach(Store(SPEC, *held))

    yield make
    for bench in made:
        bench.close()


def stored(bench):
    return bench.tier.stats(busy=False).pages["stored"]


def test_without_a_store_every_verb_does_nothing():
    bench = Bench(SPEC)
    lease = bench.serve(PROMPT, 4)
    bench.tier.persister.used(lease)
    bench.start("r", PROMPT, 4)
    assert not bench.must_wait("r")
    bench.tick("r")
    assert bench.admitted("r", 4) is None
    bench.forget("r")
    assert bench.tier.stats(busy=False) is None
    assert not bench.tier.busy
    assert not bench.tier.ready
    bench.tier.close(PATIENCE_S)


def test_two_stores_at_once_are_a_fault_of_ours(benches):
    bench = benches()
    with pytest.raises(AssertionError, match="is attached"):
        bench.tier.attach(bench.worker)


def test_detach_waits_for_what_is_being_written_and_begins_nothing_new(benches):
    bench = benches(held=["write"])
    bench.serve(PROMPT, 3)
    bench.tick()
    bench.backend.wait_entered()
    assert bench.tier.detach() is None
    lease = bench.serve(OTHER, 3)
    bench.tier.persister.used(lease)
    bench.start("r", 3, 4)
    bench.tick()
    assert bench.worker.stats.queued[Kind.QUERY] == 0
    assert bench.tier.detach() is None
    bench.backend.let("write", 9)
    bench.settle()
    assert bench.tier.detach() is bench.worker
    assert len(bench.backend.writes) == 5, "of the second prompt nothing was written"
    assert bench.tier.stats(busy=False) is None


def test_detach_waits_for_what_is_being_fetched(benches):
    bench = benches(held=["read"])
    bench.fill(PROMPT, 4)
    bench.start("r", PROMPT, 4)
    bench.answered()
    assert bench.tier.detach() is None
    bench.backend.let("read")
    bench.settle()
    assert bench.match(PROMPT, 4).end == 4, "it still lands"
    assert bench.tier.detach() is bench.worker
    assert bench.admitted("r", 4).end == 4


def test_a_detach_that_is_given_up_goes_on_as_before(benches):
    bench = benches(held=["write"])
    bench.serve(PROMPT, 3)
    bench.tick()
    assert bench.tier.detach() is None
    lease = bench.serve(OTHER, 3)
    bench.tier.keep()
    bench.tier.persister.used(lease)
    bench.backend.let("write", 9)
    bench.settle()
    assert stored(bench) == 10
    bench.start("r", 3, 2)
    assert bench.must_wait("r")
    bench.settle()


def test_what_took_a_row_during_a_detach_is_not_mistaken_for_what_was_stored(benches):
    bench = benches(held=["write"], host=4)
    bench.tree.leases.release(bench.serve(PROMPT, 3))
    bench.backend.let("write")
    bench.settle()
    bench.tree.leases.release(bench.serve(OTHER, 1))
    bench.tick()
    assert bench.tier.detach() is None
    nodes = len(bench.tree)
    for tier in (0, 1):  # the first prompt leaves, the second is being written
        bench.pools.execute(bench.tree.eviction.evict(tier, 0, 9))
    assert len(bench.tree) < nodes
    lease = bench.serve(3, 3)
    bench.tier.keep()
    bench.tier.persister.used(lease)
    bench.backend.let("write", 9)
    bench.settle()
    assert {name.page for name in bench.backend.writes} >= set(bench.keys(3, 3))


def test_force_gives_up_what_is_queued_but_not_what_has_begun(benches):
    bench = benches(held=["write"], batch_pages=1)
    bench.serve(PROMPT, 3)
    bench.tick()
    bench.backend.wait_entered()
    bench.serve(OTHER, 3)
    assert bench.tier.detach(force=True) is None
    bench.check()
    bench.backend.let("write", 9)
    bench.settle()
    assert bench.tier.detach(force=True) is bench.worker
    assert len(bench.backend.writes) == 1
    bench.check()


def test_force_stops_a_fetch_at_its_next_batch(benches):
    bench = benches(held=["read"], batch_pages=1)
    bench.fill(PROMPT, 4)
    bench.start("r", PROMPT, 4)
    bench.answered()
    bench.backend.wait_entered()
    assert bench.tier.detach(force=True) is None
    bench.backend.let("read", 9)
    bench.settle()
    assert len(bench.backend.reads) == 1
    bench.admitted("r", 0)
    assert bench.lost() == {Reason.DEADLINE: 4}
    assert bench.tier.detach() is bench.worker
    assert bench.free() == bench.hosts


def test_a_store_that_comes_back_gets_what_is_used(benches):
    bench = benches()
    lease = bench.serve(PROMPT, 3)
    bench.settle()
    worker = bench.tier.detach()
    bench.tier.attach(worker)
    bench.tick()
    assert stored(bench) == 5
    bench.tier.persister.used(lease)
    bench.settle()
    assert bench.tier.stats(busy=False).pages["present"] == 5, (
        "nothing is known of a store that comes"
    )


def test_a_store_that_is_emptied_is_filled_by_use(benches):
    bench = benches(held=["remove"])
    lease = bench.serve(PROMPT, 3)
    bench.settle()
    assert bench.tier.clear()
    assert bench.tier.busy
    assert bench.tier.detach() is None
    bench.tier.keep()
    bench.backend.let("remove")
    bench.settle()
    assert not bench.backend.contains(bench.backend.writes).any()
    bench.tier.persister.used(lease)
    bench.settle()
    assert stored(bench) == 10
    assert bench.backend.contains(bench.backend.writes).all()


def test_what_was_being_written_when_the_store_was_emptied_is_gone_with_it(benches):
    bench = benches(held=["write"])
    lease = bench.serve(PROMPT, 3)
    bench.tick()
    bench.backend.wait_entered()
    assert bench.tier.clear()
    bench.backend.let("write")
    bench.settle()
    assert not bench.backend.contains(bench.backend.writes).any()
    bench.tier.persister.used(lease)
    bench.backend.let("write")
    bench.settle()
    assert bench.backend.contains(bench.backend.writes).all()


def test_close_writes_what_is_queued_within_its_time(benches):
    bench = benches()
    bench.serve(PROMPT, 3)
    bench.tier.close(PATIENCE_S)
    assert len(bench.backend.writes) == 5
    assert bench.backend.closed == 1
    assert bench.tier.stats(busy=False) is None
    bench.check()


def test_close_gives_up_what_its_time_is_too_short_for(benches):
    bench = benches(held=["write"], batch_pages=1)
    bench.serve(PROMPT, 3)
    bench.tick()
    bench.backend.wait_entered()
    bench.tier.close(0.01)
    assert len(bench.backend.writes) == 1


def test_requests_outlive_the_store(benches):
    """One waits while the store goes: it is admitted, or ends, without it."""
    bench = benches(held=["contains"])
    bench.fill(PROMPT, 4)
    for request, prompt in (("r", PROMPT), ("follower", PROMPT), ("other", OTHER)):
        bench.start(request, prompt, 4)
    assert bench.tier.detach(force=True) is None
    bench.backend.let("contains", 9)
    bench.settle()
    assert bench.tier.detach() is bench.worker
    assert not any(bench.must_wait(request) for request in ("r", "follower", "other"))
    assert bench.admitted("r", 0) is None
    bench.forget("follower")
    bench.forget("other")
    assert not bench.tree.leases
    assert bench.free() == bench.hosts


def test_an_observer_of_the_cache_sees_a_store_that_is_emptied_or_leaves(benches):
    observer = StoredObserver()
    gone = observer.gone
    bench = benches(observer=observer)
    lease = bench.serve(PROMPT, 3)
    bench.settle()
    keys = bench.keys(PROMPT, 3)
    expected = [(0, set(keys)), (1, set(keys[1:]))]
    assert bench.tier.clear()
    assert gone == expected
    bench.settle()
    bench.tier.persister.used(lease)
    bench.settle()
    gone.clear()
    assert bench.tier.detach() is bench.worker
    assert gone == expected


def test_what_was_on_its_way_while_the_store_was_emptied_is_written_again(benches):
    bench = benches(held=["read"])
    bench.fill(PROMPT, 4)
    bench.start("r", PROMPT, 4)
    bench.answered()
    bench.backend.wait_entered()
    assert bench.tier.clear()
    bench.backend.let("read", 9)
    bench.settle()
    assert bench.admitted("r", 4).end == 4
    before = len(bench.backend.writes)
    bench.tier.persister.used(bench.tree.leases.hold_present(bench.keys(PROMPT, 4), 4, [0, 0]))
    bench.settle()
    assert len(bench.backend.writes) > before, "a mark stood for what is gone"


def test_nothing_is_written_until_a_clear_has_ended(benches):
    """Of several ranks another one's may come later, and would take the page away again."""
    bench = benches(held=["remove"])
    assert bench.tier.clear()
    bench.serve(PROMPT, 3)
    for _ in range(3):
        bench.tick()
    assert bench.worker.stats.queued[Kind.STORE] == 0
    assert bench.backend.writes == []
    bench.backend.let("remove")
    bench.settle()
    assert stored(bench) == 5


def test_nothing_is_written_until_the_last_of_several_clears_has_ended(benches):
    bench = benches(held=["remove"])
    assert bench.tier.clear()
    assert bench.tier.clear()
    bench.serve(PROMPT, 3)
    bench.backend.let("remove")
    bench.answered_all(Kind.REMOVE, 1)
    bench.tick()
    assert bench.tier.busy
    assert bench.backend.writes == []
    bench.backend.let("remove")
    bench.settle()
    assert stored(bench) == 5


def test_a_clear_that_finds_the_queue_full_changes_nothing(benches):
    bench = benches(held=["remove"], queue_pages=1)
    assert bench.tier.clear()
    assert not bench.tier.clear()
    bench.backend.let("remove")
    bench.settle()
    assert not bench.tier.busy


def test_ranks_compare_how_it_stands_with_the_store(benches):
    bench = Bench(SPEC)
    none = {"step": 0, "attached": False, "leaving": False, "clearing": 0, "epoch": 0}

    def figures():
        return {name: bench.tier.figures()[name] for name in none}

    assert figures() == none
    assert not bench.tier.prefetcher.figures().keys() & none.keys()
    assert bench.tier.figures().keys() > {*bench.tier.prefetcher.figures(), *none}
    assert bench.tier.figures().keys() > bench.tier.persister.figures().keys()
    bench = benches(held=["remove"])
    epoch = figures()["epoch"]
    assert figures() == none | {"attached": True, "epoch": epoch}
    bench.tick()
    assert bench.tier.clear()
    assert figures() == none | {"attached": True, "step": 1, "clearing": 1, "epoch": epoch + 1}
    assert bench.tier.detach() is None
    assert figures()["leaving"]
    bench.tier.keep()
    assert figures()["leaving"] is False
    bench.backend.let("remove")
    bench.settle()
    assert bench.tier.detach() is bench.worker
    assert not figures()["attached"]
    bench.worker.close(PATIENCE_S)


def from_storage(bench, pages):
    """A lease on pages that no request of this process has computed."""
    bench.fill(PROMPT, pages)
    bench.fetch("r", PROMPT, pages)
    lease = bench.tree.leases.hold_present(bench.keys(PROMPT, pages), pages, [0, 0])
    bench.admitted("r", pages)
    return lease


def test_pages_that_are_not_to_be_trusted_leave_the_store_and_are_counted(benches):
    bench = benches(held=["remove"])
    lease = from_storage(bench, 4)
    keys = bench.keys(PROMPT, 4)
    before = len(bench.backend.snapshot())
    assert bench.tier.distrust(lease) == keys[0]
    assert bench.tier.busy
    bench.backend.let("remove")
    bench.settle()
    assert not bench.tier.busy
    assert before == 8
    assert bench.backend.snapshot() == {}
    assert bench.tier.stats(busy=False).pages["distrusted"] == 4
    assert bench.tier.distrust(lease) == keys[0]
    bench.backend.let("remove")
    bench.settle()
    assert bench.tier.stats(busy=False).pages["distrusted"] == 8


def test_pages_that_were_computed_here_are_trusted(benches):
    bench = benches()
    lease = bench.serve(PROMPT, 3)
    bench.settle()
    assert bench.tier.distrust(lease) is None
    assert bench.tier.stats(busy=False).pages["distrusted"] == 0
    assert len(bench.backend.snapshot()) == 5


def test_what_is_not_trusted_stays_in_the_store_where_too_much_is_queued(benches):
    bench = benches(held=["remove"], queue_pages=1)
    lease = from_storage(bench, 2)
    assert bench.tier.clear()
    bench.backend.wait_entered()
    assert bench.tier.distrust(lease) == bench.keys(PROMPT, 2)[0]
    bench.backend.let("remove")
    bench.settle()
    assert not bench.tier.busy


def test_a_store_that_fails_shows_in_which_direction(benches):
    bench = benches()
    stats = bench.tier.stats(busy=True)
    assert (stats.reading_off, stats.writing_off, stats.busy) == (False, False, True)
    bench.backend.failing["contains"] = OSError("no")
    bench.start("r", PROMPT, 3)
    bench.settle()
    stats = bench.tier.stats(busy=False)
    assert (stats.reading_off, stats.busy) == (True, False)
    bench.forget("r")


def test_after_its_end_nothing_is_noted_for_a_store(benches):
    bench = benches()
    lease = bench.serve(PROMPT, 3)
    bench.tier.close(PATIENCE_S)
    bench.tier.persister.used(lease)
    assert not bench.tier.persister.busy
    bench.serve(OTHER, 3)
    assert not bench.tier.persister.busy, "pages that are saved are wanted by nobody"
