"""Which model a directory holds: 32 bytes over every byte that decides what it computes.

Owns what goes into the identity, and that it is the identity of what was loaded: weights that the
loader leaves in its files are taken from what is hashed, the others are hashed beside it, and every
file is looked at again afterwards. Nothing may be read from a store by an identity that is not
finished. Must not know what loads the weights.

Its parts are in ``core.identity``, from the bottom: ``file_stat`` (is a file untouched?),
``safetensors_layout`` (where are its tensors?), ``checkpoint`` (which files?), ``tensor_reader``
(read, hash, keep), ``digest_cache`` (for the next start), ``rank_shares`` (who hashes what) and
``digests`` (one digest over all).
"""

import logging
import os
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Final, NoReturn, Protocol, Self, TypeAlias

from stratakv.core.clock import WallClock
from stratakv.core.errors import ConfigError
from stratakv.core.identity.digest_cache import DigestCache, cache_directory
from stratakv.core.identity.digests import TensorDigest, digest_of
from stratakv.core.identity.file_stat import Kernel, boot_of_this_machine
from stratakv.core.identity.model_files import Checkpoint, change_since, read_checkpoint
from stratakv.core.identity.rank_shares import (
    Digests,
    HashReport,
    RankShare,
    combined,
    members,
    share,
    team_of,
)
from stratakv.core.identity.revision import REVISION
from stratakv.core.identity.safetensors_layout import StoredTensor
from stratakv.core.identity.tensor_reader import Piece, ReadTask, TensorReader, pieces
from stratakv.core.units import format_bytes

log = logging.getLogger(__name__)

FORMAT: Final = b"stratakv-model-files-2"
MOST_THREADS: Final = 8
THREADS_PER_CORE: Final = 2
"""Some wait for the disk while the others hash."""


class LoadingRanks(Protocol):
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
        return cls(
            Kernel(boot=boot), cache, min(MOST_THREADS, THREADS_PER_CORE * (os.cpu_count() or 1))
        )


