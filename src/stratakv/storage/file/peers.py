"""The writers that share a directory: who lacks room asks for it, and who has clearly more gives.

Owns what this process asks of the others and which of their requests it has answered; the request
itself lies in the ledger. Must not delete anything.
"""

import logging
from typing import Final

from stratakv.core.clock import Clock
from stratakv.storage.file.catalog import Catalog
from stratakv.storage.file.ledger import Ledger, Want

_logger = logging.getLogger(__name__)

WANT_NS: Final = 30 * 10**9
"""How long a writer without room is remembered."""
AHEAD_NS: Final = 10**9
"""A want from further ahead is none: its clock was wrong, or its bytes are."""


class StoreWriters:
    def __init__(self, ledger: Ledger, catalog: Catalog, clock: Clock) -> None:
        self._ledger, self._catalog, self._clock = ledger, catalog, clock
        self._wanting = False
        self._answered: Want | None = None

    def ask(self) -> None:
        """This process has no room, because others hold it."""
        held_bytes = sum(self._segment_bytes())
        self._put(Want(self._ledger.writer, held_bytes, self._now_ns()))

    def withdraw(self) -> None:
        """This process has room, or wants no more."""
        if self._wanting:
            self._put(None)

    def close(self) -> None:
        """Want nothing any more; another's want may have come in place of this one's."""
        want = self._ledger.want() if self._wanting else None
        if want is not None and want.writer == self._ledger.writer:
            self._put(None)

    def owes(self) -> bool:
        """Whether another writer has no room because this one has so much."""
        want = self._ledger.want()
        if want is None or want.writer == self._ledger.writer:
            return False
        sizes = self._segment_bytes()
        fresh = 0 <= self._now_ns() + AHEAD_NS - want.since_ns <= AHEAD_NS + WANT_NS
        return fresh and bool(sizes) and sum(sizes) >= want.held_bytes + 2 * max(sizes)

    def take_debt(self) -> bool:
        """Whether a segment is owed that was not given yet; True once for each time that another
        says so: who is dead says nothing more."""
        want = self._ledger.want()
        if want == self._answered or not self.owes():
            return False
        self._answered = want
        return True

    def _put(self, want: Want | None) -> None:
        try:
            self._ledger.set_want(want)
        except OSError as error:  # the disk is full to the last byte
            _logger.warning("others cannot be asked for room: %s", error)
        else:
            self._wanting = want is not None

    def _segment_bytes(self) -> list[int]:
        return [placed.segment.geometry.physical_bytes for placed in self._catalog.owned()]

    def _now_ns(self) -> int:
        return int(self._clock.now_s() * 1e9)
