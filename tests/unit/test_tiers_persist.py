"""Pages on their way to storage: the head of a chain first, pinned until the write has ended,
written again where it came to nothing, and never waited for.
"""

import logging

import pytest

from stratakv.core.ids import NONE, GroupId
from stratakv.spec.retention import KeepBoundary, KeepWindow
from stratakv.storage.backend import ObjectKey, WriteStatus
from stratakv.storage.io_jobs import Kind
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.specs import small_spec
from stratakv.testing.storage_faults import Faults, FaultyBackend
from stratakv.testing.tree_books import HOST
from stratakv.tiers.persist import JOB_PAGES
from stratakv.tree.stored import TOUCH_STEPS
from tests.tier_bench import Bench, Store, StoredObserver

FULL = small_spec([], page_tokens=1)
WINDOW = small_spec([KeepWindow(2)], page_tokens=1)
STATE_ALONE = small_spec([KeepBoundary()], page_tokens=1, anchor_bytes=False)
PROMPT = 1


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="stratakv")


@pytest.fixture
def benches():
    made = []

    def make(spec, held=(), faults=None, quota_bytes=1 << 20, **settings):
        bench = Bench(spec, **settings)
        made.append(bench)
        gate = Store(spec, *held, quota_bytes=quota_bytes)
        return bench.attach(FaultyBackend(gate, faults) if faults else gate, gate)

    yield make
    for bench in made:
        bench.close()


def figures(bench):
    counts = bench.written
    named = {"stored", "present", "refused", "failed", "dropped"}
    return {name: getattr(counts, name) for name in named if getattr(counts, name)}


def depths(bench, names, prompt=PROMPT, pages=8):
    keys = bench.keys(prompt, pages)
    return [(keys.index(name.page), name.group) for name in names]


def test_a_saved_prompt_is_stored_where_it_is_usable(benches):
    bench = benches(WINDOW)
    bench.serve(PROMPT, 4)
    bench.settle()
    assert depths(bench, bench.backend.writes) == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert figures(bench) == {"stored": 6}
    for name in bench.backend.writes:
        page = memoryview(bytearray(bench.spec.groups[name.group].page_bytes))
        MemoryBackend.read(bench.backend, [name], [page])
        assert bytes(page) == bench.content(name.page, name.group)


def test_a_group_without_bytes_writes_no_object(benches):
    bench = benches(STATE_ALONE)
    bench.serve(PROMPT, 3)
    bench.settle()
    assert depths(bench, bench.backend.writes) == [(2, 1)]


def test_every_page_is_written_once(benches):
    bench = benches(WINDOW)
    lease = bench.serve(PROMPT, 4)
    bench.settle()
    for _ in range(3):
        bench.tier.persister.used(lease)
        bench.settle()
    assert figures(bench) == {"stored": 6}


def test_a_page_is_held_until_its_write_has_ended(benches):
    bench = benches(WINDOW, host=4, held=["write"])
    bench.tree.leases.release(bench.serve(PROMPT, 4))
    bench.tick()
    bench.backend.wait_entered()
    assert bench.tier.busy
    assert bench.pools.make_room(HOST, GroupId(1), 4) == 2, "the window's two pages are held"
    assert bench.pools.make_room(HOST, GroupId(0), 4) == 0
    bench.check()
    bench.backend.let("write")
    bench.settle()
    assert bench.pools.make_room(HOST, GroupId(0), 4) == 4


@pytest.mark.parametrize(
    ("faults", "name"),
    [(Faults(write_refused=1.0), "refused"), (Faults(write_fails=1.0), "failed")],
)
def test_what_could_not_be_written_is_written_when_it_is_used_again(benches, faults, name):
    bench = benches(WINDOW, faults=faults)
    lease = bench.serve(PROMPT, 4)
    bench.settle()
    assert figures(bench) == {name: 6}
    assert bench.idle()
    bench.outer.change(Faults())
    bench.tier.persister.used(lease)
    bench.settle()
    assert figures(bench) == {name: 6, "stored": 6}


