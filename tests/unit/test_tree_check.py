"""``check`` finds each kind of damage, names it, and names the nodes: the other tests of the tree,
and every audit of a running cache, see only what it sees.

A tree with a bit of everything is sound; each test spoils one cell of it.
"""

import numpy as np
import pytest

from stratakv.core.ids import GroupId, PageKey
from stratakv.spec.retention import KeepBoundary, KeepWindow, handed_over
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_books import DEVICE, HOST, Prefix
from stratakv.testing.tree_driver import TreeDriver
from stratakv.tree.check import check
from stratakv.tree.nodes import ANY, NodeTable
from stratakv.tree.order import COLD, WARM
from stratakv.tree.prefix_tree import PrefixTree
from stratakv.tree.residency import Residency, ResidencyEvent

ANCHOR, WINDOW, STATE = GroupId(0), GroupId(1), GroupId(2)


class Grown:
    """Two prompts that part after two pages, each a checkpoint, the second of them running; a third
    on both tiers; and a page that is being saved."""

    def __init__(self) -> None:
        spec = small_spec((KeepWindow(2), KeepBoundary()), page_tokens=1)
        self.it = TreeDriver(spec, [16] * 3, [16] * 3)
        self._serve((0, 1))
        self._serve((0, 1, 2, 3))  # of the checkpoint at 2 a milestone is left
        self._serve((7, 8))
        for group in (ANCHOR, WINDOW):
            self.it.backup((7, 8), group, 99)
            self.it.end_copy(self.it.copies[-1], ok=True)
        self.running = self.it.arrive((0, 1, 2, 4, 5), 4, load=False)
        assert self.it.extend(self.running, 5, generous=True)
        self._serve((9,))
        self.it.backup((9,), ANCHOR, 1)
        self.it.verify()

    def _serve(self, prompt: Prefix) -> None:
        request = self.it.arrive(prompt, len(prompt) - 1, load=False)
        assert self.it.extend(request, len(prompt), generous=True)
        self.it.keep(request, len(prompt), request.continued)
        self.it.finish(request)

    @property
    def tree(self) -> PrefixTree:
        return self.it.tree

    @property
    def nodes(self) -> NodeTable:
        return self.it.tree.internals.nodes

    def at(self, *prompt: int) -> int:
        """The node of a prompt's last page."""
        return self.nodes.index[self.it.keys(prompt)[-1]]

    @property
    def unused(self) -> int:
        return next(row for row in range(self.nodes.capacity) if not self.nodes.holds(row))

    def state(self, group: int, row: int) -> Residency:
        return Residency(self.nodes.state[group].item(row))


@pytest.fixture
def grown() -> Grown:
    return Grown()


