"""What became of another engine's pages, in pages. Owns the names of the counts, and the sums."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

from stratakv.storage.backend import ReadStatus, WriteStatus

PageEvent: TypeAlias = Literal[
    "asked", "present", "late", "loaded", "missing", "damaged", "unread", "stored",
    "already_stored", "refused", "unwritten", "dropped",
]  # fmt: skip
EVENTS: Final[Mapping[PageEvent, str]] = {
    "asked": "the store was asked for it",
    "present": "the store has it",
    "late": "the store had not answered in time or hangs, which is a miss",
    "loaded": "read from the store, its checksum right",
    "missing": "it was there when it was asked for, and gone when it was read",
    "damaged": "it was not what was stored, and was put aside",
    "unread": "the store failed, was left alone, or was too slow to read it",
    "stored": "written to the store",
    "already_stored": "the store had it already, and nothing was written",
    "refused": "the store had no room for it, or takes nothing for now",
    "unwritten": "the store failed, hung or was left alone when it was to be written",
    "dropped": "too much was queued for the store",
}
_READS: Final[Mapping[ReadStatus, PageEvent]] = {
    ReadStatus.HIT: "loaded",
    ReadStatus.MISS: "missing",
    ReadStatus.CORRUPT: "damaged",
    ReadStatus.FAILED: "unread",
}
_WRITES: Final[Mapping[WriteStatus, PageEvent]] = {
    WriteStatus.STORED: "stored",
    WriteStatus.PRESENT: "already_stored",
    WriteStatus.REFUSED: "refused",
    WriteStatus.FAILED: "unwritten",
}


class PageCounts:
    """``total`` is never taken back. Threads that share one take turns."""

    def __init__(self) -> None:
        self.total: Counter[PageEvent] = Counter()
        self._taken: Counter[PageEvent] = Counter()

    def add(self, event: PageEvent, pages: int) -> None:
        if pages:
            self.total[event] += pages

    def add_reads(self, statuses: Sequence[ReadStatus], wanted: int) -> None:
        """``wanted``: pages; those behind ``statuses`` were not tried."""
        for status, pages in Counter(statuses).items():
            self.add(_READS[status], pages)
        self.add("unread", wanted - len(statuses))

    def add_writes(self, statuses: Sequence[WriteStatus], wanted: int) -> None:
        """The same of what was to be written."""
        for status, pages in Counter(statuses).items():
            self.add(_WRITES[status], pages)
        self.add("unwritten", wanted - len(statuses))

    def take(self) -> Mapping[PageEvent, int]:
        """What has come since the last call."""
        new = self.total - self._taken
        self._taken = Counter(self.total)
        return dict(new)
