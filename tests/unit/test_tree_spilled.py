"""What a lease holds that leaves its full pages on the host."""

from dataclasses import replace

import numpy as np

from stratakv.core.ids import NONE, GroupId, NodeIds
from stratakv.spec.groups import Home
from stratakv.spec.retention import KeepAll
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_driver import TreeDriver
from stratakv.tree.lease import DeviceLease

SELECTED = GroupId(1)


def spilled_lease() -> tuple[TreeDriver, DeviceLease]:
    """A request on three pages, of which the first is on the host by now."""
    plain = small_spec((KeepAll(),), page_tokens=1)
    anchor, selected = plain.groups
    spec = replace(plain, groups=(anchor, replace(selected, home=Home.HOST)))
    it = TreeDriver(spec, [16, 16], [16, 16])
    request = it.arrive((0, 1, 2, 3), 3, load=False)
    assert it.extend(request, 3, generous=False)
    it.tree.spilled.spill(request.lease)
    it.backup((0,), SELECTED, 1)
    it.end_copy(it.copies[-1], ok=True)
    return it, request.lease


def test_one_look_finds_what_is_saved_and_what_is_not_to_be() -> None:
    it, lease = spilled_lease()
    spilled, near = it.tree.spilled, lease.near[SELECTED]
    assert spilled.due(SELECTED, near, alone=False).tolist() == [True, False, False]
    assert spilled.due(SELECTED, near, alone=True).tolist() == [True, True, True]
    it.backup((0, 1, 2), SELECTED, 99)
    assert spilled.due(SELECTED, near, alone=True).tolist() == [True, False, False]


def test_what_would_leave_is_counted_for_all_leases_at_once() -> None:
    it, lease = spilled_lease()
    spilled = it.tree.spilled
    other = it.arrive((0, 1, 5), 3, load=False)
    path, count = lease.path, len(lease.path)

    def leavable(nodes: NodeIds, *counts: int) -> list[int]:
        return spilled.leavable(nodes, np.array(counts, np.int64), SELECTED).tolist()

    assert leavable(path[:0]) == []
    assert leavable(path, count) == [0], "both stand on what is saved"
    it.release(other)
    assert leavable(np.concatenate((path, path)), count, count) == [1, 1]
    assert leavable(np.concatenate((path, path[1:])), count, 0, count - 1) == [1, 0, 0]


def test_a_page_that_is_held_on_the_host_is_none_on_the_device() -> None:
    """It may be there still, but nobody holds it: a load that ends beside it brings it not back."""
    it, lease = spilled_lease()
    leases, indices = it.tree.leases, np.arange(3)
    before = leases.pages_at(lease, SELECTED, indices)
    assert (before != NONE).all()
    ((group, rows),) = it.tree.spilled.settle(lease)
    assert (group, len(rows)) == (SELECTED, 1)
    after = leases.pages_at(lease, SELECTED, indices)
    assert after.tolist() == [NONE, *before[1:].tolist()]
    assert leases.pages(lease, SELECTED).tolist() == after.tolist()