def spoiled(grown: Grown, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check(grown.tree)


def test_what_is_sound_passes(grown: Grown) -> None:
    check(grown.tree)
    assert grown.state(ANCHOR, grown.at(7, 8)) == Residency.BOTH
    assert grown.state(ANCHOR, grown.at(9)) == Residency.SAVING
    assert grown.nodes.milestone.item(grown.at(0, 1))
    assert grown.nodes.checkpoint.item(grown.at(0, 1, 2, 3))


# --- shape ---------------------------------------------------------------------------------------


def test_a_row_has_one_key(grown: Grown) -> None:
    grown.nodes.index[PageKey(b"another")] = grown.at(9)
    spoiled(grown, "a row is in the index twice")


def test_a_key_that_is_lost_is_missed(grown: Grown) -> None:
    del grown.nodes.index[grown.it.keys((9,))[0]]
    spoiled(grown, "a row is in the index twice")


def test_two_keys_that_changed_places(grown: Grown) -> None:
    index = grown.nodes.index
    (here,), (there,) = grown.it.keys((9,)), grown.it.keys((7,))
    index[here], index[there] = index[there], index[here]
    spoiled(grown, "does not know its key")


def test_a_parent_that_is_no_node(grown: Grown) -> None:
    row = grown.at(0, 1, 2, 3)
    grown.nodes.parent[row] = grown.unused
    spoiled(grown, rf"a parent is not in the tree: nodes \[{row}\]$")


def test_a_parent_at_another_depth(grown: Grown) -> None:
    row = grown.at(0, 1, 2, 3)
    grown.nodes.parent[row] = grown.at(0, 1)
    spoiled(grown, rf"depth is not parent's plus one: nodes \[{row}\]$")


def test_a_parent_on_another_path(grown: Grown) -> None:
    grown.nodes.parent[grown.at(0, 1)] = grown.at(7)
    spoiled(grown, "runs broke path")


@pytest.mark.parametrize(
    ("column", "words"), [(DEVICE, "DEVICE kids"), (HOST, "HOST kids"), (ANY, "kids")]
)
@pytest.mark.parametrize("by", [1, -1])
def test_children_are_counted_on_each_tier_and_on_both(
    grown: Grown, column: int, words: str, by: int
) -> None:
    row = grown.at(7)
    grown.nodes.kids[column][row] += by
    spoiled(grown, rf"^{words}: nodes \[{row}\]$")


# --- pages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tier", "name"), [(DEVICE, "DEVICE"), (HOST, "HOST")])
@pytest.mark.parametrize("group", [ANCHOR, WINDOW])
def test_a_page_that_is_there_has_an_id_and_no_other_has(
    grown: Grown, tier: int, name: str, group: int
) -> None:
    row, pages = grown.at(7, 8), grown.nodes.page[tier][group]
    before, pages[row] = pages.item(row), -1
    spoiled(grown, rf"^group {group}: {name} page id: nodes \[{row}\]$")
    pages[row] = pages.item(grown.at(7))
    spoiled(grown, f"^group {group}: a {name} page twice$")
    pages[row] = before
    check(grown.tree)


def test_what_is_on_the_device_alone_has_no_host_page(grown: Grown) -> None:
    row = grown.at(0, 1, 2, 3)
    grown.nodes.page[HOST][WINDOW][row] = 15
    spoiled(grown, rf"^group 1: HOST page id: nodes \[{row}\]$")


def test_a_ticket_is_of_a_load_in_flight(grown: Grown) -> None:
    row = grown.at(7, 8)
    grown.nodes.ticket[ANCHOR][row] = 3
    spoiled(grown, rf"^group 0: ticket: nodes \[{row}\]$")


def test_what_was_removed_holds_nothing(grown: Grown) -> None:
    grown.nodes.residency[STATE].move(np.array([grown.unused]), ResidencyEvent.INSERTED)
    spoiled(grown, "^group 2: a removed node still holds a page$")


def without_device_page(grown: Grown, row: int) -> None:
    """Its anchor page leaves the device, and everything but the rules of paths is as it should."""
    nodes, one = grown.nodes, np.array([row])
    nodes.residency[ANCHOR].move(one, ResidencyEvent.DEVICE_EVICTED)
    nodes.page[DEVICE][ANCHOR][row] = -1
    nodes.kids[DEVICE][nodes.parent[row]] -= 1


def test_a_node_has_its_anchor(grown: Grown) -> None:
    row = grown.at(0, 1, 2, 3)
    without_device_page(grown, row)
    spoiled(grown, rf"^a node without its anchor: nodes \[{row}\]$")


def test_on_the_device_the_anchor_has_no_holes(grown: Grown) -> None:
    without_device_page(grown, grown.at(7))
    below = grown.at(7, 8)
    spoiled(grown, rf"^anchor on the device below one that is not: nodes \[{below}\]$")


# --- pins ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [1, -1])
def test_a_lease_pins_what_it_needs_once(grown: Grown, by: int) -> None:
    tip = grown.at(0, 1, 2, 4, 5)
    for group, first in ((ANCHOR, 0), (WINDOW, 3), (STATE, 4)):
        pins = grown.nodes.pins[DEVICE][group]
        assert np.flatnonzero(pins[grown.nodes.path(tip)]).tolist() == list(range(first, 5))
        pins[tip] += by
        spoiled(grown, f"^group {group}: DEVICE pins leak or lack$")
        pins[tip] -= by
    check(grown.tree)


def test_a_copy_pins_both_ends(grown: Grown) -> None:
    row = grown.at(9)
    for tier in (DEVICE, HOST):
        pins = grown.nodes.pins[tier][ANCHOR]
        pins[row] -= 1
        spoiled(grown, f"^group 0: {tier.name} pins leak or lack$")
        pins[row] += 1
    check(grown.tree)


def test_a_load_that_is_planned_pins_each_page_where_it_is() -> None:
    it = TreeDriver(small_spec((KeepWindow(2),), page_tokens=1), [16] * 2, [16] * 2)
    prompt = (0, 1, 2)
    request = it.arrive(prompt, 0, load=False)
    assert it.extend(request, 3, generous=True)
    it.keep(request, 3, 0)
    it.finish(request)
    for group in (ANCHOR, WINDOW):
        it.backup(prompt, group, 99)
        it.end_copy(it.copies[-1], ok=True)
    it.evict(DEVICE, ANCHOR, 2)
    keys, leases, nodes = it.keys(prompt), it.tree.leases, it.tree.internals.nodes
    path = nodes.path(it.row(prompt))
    held = [leases.take(keys, 1), *(leases.take_to_load(keys, 3) for _ in range(2))]
    assert [nodes.pins[tier][ANCHOR][path].tolist() for tier in (DEVICE, HOST)] == [
        [3, 0, 0], [0, 2, 2],
    ]  # fmt: skip
    check(it.tree)
    for tier, row in ((DEVICE, path[0]), (HOST, path[2])):
        for by in (1, -1):
            nodes.pins[tier][ANCHOR][row] += by
            with pytest.raises(AssertionError, match=r"^group 0: .* pins leak or lack$"):
                check(it.tree)
            nodes.pins[tier][ANCHOR][row] -= by
    for lease in held:
        leases.release(lease)
        check(it.tree)


def test_a_page_that_is_leased_is_there(grown: Grown) -> None:
    """Also where another lease was taken since."""
    row, nodes = grown.at(0, 1, 2, 4, 5), grown.nodes
    other = grown.tree.leases.take(grown.it.keys((7,)), 1)
    nodes.residency[WINDOW].move(np.array([row]), ResidencyEvent.DEVICE_EVICTED)
    nodes.page[DEVICE][WINDOW][row] = -1
    spoiled(grown, rf"^a pin on nothing: nodes \[{row}\]$")
    grown.tree.leases.release(other)


def test_a_lease_begins_no_earlier_than_it_needs_to_and_no_later_than_it_ends(
    grown: Grown,
) -> None:
    starts, window = grown.running.lease.starts, grown.tree.spec.groups[WINDOW]
    least = handed_over(window.retention, grown.running.lease.end, 1).start
    assert least > 0
    for first in (least - 1, 6):
        starts[WINDOW] = first
        spoiled(grown, f"^group 1: a lease begins at {first}$")


@pytest.mark.parametrize("tier", [DEVICE, HOST])
@pytest.mark.parametrize("group", [ANCHOR, WINDOW, STATE])
def test_what_can_be_evicted_is_counted_exactly(grown: Grown, tier: int, group: int) -> None:
    counts = grown.tree.internals.pins.evictable[tier]
    counts[group] += 1
    name = ("DEVICE", "HOST")[tier]
    spoiled(grown, f"^group {group}: {name} evictable {counts[group]}$")


# --- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "group"), [(DEVICE, ANCHOR), (DEVICE, WINDOW), (DEVICE, STATE), (HOST, WINDOW)]
)
def test_whatever_could_leave_is_queued(grown: Grown, tier: int, group: int) -> None:
    grown.tree.internals.pins.queues[tier][group].clear()
    name = ("DEVICE", "HOST")[tier]
    spoiled(grown, rf"^group {group}: not queued on {name}: nodes \[")


