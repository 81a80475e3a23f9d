"""Who is where: a row per slot of every open segment, in arrays.

Owns the rows and the dict that finds them. Must not do I/O. There is no Python object per page but
two ints in the dict, which is filled and asked by loops in C.
"""

from collections import deque
from itertools import repeat
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.storage.file.segment import Geometry, Uses
from stratakv.storage.header import (
    HEADER,
    KEY_WORDS,
    MAGIC,
    Headers,
    KeyWords,
    is_blank,
    is_sound,
    words_of,
)

RowIds: TypeAlias = npt.NDArray[np.int64]
"""Rows of the index, one per slot, int64 [n]."""

NOWHERE: Final = -1
FOREIGN: Final = -1
_MIX: Final = np.array(
    [1, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x9E3779B97F4A7C15], np.uint64
)
"""One for each word of a key; odd, so that no bit of a word is lost."""
_FIRST_ROWS: Final = 1024


class Index:
    """``headers``, ``used`` (ns), ``present``, ``segment`` (its number) and ``writable`` (the group
    of a segment that this process writes, else FOREIGN), all by row."""

    def __init__(self) -> None:
        self.headers: Headers = np.zeros(0, HEADER)
        self.used: Uses = np.zeros(0, np.uint64)
        self.present: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.segment: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.writable: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.newest_ns = 0
        self._row_of: dict[int, int] = {}
        self._rows = 0
        self._spare: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._row_of)

    def attach(self, number: int, slots: int) -> int:
        """Rows for a segment, all absent; returns the first."""
        spare = self._spare.get(slots)
        if spare:
            base = spare.pop()
        else:
            base = self._rows
            self._rows += slots
            self._grow(self._rows)
        self.segment[base : base + slots] = number
        self.writable[base : base + slots] = FOREIGN
        return base

    def detach(self, base: int, slots: int) -> None:
        rows = np.arange(base, base + slots)
        self.clear(rows)
        self.segment[rows], self.writable[rows] = NOWHERE, FOREIGN
        self._spare.setdefault(slots, []).append(base)

    def load(self, base: int, table: Headers, uses: Uses, geometry: Geometry) -> list[int]:
        """Take the headers and uses of a segment as they are on disk now; returns the slots that
        hold a header that is no good and was not there before. What did not change stays."""
        rows = np.arange(base, base + len(table))
        changed = ~same_headers(table, self.headers[rows])
        at, rows_changed = np.flatnonzero(changed), rows[changed]
        self.drop(rows_changed[self.present[rows_changed]])
        fresh = table[at]
        self.headers[rows_changed] = fresh
        self.used[rows_changed] = fresh["stored_ns"]
        self.merge_uses(rows, uses)
        good = servable(fresh, geometry)
        self.add(rows_changed[good])
        return at[~good & ~is_blank(fresh)].tolist()

    def merge_uses(self, rows: RowIds, uses: Uses) -> None:
        """Take in uses that other processes wrote."""
        self.used[rows] = np.maximum(self.used[rows], uses)
        self.newest_ns = max(self.newest_ns, int(self.used[rows].max()))

    def lookup(self, wanted: Headers) -> RowIds:
        """Row of each object, NOWHERE where it is not known; the whole key is compared."""
        return self.rows_of(words_of(wanted)[:, KEY_WORDS])

    def rows_of(self, wanted: KeyWords) -> RowIds:
        """The same by their key words."""
        rows = self._get(_fingerprints(wanted).tolist())
        at = np.flatnonzero(rows >= 0)
        if len(at):
            held = words_of(self.headers)[rows[at], KEY_WORDS]
            same = (held == wanted[at]).all(axis=1)
            rows[at[~same]] = NOWHERE
        return rows

    def put(self, rows: RowIds, table: Headers) -> None:
        """These slots hold these objects from now on."""
        self.headers[rows] = table
        self.used[rows] = table["stored_ns"]
        self._add(rows, table)

    def add(self, rows: RowIds) -> None:
        """Find these rows by their headers. Where two processes stored the same object, or two keys
        share 64 bits, the last one is found, and the other is a slot to be freed."""
        self._add(rows, self.headers[rows])

    def _add(self, rows: RowIds, table: Headers) -> None:
        prints = _fingerprints_of(table).tolist()
        hidden = self._get(prints)
        self.present[hidden[hidden >= 0]] = False
        self._row_of.update(zip(prints, rows.tolist(), strict=True))
        self.present[rows] = self._get(prints) == rows

    def drop(self, rows: RowIds) -> None:
        """Forget present rows; their headers stay, to be compared with the disk."""
        prints = _fingerprints_of(self.headers[rows]).tolist()
        deque(map(self._row_of.__delitem__, prints), maxlen=0)
        self.present[rows] = False

    def clear(self, rows: RowIds) -> None:
        """These slots are free: forget what they held, headers and all."""
        self.drop(rows[self.present[rows]])
        self.headers[rows] = np.zeros((), HEADER)
        self.used[rows] = 0

    def _get(self, prints: list[int]) -> RowIds:
        return np.fromiter(map(self._row_of.get, prints, repeat(NOWHERE)), np.int64, len(prints))

    def _grow(self, rows: int) -> None:
        capacity = len(self.used)
        if rows > capacity:
            more = max(rows, 2 * capacity, _FIRST_ROWS) - capacity
            self.headers = np.concatenate([self.headers, np.zeros(more, HEADER)])
            self.used = np.concatenate([self.used, np.zeros(more, np.uint64)])
            self.present = np.concatenate([self.present, np.zeros(more, np.bool_)])
            self.segment = np.concatenate([self.segment, np.full(more, NOWHERE, np.int32)])
            self.writable = np.concatenate([self.writable, np.full(more, FOREIGN, np.int32)])


def same_headers(left: Headers, right: Headers) -> npt.NDArray[np.bool_]:
    """Bit for bit, bool [n]."""
    return (words_of(left) == words_of(right)).all(axis=1)


def servable(table: Headers, geometry: Geometry) -> npt.NDArray[np.bool_]:
    """Which headers name an object that a segment of this geometry can hold, bool [n]."""
    good = is_sound(table)
    good &= table["magic"] == MAGIC
    good &= (table["spec"] == np.frombuffer(geometry.spec_digest, "<u8")).all(axis=1)
    good &= table["group"] == geometry.group
    good &= table["payload_bytes"] == geometry.page_bytes
    return good


def _fingerprints_of(table: Headers) -> npt.NDArray[np.uint64]:
    return _fingerprints(words_of(table)[:, KEY_WORDS])


def _fingerprints(keys: KeyWords) -> npt.NDArray[np.uint64]:
    """64 bits of each key. All of it goes in: keys that share a part of theirs do not collide."""
    return keys @ _MIX
