"""Which model a directory holds: 32 bytes over every byte that decides what it computes.

Owns what goes into the identity, and that it is the identity of what was loaded: weights that the
loader leaves in its files are taken from what is hashed, the others are hashed beside it, and every
file is looked at again afterwards. Nothing may be read from a store by an identity that is not
finished. Must not know what loads the weights.
"""

import logging
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Final, Protocol, Self, TypeAlias

from stratakv.core.clock import WallClock
from stratakv.core.digest_cache import DigestCache, cache_directory
from stratakv.core.errors import ConfigError
from stratakv.core.file_looks import Kernel, boot_of_this_machine
from stratakv.core.hash_shares import (
    Answer,
    Digests,
    Part,
    Told,
    combined,
    members,
    parts_of,
    share,
    team_of,
)
from stratakv.core.model_directory import ModelDirectory, read_directory, same_again
from stratakv.core.tensor_files import StoredTensor
from stratakv.core.tensor_hashing import Hashing, Piece, Task, room_for
from stratakv.core.tensor_lines import TensorLine, lines_digest
from stratakv.core.units import format_bytes

log = logging.getLogger(__name__)

FORMAT: Final = b"stratakv-model-files-1"
"""To be changed whenever our own arithmetic changes: every page is another then."""
MOST_THREADS: Final = 8


class Peers(Protocol):
    """Who loads the same model; all of them call ``gather``, in the same order."""

    @property
    def rank(self) -> int: ...
    def gather(self, text: str) -> Sequence[str]:
        """Everybody's text, by rank."""
        ...


class Nobody:
    """No peers."""

    rank = 0

    def gather(self, text: str) -> Sequence[str]:
        return [text]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where an identity is found. ``threads``: that hash at once."""

    kernel: Kernel
    cache: DigestCache
    threads: int

    @classmethod
    def here(cls) -> "Surroundings":
        boot = boot_of_this_machine()
        cache = DigestCache(cache_directory(), boot, WallClock())
        return cls(Kernel(boot=boot), cache, min(MOST_THREADS, os.cpu_count() or 1))


Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Bytes of a file, by where they begin and end."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Tensors in memory, as they were when they were hashed, by their file and place in it."""

    rooms: Mapping[Path, Sequence[tuple[StoredTensor, memoryview]]]

    def find(self, path: Path, begin: int, end: int) -> memoryview | None:
        """These bytes of the file, of one tensor; None where they are not held."""
        rooms = self.rooms.get(path, ())
        at = bisect_right(rooms, begin, key=_begin) - 1
        if at < 0 or end > rooms[at][0].end:
            return None
        tensor, room = rooms[at]
        return room[begin - tensor.begin : end - tensor.begin]


