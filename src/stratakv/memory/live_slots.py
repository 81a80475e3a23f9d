"""Row -> live page of the running requests, for groups whose requests carry a state.

Owns where each request's state is read and where it is written. Must not decide when a state is
worth keeping (``cache``), nor copy one: a forward reads ``source`` and writes ``own``, so that
starting from a snapshot costs no copy and never writes to it.
"""

import numpy as np

from stratakv.core.ids import NONE, GroupId, PageIds


class LiveSlots:
    """Two columns per group, int32 [rows]; those of groups without a live page stay NONE."""

    def __init__(self, groups: int, rows: int) -> None:
        self._source = [np.full(rows, NONE, np.int32) for _ in range(groups)]
        self._own = [np.full(rows, NONE, np.int32) for _ in range(groups)]

    def source(self, group: GroupId) -> PageIds:
        """The page with the state before a row's next token: its own, or a snapshot of the tree.
        NONE where the state is zero, as before the first token."""
        return self._source[group]

    def own(self, group: GroupId) -> PageIds:
        """The page that takes the state after a row's next tokens; NONE between a snapshot, which
        took the page along, and the next step."""
        return self._own[group]

    def close_row(self, row: int) -> None:
        for column in (*self._source, *self._own):
            column[row] = NONE
