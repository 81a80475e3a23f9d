"""What checkpoints and milestones keep warm, and how they come and go."""

from stratakv.spec.retention import KeepBoundary, KeepWindow
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_books import DEVICE, Prefix
from stratakv.testing.tree_driver import TreeDriver
from stratakv.tree.order import COLD, WARM
from tests.tree_walks import left, run, serve, tree

# -- checkpoints ---------------------------------------------------------------------------------


def test_pages_without_a_checkpoint_go_before_older_ones_with_one() -> None:
    it = tree(KeepWindow(1))
    serve(it, (0,))
    it.finish(run(it, (1,)))
    it.evict(DEVICE, 1, 1)
    assert left(it, (0,), (1,)) == [(0,)]


def test_a_continued_checkpoint_goes_cold() -> None:
    it = tree(KeepBoundary())
    serve(it, (9,), (0,), (0, 1), generous=False)
    it.evict(DEVICE, 1, 1)
    assert left(it, (9,), (0,), (0, 1)) == [(9,), (0, 1)]


def test_a_continued_checkpoint_where_the_tree_branches_stays() -> None:
    it = tree(KeepBoundary())
    serve(it, (9,), (0,), generous=False)
    both = [it.arrive((0, symbol), 1, load=False) for symbol in (1, 2)]
    for request in both:
        it.extend(request, 1, generous=False)
    for request in both:
        it.keep(request, 2, request.continued)
        it.finish(request)
    it.evict(DEVICE, 1, 1)
    assert left(it, (9,), (0,)) == [(0,)]


def test_a_checkpoint_is_not_kept_where_something_it_needs_has_gone() -> None:
    it = tree(KeepWindow(2))
    request = run(it, (0, 1, 2, 3))
    it.evict(DEVICE, 1, 9)
    it.keep(request, 2, 0)  # the driver expects no effect
    assert not [end for end in range(5) if it.tree.checkpoints.at(request.lease, end)]
    it.verify()
    it.finish(request)
    it.verify()


# -- milestones ----------------------------------------------------------------------------------


def with_milestone(it: TreeDriver, prompt: Prefix, end: int) -> None:
    """Serve a prompt with a checkpoint at its end and a milestone at ``end``."""
    request = run(it, prompt)
    it.pave(request, end)
    it.keep(request, len(prompt), request.continued)
    it.finish(request)
    it.verify()


def test_milestones_go_after_what_is_cold_and_before_older_checkpoints() -> None:
    it = tree(KeepBoundary())
    serve(it, (9,), generous=False)
    with_milestone(it, (0, 1, 2), 1)
    with_milestone(it, (5, 6, 7), 1)
    ends: list[Prefix] = [(9,), (0,), (0, 1), (0, 1, 2), (5,), (5, 6), (5, 6, 7)]
    order: list[list[Prefix]] = []
    for _ in range(4):
        it.evict(DEVICE, 1, 1)
        order.append(left(it, *ends))
        ends = order[-1]
    marked = [(9,), (0,), (0, 1, 2), (5,), (5, 6, 7)]
    assert order[1] == marked
    assert order[2:] == [
        [end for end in marked if end not in gone] for gone in ([(0,)], [(0,), (5,)])
    ]


def test_room_for_milestones_is_made_of_nothing_better() -> None:
    it = tree(KeepBoundary())
    serve(it, (9,), generous=False)
    with_milestone(it, (0, 1, 2), 1)
    assert it.evict_spare(DEVICE, 1, 99) == 2
    assert left(it, (9,), (0,), (0, 1, 2)) == [(9,), (0, 1, 2)]
    it.verify()


def test_a_checkpoint_that_is_continued_becomes_a_milestone() -> None:
    it = tree(KeepBoundary())
    serve(it, (0,), (0, 1), generous=False)
    assert (it.model.checkpoints, it.model.milestones) == ({(0, 1)}, {(0,)})
    it.verify()


def test_a_milestone_from_which_somebody_parts_becomes_a_checkpoint() -> None:
    it = tree(KeepBoundary())
    with_milestone(it, (0, 1, 2), 1)
    serve(it, (0, 5), generous=False)
    assert (it.model.checkpoints, it.model.milestones) == ({(0,), (0, 1, 2), (0, 5)}, set())
    it.verify()


