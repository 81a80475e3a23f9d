"""What a file store counted since it was opened. Owns the numbers; must not decide anything."""

from dataclasses import dataclass

from stratakv.core.counts import Counts


@dataclass(slots=True)
class FileStoreCounters(Counts):
    """Objects, but for ``*_errors`` (calls that the system refused)."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    quarantined: int = 0
    stored: int = 0
    refused: int = 0
    evicted: int = 0
    expired: int = 0
    moved: int = 0
    read_errors: int = 0
    write_errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStats:
    """A file store at one moment. ``pages``: servable, of every process. ``writing``: False while
    errors or a full disk keep writes off."""

    pages: int
    segments: int
    physical_bytes: int
    quota_bytes: int
    writing: bool
    growing: bool
    damaged_headers: int
    counters: FileStoreCounters
