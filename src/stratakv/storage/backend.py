"""What a store of host pages must do, and the records that cross its boundary.

Owns the protocol. Calls block, and one thread makes them for each open backend: threads, queues and
retries are the I/O worker's. Must not know trees or requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import GroupId, PageKey
from stratakv.spec.groups import CacheSpec


class ObjectKey(NamedTuple):  # thousands are made for one long prompt
    """One host page of one group on one shard. ``page`` is 32 bytes and has the namespace in it: a
    page of another model, layout, adapter or tenant has another key."""

    page: PageKey
    group: GroupId
    shard: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFormat:
    """What every object of a store looks like. ``spec_digest``: 16 bytes, ``CacheSpec.digest``.
    ``page_bytes``: payload of one object, by group. A place may be open in several formats at once:
    beside its pages a server keeps a small mark (``cut_marks``)."""

    spec_digest: bytes
    page_bytes: tuple[int, ...]

    @classmethod
    def of(cls, spec: CacheSpec) -> "StoreFormat":
        """Of the host pages of a cache."""
        return cls(
            spec_digest=spec.digest, page_bytes=tuple(group.page_bytes for group in spec.groups)
        )


class Everything(Enum):
    """Every object of this store's format, whoever wrote it."""

    EVERYTHING = auto()


class ReadStatus(Enum):
    HIT = auto()  # the whole payload is in the buffer, and its checksum is right
    MISS = auto()  # also an object that was evicted between the question and the read
    CORRUPT = auto()  # there was something, but not what was stored: never served, put aside
    FAILED = auto()  # the store could not be asked


class WriteStatus(Enum):
    STORED = auto()
    PRESENT = auto()  # it was there already
    REFUSED = auto()  # no room, or writing is off for now
    FAILED = auto()


class StorageBackend(Protocol):
    """``StorageError`` where the whole call failed; a status where one object did."""

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        """Which objects are there, bool [n]. Cheap; what is there may be gone when it is read."""
        ...

    def read(self, keys: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[ReadStatus]:
        """Fill ``into[i]`` (writable, ``page_bytes`` of its group) with object i. What a buffer
        holds is undefined unless its status is HIT. Does not count as a use."""
        ...

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[WriteStatus]:
        """Store ``pages[i]`` as object i; the buffers are the caller's again on return."""
        ...

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Record a use, in the order given: callers name the deepest page of a chain first, so that
        a parent is never older than its child. May be dropped, and never fails."""
        ...

    def remove(self, keys: Sequence[ObjectKey] | Everything) -> int:
        """Forget objects; how many were there. What is written while everything is removed may
        stay. Another format's objects, and what is not ours, are left alone."""
        ...

    def close(self) -> None:
        """Write out what is known and let go of files, sockets and memory. Twice is once."""
        ...
