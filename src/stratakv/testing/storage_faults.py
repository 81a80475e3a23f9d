"""A storage backend that misbehaves on purpose, from a seed. Owns the faults; what it wraps is a
real backend, which must not know.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stratakv.core.errors import StorageError
from stratakv.storage.backend import ObjectKey, ReadStatus, StorageBackend, WriteStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities per call (``call_fails``) or per object. ``delay_s``: each call takes that
    long. ``lies``: a hit's bytes are damaged and it is still called a hit, which no backend may do:
    for tests of what stands above."""

    seed: int = 0
    call_fails: float = 0.0
    read_misses: float = 0.0
    read_fails: float = 0.0
    read_corrupt: float = 0.0
    lies: float = 0.0
    write_refused: float = 0.0
    write_fails: float = 0.0
    delay_s: float = 0.0


class FaultyBackend:
    """``faults`` may be replaced at any time. ``calls`` counts by verb; ``sleep`` is how a delay is
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

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        self._begin("contains")
        return self._backend.contains(keys)

    def read(self, keys: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[ReadStatus]:
        self._begin("read")
        statuses = self._backend.read(keys, into)
        return [self._read(status, page) for status, page in zip(statuses, into, strict=True)]

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[WriteStatus]:
        self._begin("write")
        statuses = [WriteStatus.STORED] * len(keys)
        passed: list[int] = []
        for at in range(len(keys)):
            if self._strikes(self.faults.write_refused):
                statuses[at] = WriteStatus.REFUSED
            elif self._strikes(self.faults.write_fails):
                statuses[at] = WriteStatus.FAILED
            else:
                passed.append(at)
        real = self._backend.write([keys[at] for at in passed], [pages[at] for at in passed])
        for at, status in zip(passed, real, strict=True):
            statuses[at] = status
        return statuses

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        self.calls["touch"] = self.calls.get("touch", 0) + 1
        self._backend.touch(keys)

    def remove(self, keys: Sequence[ObjectKey]) -> int:
        self._begin("remove")
        return self._backend.remove(keys)

    def close(self) -> None:
        self._backend.close()

    def _begin(self, verb: str) -> None:
        self.calls[verb] = self.calls.get(verb, 0) + 1
        if self.faults.delay_s > 0:
            self._sleep(self.faults.delay_s)
        if self._strikes(self.faults.call_fails):
            raise StorageError(f"{verb}: injected")

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