def test_a_store_that_fails_altogether_is_asked_again_after_its_back_off(benches):
    bench = benches(WINDOW, faults=Faults(call_fails=1.0))
    lease = bench.serve(PROMPT, 4)
    bench.settle()
    bench.outer.change(Faults())
    bench.tier.persister.used(lease)
    bench.settle()
    assert figures(bench) == {"failed": 12}, "it is left alone for a while"
    bench.clock.advance(2.0)
    bench.tier.persister.used(lease)
    bench.settle()
    assert figures(bench) == {"failed": 12, "stored": 6}


def test_what_storage_had_already_counts_as_kept(benches):
    bench = benches(WINDOW)
    bench.fill(PROMPT, 2)
    lease = bench.serve(PROMPT, 4)
    bench.settle()
    assert figures(bench) == {"stored": 4, "present": 2}
    bench.tier.persister.used(lease)
    bench.settle()
    assert figures(bench) == {"stored": 4, "present": 2}


def test_a_write_that_ends_half_way_keeps_what_was_done(benches):
    """Only the part that was not tried is written anew."""
    bench = benches(WINDOW, held=["write"], batch_pages=1)
    lease = bench.serve(PROMPT, 4)
    bench.tick()
    bench.backend.wait_entered()
    bench.backend.let("write", 3)
    for _ in range(3):
        bench.backend.wait_entered()  # the fourth batch has begun
    assert bench.tier.persister.cancel(bench.worker) in {2, 3}
    bench.backend.let("write", 9)
    bench.settle()
    assert figures(bench) == {"stored": 4, "dropped": 2}
    bench.tier.persister.used(lease)
    bench.settle()
    assert figures(bench) == {"stored": 6, "dropped": 2}
    assert depths(bench, bench.backend.writes)[4:] == [(3, 0), (3, 1)]


def test_a_full_queue_drops_and_the_next_use_heals(benches):
    bench = benches(FULL, held=["write"], queue_pages=4)
    bench.serve(PROMPT, 4)
    bench.tick()
    lease = bench.serve(2, 3)
    bench.tick()
    assert figures(bench) == {"dropped": 3}
    bench.check()
    bench.backend.let("write", 9)
    bench.settle()
    assert figures(bench) == {"dropped": 3, "stored": 4}
    bench.tier.persister.used(lease)
    bench.settle()
    assert figures(bench) == {"dropped": 3, "stored": 7}


def test_a_long_chain_goes_in_several_jobs_head_first(benches):
    pages = JOB_PAGES + 40
    bench = benches(FULL, held=["write"], host=pages, device=pages, queue_pages=JOB_PAGES)
    bench.serve(PROMPT, pages)
    bench.tick()
    assert figures(bench) == {"dropped": 40}, "the deep end, and not all of it"
    bench.backend.let("write", 99)
    bench.settle()
    written = [at for at, _ in depths(bench, bench.backend.writes, pages=pages)]
    assert written == list(range(JOB_PAGES))
    bench.check()


def test_cancel_gives_up_what_was_not_submitted(benches):
    bench = benches(WINDOW)
    bench.serve(PROMPT, 4)
    assert bench.tier.persister.cancel(bench.worker) == 6
    bench.check()
    bench.settle()
    assert bench.backend.writes == []
    assert figures(bench) == {"dropped": 6}


def test_an_observer_of_the_cache_sees_what_is_stored(benches):
    observer = StoredObserver()
    bench = benches(WINDOW, observer=observer)
    bench.serve(PROMPT, 3)
    bench.settle()
    keys = bench.keys(PROMPT, 3)
    assert observer.kept == [(0, keys), (1, keys[1:])]


