"""A store as one rank has it open: not as other ranks find it, and it fails as it likes.

Owns the faults, and the lane that a schedule works instead of a thread. What it wraps is a real
backend, which must not know, and which may be open elsewhere: closing it is not for here.

Ranks may share what is behind. They work their lanes themselves and take turns (``thread_ranks``),
so the order in which they come to it is the order of turns, which is drawn from the run's seed.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from stratakv.agreement.ranks import nothing
from stratakv.core.errors import StorageError
from stratakv.spec.groups import ANCHOR
from stratakv.storage.backend import (
    Everything,
    ObjectKey,
    ReadStatus,
    StorageBackend,
    WriteStatus,
)
from stratakv.storage.io_lane import IoLane
from stratakv.testing.fleet.adversary import Adversary

POISON = 0xFF


class FaultyStore:
    """A ``StorageBackend`` over another one. ``names``: what was ever written to that, oldest
    first, by whoever has it open. ``before_write``: called before each object; what it raises ends
    a batch where it is."""

    def __init__(
        self,
        inner: StorageBackend,
        adversary: Adversary,
        names: dict[ObjectKey, None] | None = None,
        before_write: Callable[[], None] = nothing,
    ) -> None:
        self.names: dict[ObjectKey, None] = {} if names is None else names
        self.inner = inner
        self._adversary = adversary
        self._before_write = before_write
        self._closed = False

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        self._may_fail("contains")
        present = self.inner.contains(keys).copy()
        for at in np.flatnonzero(~present).tolist():
            present[at] = self._adversary.strikes(self._adversary.fault_rates.contains_lies)
        return present

    def read(self, keys: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[ReadStatus]:
        self._may_fail("read")
        statuses = self.inner.read(keys, into)
        return [self._read(status, page) for status, page in zip(statuses, into, strict=True)]

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[WriteStatus]:
        self._may_fail("write")
        fault_rates = self._adversary.fault_rates
        statuses = [WriteStatus.STORED] * len(keys)
        for at, (key, page) in enumerate(zip(keys, pages, strict=True)):
            if self._adversary.strikes(fault_rates.write_refused):
                statuses[at] = WriteStatus.REFUSED
            elif self._adversary.strikes(fault_rates.write_fails):
                statuses[at] = WriteStatus.FAILED
            else:
                self._before_write()
                self.names[key] = None
                statuses[at] = self.inner.write([key], [page])[0]
        return statuses

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        if not self._closed:
            self.inner.touch(keys)

    def remove(self, keys: Sequence[ObjectKey] | Everything) -> int:
        self._open("remove")
        return self.inner.remove(keys)

    def close(self) -> None:
        self._closed = True

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
        return self.inner.remove(lost)

    def _open(self, verb: str) -> None:
        if self._closed:
            raise StorageError(f"{verb}: the store is closed")

    def _may_fail(self, verb: str) -> None:
        self._open(verb)
        if self._adversary.strikes(self._adversary.fault_rates.call_fails):
            if self._adversary.strikes(0.1):
                raise ValueError(f"{verb}: not even a StorageError")
            raise StorageError(f"{verb}: as asked")

    def _read(self, status: ReadStatus, page: memoryview) -> ReadStatus:
        if status is not ReadStatus.HIT:
            return status
        fault_rates = self._adversary.fault_rates
        chances = (
            (fault_rates.read_misses, ReadStatus.MISS),
            (fault_rates.read_fails, ReadStatus.FAILED),
            (fault_rates.read_corrupt, ReadStatus.CORRUPT),
        )
        for chance, instead in chances:
            if self._adversary.strikes(chance):
                page[:] = bytes([POISON]) * len(page)  # undefined, as it may be
                return instead
        return status


class SteppedHand:
    """Works a lane batch by batch, when the adversary chooses: no thread, no time."""

    def __init__(self, lane: IoLane, adversary: Adversary) -> None:
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
        while not self._over and self._lane.once():
            pass
        self._over = True

    def drop(self) -> None:
        """Do nothing any more, whatever is left."""
        self._over = True

    def is_alive(self) -> bool:
        return not self._over