def test_a_page_is_queued_no_later_than_its_rank(grown: Grown) -> None:
    queue = grown.tree.internals.pins.queues[DEVICE][STATE]
    batches = queue.batches()
    queue.clear()
    for _, rows in batches:
        queue.push(2**62, 0, rows)
    spoiled(grown, r"^group 2: not queued on DEVICE: nodes \[")


def test_a_page_that_nothing_holds_is_queued_though_it_is_the_last_copy() -> None:
    it = TreeDriver(small_spec((), page_tokens=1), [4], [4])
    request = it.arrive((0,), 0, load=False)
    assert it.extend(request, 1, generous=True)
    it.finish(request)
    it.tree.internals.pins.queues[DEVICE][ANCHOR].clear()
    with pytest.raises(AssertionError, match=r"^group 0: not queued on DEVICE: nodes \["):
        check(it.tree)


def test_a_last_copy_need_not_be_queued_while_anything_below_it_is_pinned() -> None:
    """On whatever tier, of whatever group, however far below."""
    it = TreeDriver(small_spec((KeepWindow(1), KeepBoundary()), page_tokens=1), [16] * 3, [16] * 3)
    request = it.arrive((0,), 0, load=False)
    assert it.extend(request, 1, generous=True)
    it.finish(request)
    assert it.fetch((0, 1, 2, 3), generous=False)
    it.end_fetch(it.fetches[0], landed=True)
    request = it.arrive((0, 1, 2, 3), 1, load=False)
    assert it.extend(request, 3, generous=True)
    it.finish(request)
    assert it.evict(DEVICE, ANCHOR, 3) == 3
    ids = it.pools[HOST][WINDOW].alloc(1)
    assert ids is not None
    it.begin_backup({WINDOW: [((0, 1, 2), WINDOW)]}, {WINDOW: ids})
    assert it.evict(DEVICE, ANCHOR, 9) == 0
    it.verify()
    it.end_copy(it.copies[0], ok=True)
    it.verify()
    assert it.evict(DEVICE, ANCHOR, 9) == 1


