"""Holds the whole of a tree and its pools against the perfect model. Owns the
comparison; must not change anything."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from stratakv.core.ids import NONE, GroupId, NodeIds
from stratakv.memory.allocator import PageAllocator
from stratakv.testing.tree_books import DEVICE, HOST, Freed, Prefix
from stratakv.testing.tree_model import TreeModel
from stratakv.testing.tree_records import WalkFetch, WalkPrefetch, WalkRequest, keys_of
from stratakv.tree.nodes import Tier
from stratakv.tree.prefix_tree import PrefixTree
from stratakv.tree.residency import Residency


def verify_nodes(
    tree: PrefixTree, model: TreeModel, rows: NodeIds, held: Mapping[Freed, Prefix]
) -> None:
    """Same nodes, same pages, same states, and each page holds its own prefix's bytes.

    ``rows`` are the tree's, in the order of the model's nodes.
    """
    nodes = tree.internals.nodes
    assert len(nodes) == len(model.nodes), f"{len(nodes)} nodes, not {len(model.nodes)}"
    assert nodes.hits[rows].tolist() == [model.hits[prefix] for prefix in model.nodes], "hits"
    for group in model.groups:
        spots = [spots[group] for spots in model.nodes.values()]
        assert nodes.state[group][rows].tolist() == [s.state for s in spots], f"group {group}"
        for row, spot in zip(rows.tolist(), spots, strict=True):
            here = spot.pages[DEVICE] != NONE
            assert tree.holds(nodes.key_of(row), GroupId(group)) == here, "holds"
        for tier in Tier:
            pages = nodes.page[tier][group][rows].tolist()
            assert pages == [spot.pages[tier] for spot in spots], f"pages of group {group}"
            landing = (Residency.LOADING, Residency.SAVING)[tier]
            for prefix, spot, page in zip(model.nodes, spots, pages, strict=True):
                if page != NONE and spot.state != landing:
                    there = held.get((tier, group, page))
                    assert there == prefix, f"page {page} of {prefix} holds {there}"


def verify_leases(
    tree: PrefixTree, model: TreeModel, rows: NodeIds, requests: Sequence[WalkRequest]
) -> None:
    """A lease begins where it should in every group; what the tree reports of it is so."""
    assert len(tree.leases) == len(model.leases), f"{len(tree.leases)} leases"
    place_at = dict(zip(rows.tolist(), model.nodes, strict=True))
    for request in requests:
        lease, held = request.lease, model.leases[request.id]
        assert (lease.end, lease.starts) == (held.end, held.starts), f"{lease}, not {held}"
        for group in model.groups:
            assert tree.leases.sole(lease, GroupId(group)) == model.sole(request.id, group), "sole"
        for end in range(held.end + 1):
            marked = held.prompt[:end] in model.checkpoints
            assert tree.checkpoints.at(lease, end) == marked, f"checkpoint at {end}"
        ends = tree.checkpoints.milestones(lease)
        assert ends == model.milestones_of(request.id), f"milestones at {ends}"
        marked = [
            (place_at[row], int(backup.group))
            for backup in tree.backups.marked(lease)
            for row in backup.nodes.tolist()
        ]
        assert sorted(marked) == sorted(model.marked_unsaved(request.id)), "unsaved under marks"
        found = [
            (place_at[row], int(backup.group))
            for backup in tree.backups.kept(lease)
            for row in backup.nodes.tolist()
        ]
        assert sorted(found) == sorted(model.kept_unsaved(request.id)), "what is worth a backup"


def verify_pools(
    pools: Sequence[Sequence[PageAllocator]],
    model: TreeModel,
    requests: Sequence[WalkRequest],
    fetches: Sequence[WalkFetch | WalkPrefetch],
) -> None:
    """Every page is free, in the tree, or owned by exactly one request or fetch."""
    held: list[Freed] = [page for request in requests for page in request.own]
    for fetch in fetches:
        held += [(HOST, g, p) for g, column in enumerate(fetch.pages) for p in column]
    for spots in model.nodes.values():
        for group, spot in enumerate(spots):
            held += [(tier, group, spot.pages[tier]) for tier in Tier]
    held = [page for page in held if page[2] != NONE]
    assert len(set(held)) == len(held), "a page has two owners"
    owned = Counter((tier, group) for tier, group, _ in held)
    for tier in Tier:
        for group, pool in enumerate(pools[tier]):
            free, total = pool.available(), pool.capacity
            assert free + owned[tier, group] == total, f"{tier.name} {group} leaks"


def verify_store(tree: PrefixTree, model: TreeModel) -> None:
    """Along every path, what a store should get is what the tree would give it."""
    stored, nodes = tree.stored, tree.internals.nodes
    assert stored.active == model.store.active, "whether there is a store"
    assert len(stored.writing) == len(model.store.writing), f"{len(stored.writing)} writes"
    inner = {prefix[:-1] for prefix in model.nodes}
    for tip in model.nodes.keys() - inner if model.store.active else ():
        path = [tip[: at + 1] for at in range(len(tip))]
        rows = nodes.path(nodes.index[keys_of(tip, tree.spec.page_tokens)[-1]])
        for group in model.groups:
            places = [(prefix, group) for prefix in path]
            readable = [model.store.readable(place) for place in places]
            found = [
                nodes.depth[effect.nodes].tolist()
                for effect in stored.wanted(GroupId(group), rows[np.array(readable, np.bool_)])
            ]
            expected = [len(prefix) - 1 for prefix, _ in model.store.worthy(places)]
            assert found == ([expected] if expected else []), (
                f"of {tip} group {group} wants {found}"
            )


def verify_spilled(tree: PrefixTree, model: TreeModel, requests: Sequence[WalkRequest]) -> None:
    """What of a spilled lease is near, where it reads the rest, and what would leave if another one
    were spilled."""
    spilled = tree.spilled
    for request in requests:
        lease, books = request.lease, model.leases[request.id]
        assert bool(lease.near) == books.spilled, "who is spilled"
        for group in spilled.groups:
            places = [(request.prompt[: at + 1], int(group)) for at in range(lease.end)]
            counts = np.array([lease.end], np.int64)
            found = spilled.leavable(lease.path, counts, group).tolist()
            assert found == [model.leavable(request.id, group)], f"{found} pages would leave"
            if not books.spilled:
                continue
            far = [place in books.away for place in places]
            near = lease.path[~np.array(far, np.bool_)] if far else lease.path
            assert np.array_equal(np.sort(lease.near[group]), np.sort(near)), "what is near"
            pages = spilled.host_pages(lease, group).tolist()
            right = [
                model.spot(place).pages[HOST] if away else NONE
                for place, away in zip(places, far, strict=True)
            ]
            assert pages == right, f"{request.prompt} reads host pages {pages}, not {right}"
            assert tree.leases.pages(lease, group).tolist() == [
                NONE if away else model.spot(place).pages[DEVICE]
                for place, away in zip(places, far, strict=True)
            ]


def verify_reads(request: WalkRequest, model: TreeModel, held: Mapping[Freed, Prefix]) -> None:
    """What a running request reads is what it should read, now or when its load has landed; of a
    state that is its own page, whatever else its lease holds."""
    for group, page in request.live.items():
        there = held.get((DEVICE, group, page))
        assert there == request.prompt[: request.lease.end], f"a state of {there}"
    books = model.leases[request.id]
    for prefix, group in books.places():
        if group in request.live:
            continue
        page = request.table[group, len(prefix) - 1]
        spot = model.spot((prefix, group))
        if (prefix, group) in books.away:
            there = held.get((HOST, group, spot.pages[HOST]))
            assert page == NONE, f"{request.prompt} reads {prefix} in two places"
            assert there == prefix, f"{request.prompt} reads {there} on the host for {prefix}"
            continue
        landing = spot.state == Residency.LOADING and page == spot.pages[DEVICE]
        there = held.get((DEVICE, group, page))
        assert landing or there == prefix, f"{request.prompt} reads {there} for {prefix}"
