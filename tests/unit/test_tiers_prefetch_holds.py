"""What a prefetch holds and allocates while storage is asked and read, and that it gives all of it
back where the queue has no place for it.
"""

import pytest

from stratakv.core.ids import GroupId
from stratakv.policy.prefetch_reasons import Reason
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepChunk, KeepWindow
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_books import HOST
from tests.tier_bench import Bench, Store, count_evictions, policy_of

FULL = small_spec([], page_tokens=2)
WINDOW = small_spec([KeepWindow(4)], page_tokens=2)
SPECS = {
    "full": FULL,
    "window": WINDOW,
    "chunk": small_spec([KeepChunk(4)], page_tokens=2),
    "state": small_spec([KeepBoundary()], page_tokens=2),
    "mixed": small_spec([KeepBoundary(), KeepWindow(3), KeepAll()], page_tokens=2),
}
PROMPT, OTHER = 1, 2
ANCHOR, ASIDE = GroupId(0), GroupId(1)


@pytest.fixture
def benches():
    made = []

    def make(spec, *held, **settings):
        bench = Bench(spec, **settings)
        made.append(bench)
        return bench.attach(Store(spec, *held))

    yield make
    for bench in made:
        bench.close()


def pins_of(bench):
    return [int(pins.sum()) for tier in bench.tree.internals.nodes.pins for pins in tier]


# -- while storage is asked ----------------------------------------------------------------------


@pytest.mark.parametrize("base", [0, 1], ids=["cold", "continued"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_nothing_is_allocated_nor_evicted_while_storage_is_asked(benches, monkeypatch, spec, base):
    evictions = count_evictions(monkeypatch)
    bench = benches(spec, "contains")
    for prompt, pages in ((OTHER, 3), (PROMPT, base)):  # what could be evicted, and a beginning
        if pages:
            bench.tree.leases.release(bench.serve(prompt, pages))
    bench.fill(PROMPT, 5)
    before = bench.free()
    bench.start("r", PROMPT, 5)
    bench.backend.wait_entered()
    bench.tick()
    assert bench.free() == before, "pages were taken before storage had said that it has any"
    assert not evictions
    assert bench.match(OTHER, 3).end == 3
    bench.backend.let("contains")
    bench.settle()
    assert bench.match(PROMPT, 5).end == 5, "there was nothing to take pages for"


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_nothing_is_ever_allocated_for_what_storage_has_not(benches, monkeypatch, spec):
    evictions = count_evictions(monkeypatch)
    bench = benches(spec)
    for space in bench.tiers[HOST]:
        monkeypatch.setattr(space, "alloc", lambda count: pytest.fail(f"{count} pages taken"))
    bench.fetch("r", PROMPT, 6)
    assert not evictions
    assert bench.free() == bench.hosts
    assert not bench.tree.leases


def test_the_anchor_beyond_the_usable_end_is_held_and_not_fetched_again(benches):
    """The host still has the anchor of the whole prompt, and nothing of its window: no end is
    usable, but with the window from storage all of it is."""
    bench = benches(WINDOW, "read")
    bench.fill(PROMPT, 4)
    bench.backend.let("read")
    bench.fetch("before", PROMPT, 4)
    bench.admitted("before", 4)
    bench.pools.make_room(HOST, ASIDE, 16)
    bench.backend.reads.clear()
    found = bench.match(PROMPT, 4)
    assert (found.end, found.anchor_end) == (0, 4)
    bench.start("r", PROMPT, 4)
    bench.answered()
    assert bench.pools.make_room(HOST, ANCHOR, 16) == 12, "what the fetch counts on has left"
    bench.backend.let("read")
    bench.settle()
    assert {name.group for name in bench.backend.reads} == {ASIDE}, "it was there"
    assert bench.match(PROMPT, 4).end == 4
    came = bench.admitted("r", 4)
    assert [pages.tolist() for pages in came.pages] == [[], [2, 3]]


# -- a queue that is full ------------------------------------------------------------------------


def test_a_question_that_the_queue_refuses_holds_nothing_and_is_asked_again(benches):
    bench = benches(FULL, "contains", queue_pages=4, policy=policy_of(FULL, retry_steps=2))
    bench.tree.leases.release(bench.serve(PROMPT, 1))
    bench.fill(PROMPT, 4)
    bench.start("other", OTHER, 3)
    leases, pins = len(bench.tree.leases), pins_of(bench)
    bench.start("r", PROMPT, 4)
    assert bench.abandoned() == {Reason.RATE_LIMITED: 1}
    assert len(bench.tree.leases) == leases, "a hold was never released"
    assert pins_of(bench) == pins
    assert not bench.must_wait("r")
    bench.backend.let("contains", 9)
    bench.settle()
    for _ in range(3):
        bench.settle()
    assert bench.match(PROMPT, 4).end == 4


def test_a_fetch_that_the_queue_refuses_gives_its_pages_back(benches):
    bench = benches(FULL, "read", queue_pages=6, batch_pages=1)
    bench.fill(PROMPT, 4)
    bench.fill(OTHER, 3)
    bench.start("other", OTHER, 3)
    bench.answered()
    bench.backend.wait_entered()
    bench.start("r", PROMPT, 4)
    bench.backend.let("read")  # questions go first: this one comes before the next batch
    bench.answered()
    assert bench.abandoned() == {Reason.RATE_LIMITED: 1}
    assert bench.free() == [bench.hosts[0] - 3]
    bench.check()
    bench.backend.let("read", 9)
    bench.settle()
    bench.forget("other")
    assert bench.admitted("r", 0) is None
    assert bench.lost() == {Reason.RATE_LIMITED: 4, Reason.ABORTED: 3}
    assert not bench.tree.leases
    assert bench.idle()
