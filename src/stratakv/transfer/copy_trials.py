"""What both ways of a copy take on this machine, and whether the bytes arrive.

Owns the measurement at start: pieces of some sizes, in no order, from host memory to the GPU and
back; then, untimed, pieces of odd bytes, so that each kernel is compiled before it serves. Must
not choose (``copy_paths``).
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from stratakv.core.ids import GroupId
from stratakv.memory.mapped import Bytes
from stratakv.transfer.copy_paths import PIECE_BYTES, CopyPath, CopyTrial
from stratakv.transfer.copy_plan import Direction
from stratakv.transfer.cuda import DriverStream
from stratakv.transfer.streams import Moves

log = logging.getLogger(__name__)

LAPS: Final = 3
"""The first one compiles the kernel; the best of the others counts."""


@dataclass(frozen=True, slots=True, eq=False)
class TrialMemory:
    """``device``: address of as many bytes of the GPU as ``source`` and ``target`` have each, uint8
    [n] of pinned host memory; ``held``: whatever owns them."""

    device: int
    source: Bytes
    target: Bytes
    held: object = None


def copy_trials(
    stream: DriverStream[Any],
    memory: TrialMemory,
    pieces: Sequence[int] = PIECE_BYTES,
    clock: Callable[[], float] = time.perf_counter,
) -> list[CopyTrial]:
    """Of each path, direction and size; takes a fraction of a second."""
    return [
        CopyTrial(path, direction, piece, seconds)
        for piece in pieces
        for path in CopyPath
        for direction, seconds in _tried(stream, memory, path, piece, clock).items()
    ]


def _tried(
    stream: DriverStream[Any],
    memory: TrialMemory,
    path: CopyPath,
    piece: int,
    clock: Callable[[], float],
) -> dict[Direction, float | None]:
    random = np.random.default_rng(piece)
    memory.source[:] = random.integers(0, 256, len(memory.source), np.uint8)
    memory.target[:] = 0
    at = np.arange(len(memory.source) // piece) * piece
    host, sizes = random.permutation(at), np.full(len(at), piece)
    here, source, target = (
        memory.device + at,
        memory.source.ctypes.data + host,
        memory.target.ctypes.data + host,
    )
    none, nobody = frozenset[Any](), GroupId(0)
    ways = {
        Direction.LOAD: Moves(nobody, none, here, source, sizes),
        Direction.BACKUP: Moves(nobody, none, target, here, sizes),
    }
    try:
        found = {way: _seconds(stream, moves, path, clock) for way, moves in ways.items()}
        arrived = np.array_equal(memory.source, memory.target) and _odd_arrive(
            stream, memory, path, piece, ways.values()
        )
    except RuntimeError:
        log.warning("copies by %s fail, and are not used", path.value, exc_info=True)
        return dict.fromkeys(Direction)
    if not arrived:
        log.warning("copies of %d bytes by %s do not arrive: it is not used", piece, path.value)
        return dict.fromkeys(Direction)
    return dict(found)


def _odd_arrive(
    stream: DriverStream[Any],
    memory: TrialMemory,
    path: CopyPath,
    piece: int,
    ways: Iterable[Moves],
) -> bool:
    """Whether all but the first byte of each piece does, of other bytes than before; the first
    stays as it is."""
    wanted = memory.source.copy()
    np.invert(memory.source, out=memory.source)
    wanted.reshape(-1, piece)[:, 1:] = memory.source.reshape(-1, piece)[:, 1:]
    for one in ways:
        sizes = one.sizes - 1
        stream.move(Moves(one.group, one.layers, one.targets + 1, one.sources + 1, sizes), path)
    stream.record().block()
    return np.array_equal(wanted, memory.target)


def _seconds(
    stream: DriverStream[Any], moves: Moves, path: CopyPath, clock: Callable[[], float]
) -> float:
    laps: list[float] = []
    for _ in range(LAPS):
        begin = clock()
        stream.move(moves, path)
        stream.record().block()
        laps.append(clock() - begin)
    return min(laps[1:])
