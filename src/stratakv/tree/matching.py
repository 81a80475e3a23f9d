"""How far a prefix is usable. Owns the search; a match changes nothing, not even recency."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import PageKey
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.spec.retention import complete_ends, needed_starts
from stratakv.tree.nodes import NodeTable
from stratakv.tree.residency import ON_DEVICE, PRESENT, States, all_on_device, all_present


class Match(NamedTuple):
    """Ends in pages. ``device_end`` <= ``end`` <= ``anchor_end``: usable as it lies on the device,
    usable after a load from the host, and how far the anchor alone goes (a request that recomputes
    from ``end`` passes a branching point there)."""

    device_end: int
    end: int
    anchor_end: int


NO_MATCH = Match(0, 0, 0)


class Beyond(NamedTuple):
    """What there is behind a match's end. ``whole``: how far the anchor goes, beyond the match's
    limit too; ``device``: of that, on the device. ``states_only``: nothing but states is missing
    at ``anchor_end``. ``gone``: of the pages behind ``whole``, as far as they are remembered,
    whether the host had the last copy, bool [n]."""

    whole: int
    device: int
    states_only: bool
    gone: npt.NDArray[np.bool_]


class Matcher:
    def __init__(self, spec: CacheSpec, nodes: NodeTable) -> None:
        self._spec = spec
        self._nodes = nodes
        self._others = [group.id for group in spec.groups[1:]]
        self._starts: list[npt.NDArray[np.int64]] = []
        self._at_end: list[tuple[int, ...]] = []  # the same by end, for who asks for all groups
        self._tables(64)

    def _tables(self, ends: int) -> None:
        self._starts = [
            needed_starts(group.retention, self._spec.page_tokens, ends)
            for group in self._spec.groups
        ]
        self._at_end = list(zip(*(table.tolist() for table in self._starts), strict=True))

    def starts(self, end: int) -> list[int]:
        """First needed page of every group at ``end``."""
        if end >= len(self._starts[0]):
            self._tables(2 * end)
        return list(self._at_end[end])

    def match(self, keys: Sequence[PageKey], limit: int) -> Match:
        """Match at most ``limit`` pages of ``keys``."""
        nodes = self._nodes
        anchor_end = nodes.reach(keys, 0, min(limit, len(keys)))
        if not anchor_end:
            return NO_MATCH
        low = self._anchor_on_device(keys, anchor_end)
        if not self._others:
            return Match(low, anchor_end, anchor_end)
        device_end = self._usable(keys, low, all_on_device, ON_DEVICE)
        end = anchor_end
        if device_end < anchor_end:
            end = self._usable(keys, anchor_end, all_present, PRESENT)
        return Match(device_end, end, anchor_end)

    def _anchor_on_device(self, keys: Sequence[PageKey], end: int) -> int:
        """How far the anchor is on the device; the first ``end`` pages are in the tree."""
        index, anchor = self._nodes.index, self._nodes.state[ANCHOR]
        low = end
        if low and not ON_DEVICE.item(anchor.item(index[keys[low - 1]])):
            low, high = 0, end - 1  # the device part is prefix-closed too
            while low < high:
                middle = (low + high + 1) >> 1
                if ON_DEVICE.item(anchor.item(index[keys[middle - 1]])):
                    low = middle
                else:
                    high = middle - 1
        return low

    def beyond(self, keys: Sequence[PageKey], found: Match, limit: int) -> Beyond:
        """What the tree has of all of ``keys`` that a match did not find usable, and had of the
        first ``limit`` pages."""
        nodes, end = self._nodes, found.anchor_end
        whole = nodes.reach(keys, end, len(keys))
        device = self._anchor_on_device(keys, whole)
        states_only = found.end < end
        if states_only:
            tip = nodes.index[keys[end - 1]]
            for group in self._others:
                rows = nodes.tail(tip, end - self._starts[group].item(end))
                if not self._spec.groups[group].stateful and not all_present(
                    nodes.state[group][rows]
                ):
                    states_only = False
        return Beyond(whole, device, states_only, nodes.gone.of(keys, whole, limit))

    def _usable(
        self,
        keys: Sequence[PageKey],
        end: int,
        all_there: Callable[[States], bool],
        there: npt.NDArray[np.bool_],
    ) -> int:
        """Largest end <= ``end`` at which every group but the anchor holds what it needs, where
        ``there[state]`` says what holding is."""
        if not end:
            return 0
        nodes = self._nodes
        if end >= len(self._starts[0]):
            self._tables(2 * end)
        tip = nodes.index[keys[end - 1]]
        for group in self._others:
            rows = nodes.tail(tip, end - self._starts[group].item(end))
            if not all_there(nodes.state[group][rows]):
                break
        else:
            return end
        path = nodes.path(tip)
        usable = np.ones(end + 1, np.bool_)
        for group in self._others:
            held = there[nodes.state[group][path]]
            usable &= complete_ends(self._starts[group][: end + 1], held)
        return int(np.flatnonzero(usable)[-1])
