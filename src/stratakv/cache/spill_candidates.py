"""Which of the requests that run with all of their pages on the device could leave some of them.

Owns the nodes that these stand on, side by side, so that one look prices all. Only requests that
have changed since the last look are taken up one by one. Must not spill anybody (``spilling``).
"""

import numpy as np

from stratakv.cache.sequence_states import Int64s, SequenceState, SequenceStates
from stratakv.core.ids import NodeIds, RowIds
from stratakv.policy.spilling import SpillRules
from stratakv.spec.groups import ANCHOR
from stratakv.tiers.pools import Pools
from stratakv.tree.leases import NO_ROWS
from stratakv.tree.spilled import Spilled


class SpillCandidates:
    def __init__(
        self, tree: Spilled, pools: Pools, sequences: SequenceStates, rules: SpillRules
    ) -> None:
        self._tree, self._pools = tree, pools
        self._sequences, self._rules = sequences, rules
        self._changed: set[int] = set()
        self._rows: RowIds = np.empty(0, np.int32)
        self._ends: Int64s = np.zeros(0, np.int64)  # nodes of each of them
        self._nodes: NodeIds = NO_ROWS

    def change(self, row: int) -> None:
        """What the request at ``row`` stands on, or whether there is one that stays, is another."""
        self._changed.add(row)

    def best(self) -> int | None:
        """The row of the request that makes most room; None where none makes any."""
        self._take_up()
        if not len(self._rows):
            return None
        gains = np.min(
            [
                self._tree.leavable(self._nodes, self._ends, group) - buffer
                for group, buffer in self._rules.buffers.items()
            ],
            axis=0,
        )
        most = int(gains.max())
        return int(self._rows[gains == most].min()) if most > 0 else None

    def check(self) -> None:
        """AssertionError unless it knows every request that may leave pages, as it is now."""
        self._take_up()
        may = {row for row, sequence in self._sequences.items() if self._may(sequence)}
        assert may == set(self._rows.tolist()), "who may be spilled has changed unnoticed"
        *each, rest = np.split(self._nodes, np.cumsum(self._ends))
        assert not len(rest), "nodes are nobody's"
        for row, nodes in zip(self._rows.tolist(), each, strict=True):
            path = self._sequences[row].lease.path
            assert np.array_equal(nodes, path), f"what row {row} stands on has changed unnoticed"

    def _take_up(self) -> None:
        if not self._changed:
            return
        changed = sorted(self._changed)
        self._changed.clear()
        kept = ~np.isin(self._rows, changed)
        new = [row for row in changed if row in self._sequences and self._may(self._sequences[row])]
        paths = [self._sequences[row].lease.path for row in new]
        self._nodes = np.concatenate((self._nodes[np.repeat(kept, self._ends)], *paths))
        ends = np.array(list(map(len, paths)), np.int64)
        self._ends = np.concatenate((self._ends[kept], ends))
        self._rows = np.concatenate((self._rows[kept], np.array(new, np.int32)))

    def _may(self, sequence: SequenceState) -> bool:
        """Whether it may leave pages, the host can hold it to its end, and the device what it needs
        beside that."""
        if sequence.lease.near or sequence.apart or sequence.receives:
            return False
        device, host = self._pools.tiers
        staging = self._rules.staging(sequence.at_once)
        return all(
            sequence.demand.peak[ANCHOR] <= host[group].capacity
            and buffer + staging <= device[group].capacity
            for group, buffer in self._rules.buffers.items()
        )
