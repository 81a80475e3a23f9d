"""How much of a prompt is fetched where the host is short: the end that a model finds by trying
every one, after one eviction at most; and nothing has changed where that is none.
"""

import numpy as np
import pytest

from stratakv.core.ids import TicketId
from stratakv.policy.prefetch_ends import FetchPlan, Objects
from stratakv.policy.prefetch_reasons import FetchOutcome, Reason
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepChunk, KeepLive, KeepWindow
from stratakv.storage.backend import ReadStatus
from stratakv.storage.io_jobs import Ending, Fetched
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_books import HOST
from stratakv.tiers.prefetch.fetches import Fetches, arrivals_of
from tests.prefetch_model import Path
from tests.tier_bench import Bench, Store, count_evictions, policy_of

PAGES, THRESHOLD, CACHED = 8, 2, 3
PROMPT, OTHER = 1, 2
SPECS = {
    "full": small_spec([], page_tokens=2),
    "window": small_spec([KeepWindow(5)], page_tokens=2),
    "chunk": small_spec([KeepChunk(6)], page_tokens=2),
    "state": small_spec([KeepBoundary()], page_tokens=2),
    "state alone": small_spec([KeepBoundary()], page_tokens=2, anchor_bytes=False),
    "mixed": small_spec(
        [KeepBoundary(), KeepWindow(3), KeepLive(), KeepAll(), KeepChunk(8)], page_tokens=2
    ),
}


def expected_end(bench, cached, free, evictable):
    """The largest end worth it that fits what is free or could be, by trying every end; 0: none."""
    path = Path(bench.spec, cached, PAGES)
    ends = path.usable([set(range(PAGES)) for _ in bench.groups])
    room = [some + more for some, more in zip(free, evictable, strict=True)]
    page = bench.spec.page_tokens
    return max(path.affordable(ends, room, THRESHOLD * page), default=0), path


def state_of(bench):
    nodes = bench.tree.internals.nodes
    return (
        sorted(nodes.index),
        bench.free(),
        [nodes.state[group][nodes.rows()].tolist() for group in bench.groups],
        [pins.tolist() for tier in nodes.pins for pins in tier],
    )


def filled(spec, host, others, *, base, spare):
    """``base`` pages of the prompt and ``spare`` of another lie on the host alone; leases hold
    ``others`` pages of what is left, by group."""
    bench = Bench(spec, host=host, policy=policy_of(spec, threshold=THRESHOLD))
    bench.attach(Store(spec))
    for prompt, pages in ((PROMPT, base), (OTHER, spare)):
        if pages:
            bench.fill(prompt, pages)
            bench.fetch("before", prompt, pages)
            bench.admitted("before", pages)
    bench.fill(PROMPT, PAGES)
    bench.block([min(some, free) for some, free in zip(others, bench.free(), strict=True)])
    return bench


