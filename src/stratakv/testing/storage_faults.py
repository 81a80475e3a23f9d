"""A storage backend that misbehaves on purpose, from a seed. Owns the faults; what it wraps is a
real backend, which must not know.

    backend = FaultyBackend(MyBackend(...), Faults(seed=1, read_fails=0.2, delay_s=0.01))
    ...                                         # what is above it must cope
    backend.change(Faults())                    # it is well again
    assert backend.injected > 0                 # and something had happened

Like any backend it belongs to one thread. It must not be given to the conformance suite: it breaks
the promises that the suite tests.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stratakv.core.errors import StorageError
from stratakv.storage.backend import (
    Everything,
    ObjectKey,
    ReadStatus,
    StorageBackend,
    WriteStatus,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities, per call or per object; ``delay_s``: each call takes that much longer.

    Per call: ``call_hangs`` for ``hang_s`` before anything is done, and does it all the same then;
    ``call_fails`` before anything is done, ``call_breaks`` after a part is done, as of a connection
    that is cut. Per object that is there: ``read_misses``, ``read_fails``,
    ``read_corrupt``; what is written: ``write_refused``, ``write_fails``, and ``write_lost``, which
    is called stored and is not there. ``contains_lies``: an object that is not there is reported to
    be.

    ``lies``: a hit's bytes are damaged and it is still called a hit, which no backend may do: for
    tests of tests.
    """

    seed: int = 0
    call_hangs: float = 0.0
    hang_s: float = 60.0
    call_fails: float = 0.0
    call_breaks: float = 0.0
    contains_lies: float = 0.0
    read_misses: float = 0.0
    read_fails: float = 0.0
    read_corrupt: float = 0.0
    lies: float = 0.0
    write_refused: float = 0.0
    write_fails: float = 0.0
    write_lost: float = 0.0
    delay_s: float = 0.0


class FaultyBackend:
    """``change`` may be called at any time. ``calls`` counts by verb; ``sleep`` is how a delay is
    waited for."""

    def __init__(
        self,
        backend: StorageBackend,
        faults: Faults,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.faults = faults
        self.calls: dict[str, int] = {}
        self.injected = 0
        self._backend = backend
        self._sleep = sleep
        self._rng = np.random.default_rng(faults.seed)

    def change(self, faults: Faults) -> None:
        """Misbehave like that from now on."""
        self.faults = faults

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        part = self._begin("contains", len(keys))
        present = self._backend.contains(keys[:part]).copy()
        self._cut("contains", part, len(keys))
        for at in np.flatnonzero(~present).tolist():
            present[at] = self._strikes(self.faults.contains_lies)
        return present

    def read(self, keys: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[ReadStatus]:
        part = self._begin("read", len(keys))
        statuses = self._backend.read(keys[:part], into[:part])
        self._cut("read", part, len(keys))
        return [self._read(status, page) for status, page in zip(statuses, into, strict=True)]

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[WriteStatus]:
        part = self._begin("write", len(keys))
        statuses = [WriteStatus.STORED] * part
        passed: list[int] = []
        for at in range(part):
            if self._strikes(self.faults.write_refused):
                statuses[at] = WriteStatus.REFUSED
            elif self._strikes(self.faults.write_fails):
                statuses[at] = WriteStatus.FAILED
            elif not self._strikes(self.faults.write_lost):
                passed.append(at)
        real = self._backend.write([keys[at] for at in passed], [pages[at] for at in passed])
        for at, status in zip(passed, real, strict=True):
            statuses[at] = status
        self._cut("write", part, len(keys))
        return statuses

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        self.calls["touch"] = self.calls.get("touch", 0) + 1
        self._backend.touch(keys)

    def remove(self, keys: Sequence[ObjectKey] | Everything) -> int:
        if isinstance(keys, Everything):
            self._begin("remove", 0)
            return self._backend.remove(keys)
        part = self._begin("remove", len(keys))
        removed = self._backend.remove(keys[:part])
        self._cut("remove", part, len(keys))
        return removed

    def close(self) -> None:
        self._backend.close()

    def _begin(self, verb: str, count: int) -> int:
        """How many of ``count`` objects are done before the call breaks; all, if it does not."""
        self.calls[verb] = self.calls.get(verb, 0) + 1
        if self.faults.delay_s > 0:
            self._sleep(self.faults.delay_s)
        if self._strikes(self.faults.call_hangs):
            self._sleep(self.faults.hang_s)
        if self._strikes(self.faults.call_fails):
            raise StorageError(f"{verb}: injected")
        broken = count > 0 and self._strikes(self.faults.call_breaks)
        return int(self._rng.integers(count)) if broken else count

    def _cut(self, verb: str, part: int, count: int) -> None:
        if part < count:
            raise StorageError(f"{verb}: injected after {part} of {count} objects")

    def _read(self, status: ReadStatus, page: memoryview) -> ReadStatus:
        if status is not ReadStatus.HIT:
            return status
        chances = (
            (self.faults.read_misses, ReadStatus.MISS),
            (self.faults.read_fails, ReadStatus.FAILED),
            (self.faults.read_corrupt, ReadStatus.CORRUPT),
            (self.faults.lies, ReadStatus.HIT),
        )
        for chance, instead in chances:
            if self._strikes(chance):
                # What a buffer holds is undefined unless it is a hit: nobody may read it.
                page[self._rng.integers(len(page))] ^= 0xFF
                return instead
        return status

    def _strikes(self, chance: float) -> bool:
        struck = chance > 0 and bool(self._rng.random() < chance)
        self.injected += struck
        return struck
