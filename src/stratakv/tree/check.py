"""Every invariant of the tree, verified from scratch. The oracle of the property tests.

Owns the list of invariants. Reads everything, changes nothing, and can run under load between two
operations.
"""

from collections.abc import Callable
from typing import assert_never

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NONE, GroupId, NodeIds
from stratakv.spec.groups import ANCHOR
from stratakv.spec.retention import handed_over, needed
from stratakv.tree.lease import DeviceLease, HostHold, LoadLease
from stratakv.tree.nodes import ANY, CHECKPOINT, MILESTONE, TIERS, NodeTable
from stratakv.tree.order import COLD, WARM
from stratakv.tree.prefix_tree import Internals, PrefixTree
from stratakv.tree.residency import ON_TIER, Residency

Bools = npt.NDArray[np.bool_]


def check(tree: PrefixTree) -> None:
    """Raise ``AssertionError`` naming the first invariant that does not hold."""
    internals = tree.internals
    rows = internals.nodes.rows()
    checks: tuple[Callable[[Internals, NodeIds], None], ...] = (
        _shape, _children, _pages, _anchor, _pins, _evictable, _queues, _checkpoints, _cold,
    )  # fmt: skip
    for one in checks:
        one(internals, rows)


def _expect(holds: Bools, rows: NodeIds, what: str) -> None:
    if not holds.all():
        bad = rows[~np.broadcast_to(holds, rows.shape)]
        raise AssertionError(f"{what}: nodes {bad[:8].tolist()}")


def _shape(tree: Internals, rows: NodeIds) -> None:
    nodes = tree.nodes
    assert len(set(rows.tolist())) == len(rows) == len(nodes), "a row is in the index twice"
    for key, row in nodes.index.items():
        assert nodes.key_of(row) == key, f"node {row} does not know its key"
    parent = nodes.parent[rows]
    known = np.zeros(len(nodes.parent), np.bool_)
    known[rows] = known[NONE] = True
    _expect(known[parent], rows, "a parent is not in the tree")
    _expect(nodes.depth[rows] == nodes.depth[parent] + 1, rows, "depth is not parent's plus one")
    for row in rows.tolist():
        path = nodes.path(row).tolist()
        assert path[-1] == row, f"the path to node {row} ends elsewhere"
        assert [nodes.parent.item(r) for r in path] == [NONE, *path[:-1]], f"runs broke path {path}"


def _count_kids(nodes: NodeTable, rows: NodeIds) -> npt.NDArray[np.int32]:
    kids = np.zeros(len(nodes.parent), np.int32)
    np.add.at(kids, nodes.parent[rows], 1)
    return kids


def _children(tree: Internals, rows: NodeIds) -> None:
    nodes = tree.nodes
    for tier in TIERS:
        here = rows[ON_TIER[tier][nodes.state[ANCHOR][rows]]]
        _expect((_count_kids(nodes, here) == nodes.kids[tier])[rows], rows, f"{tier.name} kids")
    _expect((_count_kids(nodes, rows) == nodes.kids[ANY])[rows], rows, "kids")


def _pages(tree: Internals, rows: NodeIds) -> None:
    nodes = tree.nodes
    gone = np.ones(len(nodes.parent), np.bool_)
    gone[rows] = False
    for group in range(len(tree.spec.groups)):
        state = nodes.state[group]
        assert not state[gone].any(), f"group {group}: a removed node still holds a page"
        for tier in TIERS:
            pages = nodes.page[tier][group]
            here = ON_TIER[tier][state[rows]]
            _expect((pages[rows] != NONE) == here, rows, f"group {group}: {tier.name} page id")
            held = pages[rows[here]]
            assert len(np.unique(held)) == len(held), f"group {group}: a {tier.name} page twice"
        loading = state[rows] == Residency.LOADING
        _expect((nodes.ticket[group][rows] != NONE) == loading, rows, f"group {group}: ticket")


def _anchor(tree: Internals, rows: NodeIds) -> None:
    nodes = tree.nodes
    state, parent = nodes.state[ANCHOR], nodes.parent[rows]
    _expect(state[rows] != Residency.ABSENT, rows, "a node without its anchor")
    closed = ~ON_TIER[0][state[rows]] | ON_TIER[0][state[parent]] | (parent == NONE)
    _expect(closed, rows, "anchor on the device below one that is not")


def _near(
    lease: DeviceLease | LoadLease, group: int, held: NodeIds, want: list[npt.NDArray[np.int32]]
) -> NodeIds:
    """Of what a lease holds that which is not pinned on the host because it is spilled."""
    if group not in lease.near:
        return held
    near = lease.near[GroupId(group)]
    assert np.isin(near, held).all(), f"group {group}: a lease is near what it does not hold"
    want[1][held[~np.isin(held, near)]] += 1
    return near