@pytest.mark.parametrize("spare", [0, CACHED], ids=["nothing to evict", "something to evict"])
@pytest.mark.parametrize("base", [0, CACHED], ids=["cold", "continued"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_at_every_fill_level_the_largest_end_that_fits_is_fetched(spec, base, spare, monkeypatch):
    evictions = count_evictions(monkeypatch)
    host, groups = PAGES + CACHED, len(spec.groups)
    levels = [[level] * groups for level in range(host + 1)]
    for group in range(1, groups):  # and each group short alone
        some = range(host - 6, host + 1, 2)
        levels += [[level if g == group else 0 for g in range(groups)] for level in some]
    ends = set()
    for others in levels:
        bench = filled(spec, host, others, base=base, spare=spare)
        ends.add(landed_at(bench, evictions))
        bench.close()
    assert len(ends) > 2, "every level came to the same end"


def landed_at(bench, evictions):
    nodes, keys = bench.tree.internals.nodes, bench.keys(PROMPT, PAGES)
    path = [nodes.index[key] for key in keys if key in nodes.index]
    cached = [set(np.flatnonzero(nodes.page[HOST][g][path] >= 0).tolist()) for g in bench.groups]
    end, path = expected_end(bench, cached, bench.free(), spare_of(bench, keys))
    evictions.clear()
    before, lost = state_of(bench), bench.lost()
    bench.fetch("r", PROMPT, PAGES)
    assert len(evictions) <= 1, "evicted twice"
    found = bench.match(PROMPT, PAGES).end
    assert found == max(end, path.base), f"landed at {found}, could have been {end}"
    came = bench.admitted("r", found)
    if end:
        assert (came.base, came.end) == (path.base, end)
        assert [p.tolist() for p in came.pages] == [path.lacking(g, end) for g in bench.groups]
        bench.landed(PROMPT, end)
    else:
        assert came is None
        assert state_of(bench) == before, "a prefetch that came to nothing left something behind"
    assert not bench.tree.leases
    short = PAGES - max(end, path.base)
    assert bench.lost().get(Reason.HOST_CAPACITY, 0) == short + lost.get(Reason.HOST_CAPACITY, 0)
    return found


def spare_of(bench, keys):
    """By group: host pages that eviction could give while the prompt's own are held."""
    nodes = bench.tree.internals.nodes
    mine = [nodes.index[key] for key in keys if key in nodes.index]
    spare = []
    for group in bench.groups:
        there = nodes.page[HOST][group] >= 0
        there[mine] = False
        spare.append(int(np.count_nonzero(there)))
    return spare


@pytest.mark.parametrize("gone", range(1, PAGES + 1))
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_arrives_in_part_lands_at_the_largest_end_that_is_whole(spec, gone):
    """From page ``gone`` on storage has nothing any more when it is read."""
    bench = Bench(spec, policy=policy_of(spec, threshold=THRESHOLD))
    store = Store(spec, "read")
    bench.attach(store)
    names = bench.fill(PROMPT, PAGES)
    keys = bench.keys(PROMPT, PAGES)
    bench.start("r", PROMPT, PAGES)
    bench.answered()
    store.wait_entered()
    store.remove([name for name in names if keys.index(name.page) >= gone])
    store.let("read")
    bench.settle()
    path = Path(spec, [set() for _ in spec.groups], PAGES)
    asked = [set(path.lacking(group, PAGES)) for group in bench.groups]
    come = [{at for at in pages if at < gone} for pages in asked]
    ends = [end for end in path.usable(come) if end >= THRESHOLD]
    end = max(ends, default=0)
    assert bench.match(PROMPT, PAGES).end == end
    came = bench.admitted("r", end)
    if end:
        assert [p.tolist() for p in came.pages] == [path.lacking(g, end) for g in bench.groups]
        bench.landed(PROMPT, end)
    taken = [len(path.lacking(g, end)) for g in bench.groups]
    assert bench.free() == [host - some for host, some in zip(bench.hosts, taken, strict=True)]
    assert bench.lost() == ({Reason.EVICTED: PAGES - end} if end < PAGES else {})
    bench.close()


def test_what_an_eviction_brings_short_is_fetched_shorter(monkeypatch):
    """The other prompt's pages are promised, and leave not: somebody has leased them meanwhile."""
    bench = filled(SPECS["window"], PAGES + CACHED, [0, 0], base=0, spare=CACHED)
    bench.block([PAGES - 3, 0])
    lease = None
    make_room = bench.pools.make_room

    def lease_first(tier, group, count):
        nonlocal lease
        if lease is None:
            keys = bench.keys(OTHER, CACHED)
            lease = bench.tree.leases.hold_present(keys, CACHED, [0, 0])
        return make_room(tier, group, count)

    monkeypatch.setattr(bench.pools, "make_room", lease_first)
    bench.fetch("r", PROMPT, PAGES)
    assert bench.match(PROMPT, PAGES).end == 3
    bench.tree.leases.release(lease)
    assert bench.lost() == {}, "not before it is settled"
    bench.admitted("r", 3)
    assert bench.lost() == {Reason.HOST_CAPACITY: PAGES - 3}
    bench.close()


def test_the_second_allocation_may_fail_too(monkeypatch):
    bench = filled(SPECS["mixed"], PAGES, [0] * 6, base=0, spare=0)
    last = bench.tiers[HOST][-1]
    monkeypatch.setattr(last, "alloc", lambda count: None)
    bench.fetch("r", PROMPT, PAGES)
    assert bench.free() == bench.hosts, "what other groups had taken came back"
    assert bench.abandoned() == {Reason.HOST_CAPACITY: 1}
    bench.admitted("r", 0)
    assert bench.lost() == {Reason.HOST_CAPACITY: PAGES}
    bench.close()


@pytest.mark.parametrize(
    ("ending", "rest"),
    [
        (Ending.CANCELLED, FetchOutcome.NOT_TRIED),
        (Ending.FAILED, FetchOutcome.FAILED),
        (Ending.OFF, FetchOutcome.FAILED),
    ],
)
def test_objects_behind_the_last_status(ending, rest):
    statuses = [ReadStatus.HIT, ReadStatus.MISS, ReadStatus.CORRUPT, ReadStatus.FAILED]
    arrivals = arrivals_of(Fetched(TicketId(0), ending, statuses), 6).tolist()
    assert arrivals == [
        FetchOutcome.ARRIVED,
        FetchOutcome.MISSED,
        FetchOutcome.CORRUPT,
        FetchOutcome.FAILED,
        rest,
        rest,
    ]


def test_a_store_fills_host_pages_when_nobody_reads_them_any_more():
    bench, order = Bench(SPECS["window"], host=4), []
    fetches = Fetches(bench.tree, bench.pools, bench.arenas, lambda: order.append(bench.free()))
    wanted = tuple(np.arange(3) for _ in bench.groups)
    plan = FetchPlan(3, 0, wanted, Objects(np.empty(0, np.int64), np.empty(0, np.int64)))
    taken = fetches.allocate(plan)
    assert taken is not None
    assert order == [bench.free()], "pages are taken first, then waited for"
    assert fetches.allocate(plan) is None
    assert len(order) == 1, "nothing is written"
    fetches.free(taken)