def test_a_milestone_that_a_bypassing_request_parts_from_is_a_checkpoint_at_the_next_keep() -> None:
    """The first to go on saw no branch, and whoever bypasses the cache marks none."""
    it = tree(KeepBoundary())
    first = run(it, (0,), generous=False)
    it.pave(first, 1)
    it.finish(first)
    on = it.arrive((0, 1), 1, load=False)
    it.extend(on, 2, generous=False)
    bypassing = it.arrive((0, 2), 0, load=False)
    it.extend(bypassing, 2, generous=False)
    assert (it.model.checkpoints, it.model.milestones) == (set(), {(0,)})
    it.keep(on, 2, on.continued)
    assert (it.model.checkpoints, it.model.milestones) == ({(0,), (0, 1)}, set())
    it.verify()
    it.finish(bypassing)
    it.finish(on)
    it.verify()


def test_a_milestone_that_has_lost_a_page_when_somebody_parts_stays_one() -> None:
    it = tree(KeepBoundary())
    with_milestone(it, (0, 1, 2), 1)
    it.evict_spare(DEVICE, 1, 99)
    request = it.arrive((0, 5), 1, load=False)
    it.extend(request, 2, generous=False)
    it.keep(request, 2, 1)
    assert (it.model.checkpoints, it.model.milestones) == ({(0, 1, 2), (0, 5)}, {(0,)})
    it.verify()


def test_a_chain_that_goes_counts_what_its_checkpoint_needed_as_worth_it() -> None:
    it = tree(KeepWindow(2))
    serve(it, (0, 1, 2))
    assert it.evict(DEVICE, 0, 3) == 3
    assert (it.tree.eviction.dropped_dirty, it.tree.eviction.dropped_cold) == (5, 1), (
        "of the window the first page"
    )


def test_a_mark_that_goes_lets_the_page_above_its_chain_go_cold() -> None:
    it = tree(KeepWindow(2))
    serve(it, (9,), (0, 1))
    request = it.arrive((0, 1, 2), 2, load=False)
    it.extend(request, 1, generous=True)
    it.keep(request, 3, request.continued)
    it.finish(request)
    assert it.evict(DEVICE, 0, 2) == 2  # (9,) and the end of the longer one
    rank = it.tree.internals.nodes.rank[1][it.tree.internals.nodes.path(it.row((0, 1)))]
    assert (rank < WARM).all()
    it.verify()


def test_a_milestone_that_is_cleared_goes_cold() -> None:
    it = tree(KeepBoundary())
    with_milestone(it, (0, 1, 2), 1)
    with_milestone(it, (5, 6, 7), 1)
    it.evict_spare(DEVICE, 1, 2)
    request = it.arrive((5, 6, 7, 8), 3, load=False)
    it.pave(request, 0, every=1)
    it.finish(request)
    it.evict(DEVICE, 1, 1)
    assert left(it, (0,), (5,)) == [(0,)]


def test_a_page_that_comes_back_to_a_checkpoint_is_as_warm_as_it_was() -> None:
    it = tree(KeepWindow(2))
    request = run(it, (0, 1, 2, 3))
    it.pave(request, 2)
    it.keep(request, 4, request.continued)
    it.finish(request)
    assert it.evict(DEVICE, 1, 9) == 4
    assert it.fetch((0, 1, 2, 3), generous=True)
    it.end_fetch(it.fetches[0], landed=True)
    ranks = it.tree.internals.nodes.rank[1][it.tree.internals.nodes.path(it.row((0, 1, 2, 3)))]
    assert (ranks[2:] >= WARM).all()
    assert ((ranks[:2] > COLD) & (ranks[:2] < WARM)).all()
    it.verify()


def test_a_queue_that_is_offered_the_same_rows_again_and_again_stays_short() -> None:
    it = TreeDriver(small_spec([], page_tokens=1), [1000], [1000])
    serve(it, (0,))
    pins, rows = it.tree.internals.pins, it.tree.internals.nodes.path(it.row((0,)))
    queue, weights = pins.queues[DEVICE][0], list[int]()
    for _ in range(2000):
        pins.queue(DEVICE, 0, rows)
        weights.append(queue.weight)
    assert max(weights) < 200, "repeated batches are dropped"
    it.verify()
