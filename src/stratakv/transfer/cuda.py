"""Copies beside a GPU's computing: its streams, the events between them, and memory that is pinned.

Owns which stream waits for which event, who blocks for one, and what is pinned when. A driver comes
in as ``CudaDriver``: torch's, or in tests one that is late at random. Must not import torch.
"""

import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from stratakv.memory.device_pools import DevicePages
from stratakv.memory.host_arena import HostArena
from stratakv.spec.groups import CacheSpec
from stratakv.transfer.copier import Copier
from stratakv.transfer.copy_paths import CopyChoice, CopyPath
from stratakv.transfer.copy_plan import Direction, Fence
from stratakv.transfer.cpu import CpuTransferEngine
from stratakv.transfer.pinning import CHUNK_BYTES, Pinning
from stratakv.transfer.streams import Moves, StreamCopier

E = TypeVar("E", bound="DriverEvent")


class DriverEvent(Protocol):
    """Recorded on a stream: done when all is that the stream was given before."""

    def passed(self) -> bool: ...
    def block(self) -> None:
        """Hold the calling thread until it has passed."""
        ...


class DriverStream(Protocol[E]):
    """Does what it is given in order, while its callers go on."""

    def enter(self) -> None:
        """What the calling thread launches from now on is this stream's."""
        ...

    def record(self) -> E: ...
    def hold(self, event: E) -> None:
        """What is given from now on comes after ``event``; nobody blocks."""
        ...

    def move(self, moves: Moves, path: CopyPath) -> None:
        """Queue a copy. Its host memory is registered, and stays so until it is done."""
        ...


class CudaDriver(Protocol[E]):
    """A GPU. RuntimeError where it refuses."""

    def stream(self, *, urgent: bool) -> DriverStream[E]:
        """A new one; what an urgent one launches goes first where both have something."""
        ...

    def register(self, address: int, size_bytes: int) -> None:
        """Pin host memory, and map it for the GPU at its own addresses; may take long."""
        ...

    def unregister(self, address: int) -> None: ...


class CurrentStream(threading.local, Generic[E]):
    """The stream that the calling thread works for; None: none, as of the thread that plans."""

    stream: DriverStream[E] | None = None

    @contextmanager
    def on(self, stream: DriverStream[E]) -> Generator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


class EventFence(Generic[E]):
    """A ``Fence`` that holds the calling thread's stream, and no thread that has one."""

    def __init__(self, event: E, current: CurrentStream[E]) -> None:
        self._event, self._current = event, current

    def wait(self) -> None:
        stream = self._current.stream
        if stream is None:
            self._event.block()
        else:
            stream.hold(self._event)

    def passed(self) -> bool:
        return self._event.passed()


class CudaCopyStream(Generic[E]):
    """A ``CopyStream``: one direction's."""

    def __init__(
        self,
        direction: Direction,
        stream: DriverStream[E],
        current: CurrentStream[E],
        choice: CopyChoice,
    ) -> None:
        self._direction, self._choice = direction, choice
        self._stream, self._current = stream, current

    def after(self, fence: Fence) -> None:
        """Blocks the thread that copies until the step is launched whose event that is, no more."""
        with self._current.on(self._stream):
            fence.wait()

    def copy(self, moves: Moves) -> None:
        self._stream.move(moves, self._choice.path(self._direction, moves))

    def mark(self) -> Fence:
        return EventFence(self._stream.record(), self._current)


class CudaCompute(Generic[E]):
    """The ``ComputeStream`` of steps; gates and fences hold it, and no thread."""

    def __init__(self, stream: DriverStream[E], current: CurrentStream[E]) -> None:
        self._stream, self._current = stream, current

    def enter(self) -> None:
        self._stream.enter()
        self._current.stream = self._stream

    def mark(self) -> Fence:
        return EventFence(self._stream.record(), self._current)


@dataclass(frozen=True, slots=True, eq=False)
class CudaStreams(Generic[E]):
    """Of one engine: a stream that computes, and one for copies of each direction."""

    driver: CudaDriver[E]
    compute: CudaCompute[E]
    copies: Mapping[Direction, CudaCopyStream[E]]
    swaps: CudaCopyStream[E]
    """Copies to the device as a part of what is computed: on that stream, between what was launched
    before and what comes next."""

    @classmethod
    def of(cls, driver: CudaDriver[E], choice: CopyChoice) -> "CudaStreams[E]":
        current = CurrentStream[E]()
        computes = driver.stream(urgent=True)
        copies = {
            direction: CudaCopyStream(direction, driver.stream(urgent=False), current, choice)
            for direction in Direction
        }
        swaps = CudaCopyStream(Direction.LOAD, computes, current, choice)
        return cls(driver, CudaCompute(computes, current), copies, swaps)


@dataclass(frozen=True, slots=True)
class PinOptions:
    """``cpus``: near the GPU; empty: any. ``chunk_bytes``: of one registration."""

    cpus: Collection[int] = ()
    chunk_bytes: int = CHUNK_BYTES


ANY_CPU: Final = PinOptions()


class CudaTransferEngine(CpuTransferEngine):
    """A ``TransferEngine`` over one GPU's streams. Host pages are pinned in the background from
    here on. ``hooked``: what the copier is wrapped in."""

    def __init__(
        self,
        spec: CacheSpec,
        device_pools: DevicePages,
        arenas: Sequence[HostArena],
        streams: CudaStreams[Any],
        pinned: PinOptions = ANY_CPU,
        hooked: Callable[[Copier], Copier] = lambda copier: copier,
    ) -> None:
        driver = streams.driver
        self.pinning = Pinning(
            arenas, driver.register, driver.unregister, pinned.cpus, pinned.chunk_bytes
        )
        copier = StreamCopier(streams.copies, self.pinning.wait)
        super().__init__(spec, device_pools, arenas, hooked(copier), copier)

    def close(self) -> None:
        """As of every engine; then host memory is given back, which no copy touches any more."""
        try:
            super().close()
        finally:
            self.pinning.close()
