"""Into which slices a store's pages are cut: small marks beside them, through the ordinary verbs.

Owns the marks: their names, who writes one and when it is written again. A mark says that pages of
one model lie there in the slices of one cut, so that whoever cuts otherwise, and would find none of
them, is known. A store may evict a mark like anything else: it is touched from time to time, and
written again. Must not judge (who opens the store does), nor know how pages are cut.
"""

import hashlib
import logging
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.core.clock import Clock
from stratakv.core.errors import StorageError
from stratakv.core.ids import GroupId, PageKey
from stratakv.storage.backend import (
    Everything,
    ObjectKey,
    ReadStatus,
    StorageBackend,
    StoreFormat,
    WriteStatus,
)

log = logging.getLogger(__name__)

MARK_BYTES: Final = 64
RENEW_S: Final = 60.0
"""How often a server that uses its store sees to its mark."""
_NAME: Final = b"stratakv-cut-mark-1"


def marks_form(spec_digest: bytes) -> StoreFormat:
    """Of the marks of all models with one cache, whatever the cut. ``spec_digest``: of that cache,
    16 bytes. Each mark has a key of its own: two writers can never meet in one."""
    digest = hashlib.sha256(_NAME + spec_digest).digest()[:16]
    return StoreFormat(spec_digest=digest, page_bytes=(MARK_BYTES,))


class CutMarks:
    """Marks of one model. ``store``: open, of ``marks_form``, and closed with this. ``model``: its
    fingerprint. ``cut``: of the pages that are stored here; ``others``: the other cuts that pages
    of it could have."""

    def __init__(
        self, store: StorageBackend, model: bytes, cut: int, others: Sequence[int]
    ) -> None:
        self._store = store
        self._page = PageKey(hashlib.sha256(_NAME + model).digest())
        self.cut: Final = cut
        self._others = tuple(others)
        self._fresh = False

    def claim(self, *, writes: bool) -> tuple[int, ...]:
        """Say that pages of this cut are here, where ``writes``; (), or the cuts for which it must
        not be known: theirs are here, and none of ours.

        Of two that claim at once, one at least sees the other: each writes before it looks
        again. A third one, of the first one's cut, may count on a mark that is then withdrawn; it
        says so when it renews its own. StorageError where the store cannot be read; one that takes
        no writes stays unmarked.
        """
        ours, theirs = self._look()
        if ours or theirs or not writes:
            if ours and theirs:
                self._warn(theirs)
            return () if ours else theirs
        status = self._write()
        if status not in {WriteStatus.STORED, WriteStatus.PRESENT}:
            return ()
        self._fresh = status is WriteStatus.STORED
        _, theirs = self._look()
        if theirs:
            self.withdraw()
        return theirs

    def renew(self) -> None:
        """Keep the mark where it is, and warm; write it again where it is gone."""
        status = self._write()
        self._store.touch([self._key(self.cut)])
        if status is WriteStatus.STORED and (theirs := self._look()[1]):
            self._warn(theirs)

    def withdraw(self) -> None:
        """Nothing was stored under a mark that ``claim`` has written: it was not meant. One that
        was there before stays. Another server that counts on it writes it again."""
        if self._fresh:
            self._store.remove([self._key(self.cut)])

    def forget(self) -> None:
        """Pages of this cache are gone: of every model, so all marks go."""
        self._store.remove(Everything.EVERYTHING)

    def close(self) -> None:
        self._store.close()

    def _look(self) -> tuple[bool, tuple[int, ...]]:
        """Whether our mark is there, and which others are."""
        cuts = (self.cut, *self._others)
        rooms = [memoryview(bytearray(MARK_BYTES)) for _ in cuts]
        statuses = self._store.read(list(map(self._key, cuts)), rooms)
        if ReadStatus.FAILED in statuses:
            raise StorageError("it cannot be read")
        there = [c for c, s in zip(cuts, statuses, strict=True) if s is ReadStatus.HIT]
        return self.cut in there, tuple(cut for cut in there if cut != self.cut)

    def _write(self) -> WriteStatus:
        text = memoryview(bytearray(b"cut %d" % self.cut).ljust(MARK_BYTES, b"\0"))
        try:
            (status,) = self._store.write([self._key(self.cut)], [text])
        except StorageError as error:
            log.info("no mark of --storage-shards %d was written: %s", self.cut, error)
            return WriteStatus.FAILED
        return status

    def _key(self, cut: int) -> ObjectKey:
        return ObjectKey(self._page, GroupId(0), cut)

    def _warn(self, theirs: tuple[int, ...]) -> None:
        log.warning(
            "the store has pages of this model in slices of --storage-shards %s too; those of "
            "--storage-shards %d are used",
            ", ".join(map(str, theirs)),
            self.cut,
        )


class MarkedBackend:
    """A store of pages that sees to its mark while it is used. What fails there fails nothing."""

    def __init__(self, inner: StorageBackend, marks: CutMarks, clock: Clock) -> None:
        self._inner = inner
        self._marks = marks
        self._clock = clock
        self._due_s = clock.now_s() + RENEW_S
        self._cleared = False
        self._used = False

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        return self._inner.contains(keys)

    def read(self, keys: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[ReadStatus]:
        return self._inner.read(keys, into)

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[WriteStatus]:
        self._cleared, self._used = False, True
        self._renew()
        return self._inner.write(keys, pages)

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        self._used = True
        self._inner.touch(keys)
        self._renew()

    def remove(self, keys: Sequence[ObjectKey] | Everything) -> int:
        removed = self._inner.remove(keys)
        if isinstance(keys, Everything):
            self._marks.forget()
            # An empty store is free for any cut, until the first page is written.
            self._cleared, self._due_s = True, self._clock.now_s()
        return removed

    def close(self) -> None:
        try:
            if not self._used:
                self._used = True  # twice is once
                self._marks.withdraw()
        except StorageError as error:
            log.info("the mark of --storage-shards %d stays: %s", self._marks.cut, error)
        finally:
            try:
                self._inner.close()
            finally:
                self._marks.close()

    def _renew(self) -> None:
        if self._cleared or self._clock.now_s() < self._due_s:
            return
        self._due_s = self._clock.now_s() + RENEW_S
        try:
            self._marks.renew()
        except StorageError as error:
            log.info("the mark of --storage-shards %d was not renewed: %s", self._marks.cut, error)
