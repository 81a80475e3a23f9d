"""Spills a tree driver's requests, as ``cache.spilling`` does.

Owns the choice of nothing: each verb does one thing to tree and model and compares. The host pages
themselves, and who fills them, are the driver's.
"""

from stratakv.core.ids import NONE, GroupId
from stratakv.testing.tree_books import HOST
from stratakv.testing.tree_driver import TreeDriver
from stratakv.testing.tree_records import WalkRequest
from stratakv.tree.residency import Residency


class SpillDriver:
    def __init__(self, it: TreeDriver) -> None:
        self._it = it

    def spill(self, request: WalkRequest) -> None:
        """It may leave pages on the host from now on."""
        self._it.tree.spilled.spill(request.lease)
        self._it.model.spill(request.id)
        self._it.did["spilled"] += 1

    def settle(self, request: WalkRequest) -> None:
        """What it has near and is whole on the host by now it reads there."""
        it, tree = self._it, self._it.tree.spilled
        for group in tree.groups:
            self._verify_due(request, group)
        expected = it.model.settle(request.id)
        found = dict(tree.settle(request.lease))
        places = {(p, g) for g, rows in found.items() for p, _ in it.places_of(rows, g)}
        assert places == expected, f"{places} are read on the host now, not {expected}"
        for group, rows in found.items():
            at, host = tree.places(group, rows)
            for index, page in zip(at.tolist(), host.tolist(), strict=True):
                spot = it.model.spot((request.prompt[: index + 1], group))
                assert page == spot.pages[HOST], f"page {page} is not the host's"
                request.table[group, index] = NONE
        it.did["settled"] += bool(found)

    def _verify_due(self, request: WalkRequest, group: GroupId) -> None:
        """One look over what is near finds what has changed."""
        it, near = self._it, request.lease.near[group]
        states = [it.model.spot(place).state for place in it.places_of(near, group)]
        for alone in (False, True):
            wanted = {Residency.BOTH, Residency.DEVICE} if alone else {Residency.BOTH}
            found = it.tree.spilled.due(group, near, alone=alone).tolist()
            assert found == [state in wanted for state in states], "who is due"
