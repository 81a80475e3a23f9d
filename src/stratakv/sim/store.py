"""One rank's store, which is not what the other ranks' stores are, and which fails as it likes.

Owns the faults, and the lane that a schedule works instead of a thread. What it wraps is a real
backend, which must not know.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stratakv.core.errors import StorageError
from stratakv.sim.adversary import Adversary
from stratakv.spec.groups import ANCHOR
from stratakv.storage.backend import (
    Everything,
    ObjectKey,
    ReadStatus,
    StorageBackend,
    WriteStatus,
)
from stratakv.storage.io_lane import Lane

POISON = 0xFF


class UnkindStore:
    """A ``StorageBackend`` over another one. ``names``: what was ever written, oldest first."""

    def __init__(self, inner: StorageBackend, adversary: Adversary) -> None:
        self.names: dict[ObjectKey, None] = {}
        self._inner = inner
        self._adversary = adversary
        self._closed = False

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        self._may_fail("contains")
        present = self._inner.contains(keys).copy()
        for at in np.flatnonzero(~present).tolist():
            present[at] = self._adversary.strikes(self._adversary.hazards.contains_lies)
        return present

    def read(self, keys: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[ReadStatus]:
        self._may_fail("read")
        statuses = self._inner.read(keys, into)
        return [self._read(status, page) for status, page in zip(statuses, into, strict=True)]

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[WriteStatus]:
        self._may_fail("write")
        hazards = self._adversary.hazards
        statuses = [WriteStatus.STORED] * len(keys)
        for at, (key, page) in enumerate(zip(keys, pages, strict=True)):
            if self._adversary.strikes(hazards.write_refused):
                statuses[at] = WriteStatus.REFUSED
            elif self._adversary.strikes(hazards.write_fails):
                statuses[at] = WriteStatus.FAILED
            else:
                self.names[key] = None
                statuses[at] = self._inner.write([key], [page])[0]
        return statuses

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        self._inner.touch(keys)

    def remove(self, keys: Sequence[ObjectKey] | Everything) -> int:
        return self._inner.remove(keys)

    def close(self) -> None:
        self._closed = True
        self._inner.close()

    def lose(self, share: float) -> int:
        """Some of what was written is gone; how much. Less of the anchor, whose pages are all that
        every longer prefix needs."""
        if self._closed:
            return 0
        shares = {ANCHOR: share / 4}
        names = self.names
        lost = [name for name in names if self._adversary.strikes(shares.get(name.group, share))]
        for name in lost:
            del self.names[name]
        return self._inner.remove(lost)

    def _may_fail(self, verb: str) -> None:
        if self._adversary.strikes(self._adversary.hazards.call_fails):
            if self._adversary.strikes(0.1):
                raise ValueError(f"{verb}: not even a StorageError")
            raise StorageError(f"{verb}: as told")

    def _read(self, status: ReadStatus, page: memoryview) -> ReadStatus:
        if status is not ReadStatus.HIT:
            return status
        hazards = self._adversary.hazards
        chances = (
            (hazards.read_misses, ReadStatus.MISS),
            (hazards.read_fails, ReadStatus.FAILED),
            (hazards.read_corrupt, ReadStatus.CORRUPT),
        )
        for chance, instead in chances:
            if self._adversary.strikes(chance):
                page[:] = bytes([POISON]) * len(page)  # undefined, as it may be
                return instead
        return status


class SteppedHand:
    """Works a lane batch by batch, when the adversary says: no thread, no time."""

    def __init__(self, lane: Lane, adversary: Adversary) -> None:
        self._lane = lane
        self._adversary = adversary
        self._over = False

    def stir(self) -> None:
        """Perhaps one more batch."""
        if not self._over and self._adversary.moves("storage"):
            self._lane.once()

    def join(self, timeout: float | None = None) -> None:
        """The owner closes: all that is left is done now."""
        del timeout
        while self._lane.once():
            pass
        self._over = True

    def is_alive(self) -> bool:
        return not self._over