ByteRanges: TypeAlias = Sequence[tuple[int, int]]
"""Bytes of a file, by where they begin and end."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedTensors:
    """Tensors in memory, as they were when they were read, by their file and place in it."""

    buffers: Mapping[Path, Sequence[tuple[StoredTensor, memoryview]]]

    def lookup(self, path: Path, begin: int, end: int) -> memoryview | None:
        """These bytes of the file, of one tensor; None where they are not held."""
        buffers = self.buffers.get(path, ())
        at = bisect_right(buffers, begin, key=_begin) - 1
        if at < 0 or end > buffers[at][0].end:
            return None
        tensor, buffer = buffers[at]
        return buffer[begin - tensor.begin : end - tensor.begin]


class ModelIdentity:
    """Of the model in ``directory``: ``begin``, load the model, ``take`` what the loader has left
    in its files, ``finish``. What one of the peers cannot do is a ConfigError on all of them."""

    def __init__(
        self, directory: Path, peers: LoadingRanks | None = None, around: Surroundings | None = None
    ) -> None:
        self.directory: Final = directory.resolve()  # a link may lead elsewhere in a moment
        self._peers = Nobody() if peers is None else peers
        self._around = Surroundings.here() if around is None else around
        self._begun_s = monotonic()
        self._loaded_s: float | None = None
        self._checkpoint = Checkpoint((), None, ())
        self._pieces: Sequence[Piece] = ()
        self._cached: dict[int, Sequence[bytes]] = {}
        shares = self._meet(self._look())
        self._team = members(shares, self._peers.rank)
        self._mine = share(self._pieces, shares, self._peers.rank)
        self._may_keep = [
            number
            for number, file in enumerate(self._checkpoint.weights)
            if number not in self._cached and self._around.cache.may_keep(file.stat)
        ]
        self._readers: list[tuple[Sequence[int], TensorReader]] = []
        self._digests: list[dict[int, bytes]] = [{} for _ in self._pieces]
        # Only bytes can show whether these change: as they are before the load, and after it.
        self._doubted = [at for at in self._mine if not self._pieces[at].stat.trusted]
        whole = (self._pieces[at].whole for at in self._doubted)
        self._read(dict(zip(self._doubted, whole, strict=True)), {}).pause()

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
        """What has not been read need not be."""
        for _, reader in self._readers:
            reader.close()

    @property
    def paths(self) -> Sequence[Path]:
        """The weights' files."""
        return [file.path for file in self._checkpoint.weights]

    def begin(self, stays: Callable[[StoredTensor], bool]) -> None:
        """Read beside the load. Tensors that it leaves in their files (``stays``, a guess) are read
        into memory at once; what is guessed wrong is read again."""
        hashed: dict[int, frozenset[int]] = {}
        kept: dict[int, frozenset[int]] = {}
        for number, piece in enumerate(self._pieces):
            if piece.stat.trusted:
                hashed[number] = piece.whole if number in self._mine else frozenset()
                kept[number] = frozenset(
                    at for at, one in enumerate(piece.tensors) if one.size and stays(one)
                )
        self._read(hashed, kept)

    def take(self, used: Mapping[Path, ByteRanges]) -> LoadedTensors:
        """What was loaded and still lies in these files, in memory. It must have been loaded."""
        self._loaded_s = monotonic()
        wanted = {path: sorted(ranges) for path, ranges in used.items()}
        try:
            return self._take([_wanted(one, wanted.get(one.path, ())) for one in self._pieces])
        except (OSError, ValueError) as error:
            self._refuse_changed(str(error))
        except MemoryError as error:
            self.refuse(f"MODEL {self.directory}: no memory for its weights: {error}")

    def refuse(self, reason: str) -> NoReturn:
        """In place of ``finish``: there will be no model here. ConfigError on every peer."""
        self._agree(HashReport(reason, {}))
        raise AssertionError("a refusal was not passed on")

    def finish(self, *how: str, alone: bool = False) -> bytes:
        """The identity, once everything has been loaded and taken, and nothing reads the files any
        more. ``how``: what else decides the arithmetic, as the dtype that it runs in. ``alone``:
        some of that cannot be identified; the identity is a new one, for this model and its peers
        alone.

        ConfigError, on every peer, where a file of one of them was changed since the beginning.
        """
        if self._loaded_s is None:
            self.take({})
        if changed := change_since(self._checkpoint, self.directory, self._around.kernel):
            self._refuse_changed(changed)
        own = secrets.token_hex(32) if alone else ""
        answers = self._agree(HashReport("", {at: self._hashed(at) for at in self._mine}, own))
        found = combined(self._pieces, answers, self._team, self._peers.rank)
        by_file = self._by_file(found)
        for number in self._may_keep:
            file = self._checkpoint.weights[number]
            self._around.cache.keep(file.stat, file.layout.header, by_file[number])
        self._report()
        texts = (*how, *(answer.own for answer in answers if answer.own))
        head = (FORMAT, REVISION, *self._checkpoint.parts(), *(text.encode() for text in texts))
        return digest_of(head, self._tensors(by_file))

    def _look(self) -> RankShare:
        """Lay out the weights, and look up what is known of them."""
        try:
            self._checkpoint = read_checkpoint(self.directory, self._around.kernel)
        except (OSError, ValueError) as error:
            return RankShare(f"MODEL {self.directory}: not a causal LM that loads: {error}")
        self._pieces = [
            piece
            for number, file in enumerate(self._checkpoint.weights)
            for piece in pieces(number, file.path, file.stat, file.layout.tensors)
        ]
        for number, file in enumerate(self._checkpoint.weights):
            count = len(file.layout.tensors)
            known = self._around.cache.lookup(file.stat, file.layout.header, count)
            if known is not None:
                self._cached[number] = known
        return RankShare(
            "", team_of(self._checkpoint, self._around.kernel.boot), tuple(self._cached)
        )

    def _meet(self, mine: RankShare) -> list[RankShare]:
        shares = [RankShare.of(text) for text in self._peers.gather(mine.text())]
        _raise_first([theirs.refusal for theirs in shares])
        return shares

    def _agree(self, mine: HashReport) -> list[HashReport]:
        answers = [HashReport.of(text) for text in self._peers.gather(mine.text())]
        _raise_first([answer.refusal for answer in answers])
        return answers

    def _refuse_changed(self, what: str) -> NoReturn:
        self.refuse(
            f"MODEL {self.directory}: {what}: it was changed while it was loaded; allowed are "
            "files that nobody writes"
        )

    def _read(
        self, hashed: Mapping[int, frozenset[int]], kept: Mapping[int, frozenset[int]]
    ) -> TensorReader:
        """Tensors' numbers, by the piece's."""
        none = frozenset[int]()
        tasks = {
            number: ReadTask(piece, hashed.get(number, none), kept.get(number, none))
            for number, piece in enumerate(self._pieces)
            if hashed.get(number) or kept.get(number)
        }
        reader = TensorReader(list(tasks.values()), self._around.threads)
        self._readers.append((list(tasks), reader))
        return reader

    def _take(self, wanted: Sequence[frozenset[int]]) -> LoadedTensors:
        """``wanted``: of each piece, the numbers of its tensors."""
        buffers: list[dict[int, memoryview]] = [{} for _ in self._pieces]
        for reading in self._readers:
            self._collect(reading, buffers)
        hashed: dict[int, frozenset[int]] = {}
        kept: dict[int, frozenset[int]] = {}
        for number, piece in enumerate(self._pieces):
            kept[number] = wanted[number] - buffers[number].keys()
            if number in self._mine:
                again = piece.whole if number in self._doubted else kept[number]
                hashed[number] = again | (piece.whole - self._digests[number].keys())
        self._read(hashed, kept)
        self._collect(self._readers[-1], buffers)
        held: dict[Path, list[tuple[StoredTensor, memoryview]]] = {}
        for piece, mine, asked in zip(self._pieces, buffers, wanted, strict=True):
            held.setdefault(piece.path, []).extend(
                (piece.tensors[at], mine[at]) for at in sorted(asked)
            )
        return LoadedTensors(held)

    def _collect(
        self, reading: tuple[Sequence[int], TensorReader], buffers: Sequence[dict[int, memoryview]]
    ) -> None:
        """ValueError where a tensor that was hashed before has other bytes now."""
        numbers, reader = reading
        for number, read in zip(numbers, reader.wait(), strict=True):
            for at, digest in read.digests.items():
                if self._digests[number].setdefault(at, digest) != digest:
                    raise ValueError(self._pieces[number].path.name)
            buffers[number].update(read.buffers)

    def _hashed(self, number: int) -> Sequence[bytes]:
        found = self._digests[number]
        return [found[at] for at in range(len(found))]

    def _by_file(self, found: Digests) -> list[Sequence[bytes]]:
        """Digests of all tensors of each file, in the order of its layout."""
        hashed: dict[int, list[bytes]] = {}
        for number, piece in enumerate(self._pieces):
            if number in found:
                hashed.setdefault(piece.file, []).extend(found[number])
        return [
            hashed[number] if number in hashed else self._cached.get(number, ())
            for number in range(len(self._checkpoint.weights))
        ]

    def _tensors(self, by_file: Sequence[Sequence[bytes]]) -> list[TensorDigest]:
        """By name. Of tensors of one name in several files, in the order of the files."""
        tensors = [
            TensorDigest(tensor.name, tensor.dtype, tensor.shape, digest)
            for file, digests in zip(self._checkpoint.weights, by_file, strict=True)
            for tensor, digest in zip(file.layout.tensors, digests, strict=True)
        ]
        return sorted(tensors, key=lambda tensor: tensor.name)

    def _report(self) -> None:
        now_s = monotonic()
        whole = sum(file.stat.size for file in self._checkpoint.weights)
        cached = sum(self._checkpoint.weights[number].stat.size for number in self._cached)
        hashed = sum(self._pieces[number].count_bytes for number in self._mine)
        log.info(
            "identity of %s: %s in %d files; %s hashed here, %s known from before; "
            "%.2f s in all, of which %.2f s after the load",
            self.directory,
            format_bytes(whole),
            len(self._checkpoint.weights),
            format_bytes(hashed),
            format_bytes(cached),
            now_s - self._begun_s,
            now_s - (self._loaded_s or now_s),
        )


def _begin(held: tuple[StoredTensor, memoryview]) -> int:
    return held[0].begin


def _wanted(piece: Piece, ranges: ByteRanges) -> frozenset[int]:
    """Numbers of the tensors of ``piece`` within which some of ``ranges`` lie."""
    found: list[int] = []
    for number, tensor in enumerate(piece.tensors):
        at = bisect_left(ranges, (tensor.begin, 0))
        if tensor.size and at < len(ranges) and ranges[at][1] <= tensor.end:
            found.append(number)
    return frozenset(found)


def _raise_first(refusals: Sequence[str]) -> None:
    """ConfigError with the first refusal, and whose it is where there are several ranks."""
    for rank, refusal in enumerate(refusals):
        if refusal:
            raise ConfigError(refusal if len(refusals) == 1 else f"rank {rank}: {refusal}")