class ModelIdentity:
    """Of the model in ``directory``: say what to ``begin`` with, load the model, ``take`` what it
    has left in its files, ``finish``. ConfigError, on every peer, where the directory of one of
    them cannot be read."""

    def __init__(
        self, directory: Path, peers: Peers | None = None, around: Surroundings | None = None
    ) -> None:
        self.directory: Final = directory.resolve()  # a link may lead elsewhere in a moment
        self._peers = Nobody() if peers is None else peers
        self._around = Surroundings.here() if around is None else around
        self._begun_s = monotonic()
        self._loaded_s: float | None = None
        self._found = ModelDirectory((), None, ())
        self._parts: Sequence[Part] = ()
        self._cached: dict[int, Sequence[bytes]] = {}
        told = self._meet(self._look())
        self._team = members(told, self._peers.rank)
        self._mine = share(self._parts, told, self._peers.rank)
        self._may_keep = [
            number
            for number, file in enumerate(self._found.weights)
            if number not in self._cached and self._around.cache.may_keep(file.look)
        ]
        # Only bytes can tell whether these change: as they are before the load, and after it.
        self._early = [number for number in self._mine if self._doubted(number)]
        self._running = [self._hash(self._early)]
        self._running[0].pause()
        self._late: Digests = {}
        self._failed = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """What has not been hashed need not be."""
        for hashing in self._running:
            hashing.close()

    @property
    def paths(self) -> Sequence[Path]:
        """The weights' files."""
        return [file.path for file in self._found.weights]

    def begin(self, beside: Callable[[StoredTensor], bool]) -> None:
        """Hash beside the load what is most of it ``beside``: tensors that the loader reads itself.
        The others are left until they are taken, so that nobody reads them twice."""
        more = [
            number
            for number in self._mine
            if not self._doubted(number) and self._most(number, beside)
        ]
        self._early += more
        self._running.append(self._hash(more))

    def take(self, used: Mapping[Path, Ranges]) -> Held | None:
        """Read what was loaded and still lies in these files into memory, and hash what has not
        been. None where that cannot be: ``finish`` says why."""
        self._loaded_s = monotonic()
        wanted = {path: sorted(ranges) for path, ranges in used.items()}
        rooms = [_rooms(part.piece, wanted.get(part.piece.path, ())) for part in self._parts]
        again = {number for number in self._mine if number not in self._early}
        again |= {number for number in self._mine if self._doubted(number)}
        work = [number for number in range(len(self._parts)) if rooms[number] or number in again]
        tasks = [Task(self._parts[at].piece, hashed=at in again, rooms=rooms[at]) for at in work]
        reading = Hashing(tasks, self._around.threads)
        try:
            found = dict(zip(work, reading.wait(), strict=True))
        except (OSError, ValueError) as error:
            self._failed = str(error)
            return None
        finally:
            reading.close()
        self._late = {number: found[number] for number in sorted(again)}
        held: dict[Path, list[tuple[StoredTensor, memoryview]]] = {}
        for part, mine in zip(self._parts, rooms, strict=True):
            held.setdefault(part.piece.path, []).extend(
                (part.piece.tensors[at], room) for at, room in mine.items()
            )
        return Held(held)

    def finish(self, *how: str) -> bytes:
        """The identity, once everything has been loaded and taken, and nothing reads the files any
        more. ``how``: what else decides the arithmetic, as the dtype that it runs in.

        ConfigError, on every peer, where a file of one of them was changed since the beginning.
        """
        refusal, mine = "", dict[int, Sequence[bytes]]()
        try:
            mine = self._hashed()
            changed = self._changed(mine)
        except (OSError, ValueError) as error:
            changed = str(error)
        if changed:
            refusal = (
                f"MODEL {self.directory}: {changed}: it was changed while it was loaded; allowed "
                "are files that nobody writes"
            )
        answers = [Answer.of(t) for t in self._peers.gather(Answer(refusal, mine).text())]
        _refuse([answer.refusal for answer in answers])
        found = combined(self._parts, answers, self._team, self._peers.rank)
        by_file = self._by_file(found)
        for number in self._may_keep:
            file = self._found.weights[number]
            self._around.cache.keep(file.look, file.said.header, by_file[number])
        self._tell()
        head = (FORMAT, *self._found.parts(), *(text.encode() for text in how))
        return lines_digest(head, self._lines(by_file))

    def _look(self) -> Told:
        """Lay out the weights, and look up what is known of them."""
        try:
            self._found = read_directory(self.directory, self._around.kernel)
        except (OSError, ValueError) as error:
            return Told(f"MODEL {self.directory}: not a causal LM that loads: {error}")
        self._parts = parts_of(self._found.weights)
        for number, file in enumerate(self._found.weights):
            count = len(file.said.tensors)
            known = self._around.cache.find(file.look, file.said.header, count)
            if known is not None:
                self._cached[number] = known
        return Told("", team_of(self._found, self._around.kernel.boot), tuple(self._cached))

    def _meet(self, mine: Told) -> list[Told]:
        told = [Told.of(text) for text in self._peers.gather(mine.text())]
        _refuse([theirs.refusal for theirs in told])
        return told

    def _hash(self, numbers: Sequence[int]) -> Hashing:
        tasks = [Task(self._parts[at].piece, hashed=True, rooms={}) for at in numbers]
        return Hashing(tasks, self._around.threads)

    def _most(self, number: int, beside: Callable[[StoredTensor], bool]) -> bool:
        piece = self._parts[number].piece
        sizes = (tensor.end - tensor.begin for tensor in piece.tensors if beside(tensor))
        return 2 * sum(sizes) >= piece.count_bytes

    def _hashed(self) -> Digests:
        """Of all pieces that are this rank's to hash."""
        if self._loaded_s is None:
            self.take({})
        if self._failed:
            raise ValueError(self._failed)
        early = (digests for hashing in self._running for digests in hashing.wait())
        return {**self._late, **dict(zip(self._early, early, strict=True))}

    def _changed(self, mine: Digests) -> str:
        """What is not as it was when it was looked at first; empty where all is. A file whose
        inode is not believed was hashed a second time."""
        for number, digests in self._late.items():
            if digests != mine[number]:
                return self._parts[number].piece.path.name
        return same_again(self._found, self.directory, self._around.kernel)

    def _doubted(self, number: int) -> bool:
        return not self._parts[number].piece.look.believed

    def _by_file(self, found: Digests) -> list[Sequence[bytes]]:
        """Digests of all tensors of each file, in the order of its layout."""
        hashed: dict[int, list[bytes]] = {}
        for number, part in enumerate(self._parts):
            if number in found:
                hashed.setdefault(part.file, []).extend(found[number])
        return [
            hashed[number] if number in hashed else self._cached.get(number, ())
            for number in range(len(self._found.weights))
        ]

    def _lines(self, by_file: Sequence[Sequence[bytes]]) -> list[TensorLine]:
        """By name. Of tensors of one name in several files, in the order of the files."""
        lines = [
            _line(tensor, digest)
            for file, digests in zip(self._found.weights, by_file, strict=True)
            for tensor, digest in zip(file.said.tensors, digests, strict=True)
        ]
        return sorted(lines, key=lambda line: line.name)

    def _tell(self) -> None:
        now_s = monotonic()
        whole = sum(file.look.size for file in self._found.weights)
        cached = sum(self._found.weights[number].look.size for number in self._cached)
        hashed = sum(self._parts[number].piece.count_bytes for number in self._mine)
        log.info(
            "identity of %s: %s in %d files; %s hashed here, %s known from before; "
            "%.2f s in all, of which %.2f s after the load",
            self.directory,
            format_bytes(whole),
            len(self._found.weights),
            format_bytes(hashed),
            format_bytes(cached),
            now_s - self._begun_s,
            now_s - (self._loaded_s or now_s),
        )


def _begin(held: tuple[StoredTensor, memoryview]) -> int:
    return held[0].begin


def _rooms(piece: Piece, wanted: Ranges) -> Mapping[int, memoryview]:
    """Memory for the tensors of ``piece`` within which some of ``wanted`` lie, by their number."""
    rooms: dict[int, memoryview] = {}
    for number, tensor in enumerate(piece.tensors):
        at = bisect_left(wanted, (tensor.begin, 0))
        if tensor.begin < tensor.end and at < len(wanted) and wanted[at][1] <= tensor.end:
            rooms[number] = room_for(tensor)
    return rooms


def _line(tensor: StoredTensor, digest: bytes) -> TensorLine:
    return TensorLine(tensor.name, tensor.dtype, tensor.shape, digest)


def _refuse(refusals: Sequence[str]) -> None:
    """ConfigError with the first refusal, and whose it is where there are several ranks."""
    for rank, refusal in enumerate(refusals):
        if refusal:
            raise ConfigError(refusal if len(refusals) == 1 else f"rank {rank}: {refusal}")