def _pins(tree: Internals, rows: NodeIds) -> None:
    """Pins are exactly those of open leases, of copies in flight and of pages being stored."""
    nodes = tree.nodes
    for group, spec in enumerate(tree.spec.groups):
        state = nodes.state[group]
        moving = ((state == Residency.SAVING) | (state == Residency.LOADING)).astype(np.int32)
        want = [moving.copy(), moving.copy()]
        for lease in tree.leases:
            assert len(lease.path) == lease.end, "a lease's path ends elsewhere"
            first = lease.starts[group]  # later than needed where a live page stands in
            end, page = lease.end, tree.spec.page_tokens
            # A prompt that may be handed over keeps what another engine may take.
            taken = handed_over(spec.retention, end * page, page)
            least = 0 if isinstance(lease, HostHold) else taken.start
            assert least <= first <= end, f"group {group}: a lease begins at {first}"
            held = nodes.tail(lease.path.item(-1), end - first) if end else lease.path
            match lease:
                case DeviceLease():
                    near = _near(lease, group, held, want)
                    want[0][near] += 1
                case LoadLease():
                    near = _near(lease, group, held, want)
                    want[0][near[~np.isin(near, lease.host[group])]] += 1
                    want[1][lease.host[group]] += 1
                case HostHold():
                    want[1][lease.host[group]] += 1
                case _:
                    assert_never(lease)
        for writing in tree.stored.writing:
            if group in {ANCHOR, writing.group}:
                want[1][writing.rows] += 1
        for tier in TIERS:
            pins = nodes.pins[tier][group]
            assert (pins == want[tier]).all(), f"group {group}: {tier.name} pins leak or lack"
            _expect((pins[rows] == 0) | ON_TIER[tier][state[rows]], rows, "a pin on nothing")


def _evictable(tree: Internals, rows: NodeIds) -> None:
    nodes = tree.nodes
    for tier in TIERS:
        for group in range(len(tree.spec.groups)):
            free = ON_TIER[tier][nodes.state[group][rows]] & (nodes.pins[tier][group][rows] == 0)
            count = tree.pins.evictable[tier][group]
            assert count == int(free.sum()), f"group {group}: {tier.name} evictable {count}"


def _busy_below(tree: Internals, rows: NodeIds) -> Bools:
    """Whether any group of the node, or of a node below it, is pinned on any tier."""
    nodes = tree.nodes
    busy = np.zeros(len(nodes.parent), np.bool_)
    for tier in TIERS:
        for group in range(len(tree.spec.groups)):
            busy |= nodes.pins[tier][group] > 0
    for row in rows[np.argsort(-nodes.depth[rows])].tolist():
        busy[nodes.parent.item(row)] |= busy.item(row)
    return busy[rows]


def _queues(tree: Internals, rows: NodeIds) -> None:
    """Whatever could leave now is covered by a batch that comes up no later than its rank."""
    nodes = tree.nodes
    busy = _busy_below(tree, rows)
    for tier in TIERS:
        for group in range(len(tree.spec.groups)):
            free = ON_TIER[tier][nodes.state[group][rows]] & (nodes.pins[tier][group][rows] == 0)
            if group == ANCHOR:
                last_copy = nodes.state[group][rows] != Residency.BOTH
                free &= nodes.kids[tier][rows] == 0
                free &= ~(last_copy & busy)  # offered again when the pin goes
            earliest = np.full(len(nodes.parent), np.iinfo(np.int64).max)
            for key, batch in tree.pins.queues[tier][group].batches():
                earliest[batch] = np.minimum(earliest[batch], key)
            covered = earliest[rows] <= nodes.rank[group][rows]
            _expect(~free | covered, rows, f"group {group}: not queued on {tier.name}")


def _checkpoints(tree: Internals, rows: NodeIds) -> None:
    nodes, page = tree.nodes, tree.spec.page_tokens
    marked = ((nodes.checkpoint, CHECKPOINT), (nodes.milestone, MILESTONE))
    assert not (nodes.checkpoint & nodes.milestone).any(), "a checkpoint that is a milestone too"
    for group, spec in enumerate(tree.spec.groups):
        whole = spec.keeps_all
        want = np.full(len(nodes.parent), whole * CHECKPOINT, np.int64)
        for marks, weight in () if whole else marked:
            for tip in rows[marks[rows]].tolist():
                span = needed(spec.retention, (nodes.depth.item(tip) + 1) * page, page)
                want[nodes.tail(tip, len(span))] += weight
        assert (nodes.need[group] == want).all(), f"group {group}: needs of marks"


def _cold(tree: Internals, rows: NodeIds) -> None:
    """Whatever the policy: what no lease, copy or mark needs is at the cold end, and right behind
    it what milestones alone need."""
    nodes = tree.nodes
    for group in range(len(tree.spec.groups)):
        idle = nodes.state[group][rows] != Residency.ABSENT
        for tier in TIERS:
            idle &= nodes.pins[tier][group][rows] == 0
        need, rank = nodes.need[group][rows], nodes.rank[group][rows]
        cold, spare = idle & (need == 0), idle & (need > 0) & (need < CHECKPOINT)
        _expect(~cold | (rank == COLD), rows, f"group {group}: warm for nobody")
        _expect(~spare | ((rank > COLD) & (rank < WARM)), rows, f"group {group}: milestones' rank")
