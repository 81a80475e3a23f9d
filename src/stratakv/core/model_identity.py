"""Which model a directory holds: 32 bytes over every byte that decides what it computes.

Owns what goes into the identity, and that it is the identity of what was loaded: it is found while
the weights are loaded, and every file is looked at again afterwards. Nothing may be read from a
store by an identity that is not finished. Must not know what loads the weights.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Final, Protocol, Self

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
from stratakv.core.tensor_hashing import Hashing
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


class ModelIdentity:
    """Of the model in ``directory``, under way from here on: begin it, load the model, finish it.
    ConfigError, on every peer, where the directory of one of them cannot be read."""

    def __init__(
        self, directory: Path, peers: Peers | None = None, around: Surroundings | None = None
    ) -> None:
        self.directory: Final = directory.resolve()  # a link may lead elsewhere in a moment
        self._peers = Nobody() if peers is None else peers
        self._around = Surroundings.here() if around is None else around
        self._begun_s = monotonic()
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
        self._hashing = self._hash(self._mine)
        # Only bytes can tell whether these change: as they are before the load, and after it.
        self._hashing.pause([at for at, number in enumerate(self._mine) if self._doubted(number)])

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
        self._hashing.close()

    def finish(self, *how: str) -> bytes:
        """The identity, once everything has been loaded and nothing reads the files any more.
        ``how``: what else decides the arithmetic, as the dtype that it runs in.

        ConfigError, on every peer, where a file of one of them was changed since the beginning.
        """
        loaded_s, refusal = monotonic(), ""
        mine: Digests = {}
        try:
            mine = dict(zip(self._mine, self._hashing.wait(), strict=True))
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
        self._tell(loaded_s)
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
        return Hashing([self._parts[at].piece for at in numbers], self._around.threads)

    def _changed(self, mine: Digests) -> str:
        """What is not as it was when it was looked at first; empty where all is. A file whose
        inode is not believed is hashed a second time."""
        if name := same_again(self._found, self.directory, self._around.kernel):
            return name
        doubted = [number for number in self._mine if self._doubted(number)]
        again = self._hash(doubted)
        try:
            for number, digests in zip(doubted, again.wait(), strict=True):
                if digests != mine[number]:
                    return self._parts[number].piece.path.name
        finally:
            again.close()
        return ""

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

    def _tell(self, loaded_s: float) -> None:
        now_s = monotonic()
        whole = sum(file.look.size for file in self._found.weights)
        cached = sum(self._found.weights[number].look.size for number in self._cached)
        hashed = sum(self._parts[number].piece.count_bytes for number in self._mine)
        log.info(
            "identity of %s: %s in %d files; %s hashed here beside the load, %s known from before; "
            "%.2f s in all, of which %.2f s after the load",
            self.directory,
            format_bytes(whole),
            len(self._found.weights),
            format_bytes(hashed),
            format_bytes(cached),
            now_s - self._begun_s,
            now_s - loaded_s,
        )


def _line(tensor: StoredTensor, digest: bytes) -> TensorLine:
    return TensorLine(tensor.name, tensor.dtype, tensor.shape, digest)


def _refuse(refusals: Sequence[str]) -> None:
    """ConfigError with the first refusal, and whose it is where there are several ranks."""
    for rank, refusal in enumerate(refusals):
        if refusal:
            raise ConfigError(refusal if len(refusals) == 1 else f"rank {rank}: {refusal}")