@pytest.mark.parametrize("group", [WINDOW, STATE])
def test_marks_are_what_pages_are_needed_for(grown: Grown, group: int) -> None:
    need = grown.nodes.need[group]
    need[grown.at(0, 1, 2, 3)] += 1
    spoiled(grown, f"^group {group}: needs of marks$")


def test_all_of_the_anchor_is_needed_for_good(grown: Grown) -> None:
    grown.nodes.need[ANCHOR][grown.at(9)] -= 1
    spoiled(grown, "^group 0: needs of marks$")


def test_a_mark_needs_its_pages(grown: Grown) -> None:
    grown.nodes.checkpoint[grown.at(0, 1, 2, 3)] = False
    spoiled(grown, "^group 1: needs of marks$")


def test_an_end_is_a_checkpoint_or_a_milestone(grown: Grown) -> None:
    grown.nodes.milestone[grown.at(0, 1, 2, 3)] = True
    spoiled(grown, "^a checkpoint that is a milestone too$")


def test_what_nothing_needs_is_cold(grown: Grown) -> None:
    row = grown.at(0)
    assert grown.nodes.need[STATE].item(row) == 0
    assert grown.state(STATE, row) == Residency.DEVICE
    grown.nodes.rank[STATE][row] = COLD + 1
    spoiled(grown, rf"^group 2: warm for nobody: nodes \[{row}\]$")


@pytest.mark.parametrize("rank", [WARM, COLD])
def test_what_milestones_alone_need_lies_right_behind_the_cold_end(grown: Grown, rank: int) -> None:
    row = grown.at(0)
    assert 0 < grown.nodes.need[WINDOW].item(row) < 2**32
    grown.nodes.rank[WINDOW][row] = rank
    grown.tree.internals.pins.queue(DEVICE, WINDOW, np.array([row]))
    spoiled(grown, rf"^group 1: milestones' rank: nodes \[{row}\]$")


def test_at_most_eight_nodes_are_named(grown: Grown) -> None:
    grown.nodes.ticket[ANCHOR][grown.nodes.rows()] = 1
    with pytest.raises(AssertionError, match=r"^group 0: ticket: nodes") as found:
        check(grown.tree)
    assert str(found.value).count(",") == 7