class Choosy(Store):
    """Refuses the objects of ``unwanted``."""

    unwanted = frozenset()

    def write(self, keys, pages):
        statuses = super().write([key for key in keys if key not in self.unwanted],
                                 [page for key, page in zip(keys, pages, strict=True)
                                  if key not in self.unwanted])  # fmt: skip
        taken = iter(statuses)
        return [WriteStatus.REFUSED if key in self.unwanted else next(taken) for key in keys]


@pytest.mark.parametrize("unwanted", [(0, 3), (1, 2), (2,), (4,), (5,), (0, 1, 2, 3, 4, 5)])
def test_exactly_what_was_not_kept_is_written_with_the_next_use(unwanted):
    """One job has the writings of both groups, its objects in the order of their depth."""
    observer = StoredObserver()
    bench = Bench(WINDOW, observer=observer)
    store = Choosy(WINDOW)
    bench.attach(store)
    lease = bench.serve(PROMPT, 4)
    keys = bench.keys(PROMPT, 4)
    names = [ObjectKey(keys[at], GroupId(group)) for at, group in
             ((0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1))]  # fmt: skip
    store.unwanted = frozenset(names[at] for at in unwanted)
    bench.settle()
    kept = [name for name in names if name not in store.unwanted]
    assert {(group, key) for group, some in observer.kept for key in some} == {
        (name.group, name.page) for name in kept
    }
    store.unwanted, store.writes = frozenset(), []
    bench.tier.persister.used(lease)
    bench.settle()
    assert store.writes == [names[at] for at in unwanted]
    assert figures(bench) == {"stored": 6, "refused": len(unwanted)}
    bench.close()


def test_ranks_compare_what_is_under_way(benches):
    bench = benches(WINDOW, held=["write"])
    nothing = {"writes begun": 0, "writes": 0, "newest write": NONE, "uses to send": 0}
    assert bench.tier.persister.figures() == nothing
    assert not bench.tier.persister.busy
    lease = bench.serve(PROMPT, 4)
    assert bench.tier.persister.figures() == nothing | {"writes begun": 2}
    assert bench.tier.persister.busy
    bench.tick()
    bench.backend.wait_entered()
    assert bench.tier.persister.figures() == nothing | {"writes": 1, "newest write": 0}
    bench.tier.persister.used(lease)
    assert bench.tier.persister.figures()["uses to send"] == 1
    bench.tier.persister.forget_uses()
    assert bench.tier.persister.figures()["uses to send"] == 0
    bench.backend.let("write", 9)
    bench.settle()
    assert bench.tier.persister.figures() == nothing


# -- use -----------------------------------------------------------------------------------------


def test_a_use_touches_the_deepest_page_first_and_not_every_time(benches):
    bench = benches(WINDOW)
    lease = bench.serve(PROMPT, 3)
    bench.settle()
    bench.backend.touches.clear()
    bench.tier.persister.used(lease)
    bench.tick()
    bench.answered()
    whole = [(2, 0), (2, 1), (1, 0), (1, 1), (0, 0)]
    assert depths(bench, bench.backend.touches) == whole
    for _ in range(TOUCH_STEPS - 3):
        bench.tick()
    bench.tier.persister.used(lease)
    bench.tick()
    assert bench.worker.stats.queued[Kind.TOUCH] == 0, "it was told a moment ago"
    bench.tier.persister.used(lease)
    bench.tick()
    bench.answered()
    assert depths(bench, bench.backend.touches) == 2 * whole


def test_a_use_is_sent_behind_the_writes_of_its_step(benches):
    """Else a page that is written late would look newer than its parents."""
    bench = benches(FULL, queue_pages=2, held=["write"])
    bench.serve(2, 2)
    bench.tick()
    lease = bench.serve(PROMPT, 3)
    bench.tick()
    assert figures(bench) == {"dropped": 3}
    bench.backend.let("write")
    bench.settle()
    bench.backend.order.clear()
    bench.tier.persister.used(lease)
    bench.backend.let("write")
    bench.settle()
    bench.tier.close(PATIENCE_S)
    assert [verb for verb, _ in bench.backend.order] == ["write", "touch"]
