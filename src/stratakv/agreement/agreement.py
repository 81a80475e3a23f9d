"""The one place where ranks meet: a ballot a step, and a message from rank 0 a step.

Owns the fields that are compared and the count of collectives. A field that differs ends the
process: two ranks that disagree on what is cached would answer with each other's tokens. Must not
decide anything by what one rank knows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Protocol, TypeAlias

from stratakv.agreement.ballot import DIGEST_BITS, FIELDS, NOTHING, Ballot, BallotResult, Begun
from stratakv.agreement.ranks import Ranks, SingleRank, nothing
from stratakv.core.errors import DivergenceError

_MASK: Final = (1 << DIGEST_BITS) - 1
SHOWN: Final = 8
"""Lines of each side in an error."""
DigestInputs: TypeAlias = Mapping[str, int]
"""By what they are called, in an order that is the same on every rank."""


@dataclass(frozen=True, slots=True, eq=False)
class _Field:
    name: str
    figures: Callable[[], DigestInputs]
    description: Callable[[], Iterable[str]]


class Voter(Protocol):
    """Who votes in every ballot, beside the cache's copies and storage."""

    def vote(self, ballot: Ballot) -> None:
        """Say what is so here."""
        ...

    def agreed(self, result: BallotResult) -> None:
        """What is so on all ranks: the only thing to decide by. Comes before the next ``vote``."""
        ...


def digest_of(figures: DigestInputs) -> int:
    """62 bits. Python hashes numbers and tuples alike in every process; bytes and text it salts."""
    return hash(tuple(figures.values())) & _MASK


class Agreement:
    """``ballots`` and ``broadcasts`` count them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks: Ranks = ranks
        self._fields: list[_Field] = []
        self._voters: list[Voter] = []
        self._begun: Begun = NOTHING
        self.ballots = 0
        self.broadcasts = 0

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, the one that clients talk to."""
        return self._ranks.rank == 0

    def watch(
        self,
        name: str,
        figures: Callable[[], DigestInputs],
        description: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        """Compare ``figures()`` in every ballot from now on; it is called once for each.
        ``description``: what they stand for, a line for each thing, where they are no more than
        sums themselves.
        Every rank watches the same names in the same order."""
        assert len(self._fields) < FIELDS, f"no lane for {name}"
        self._fields.append(_Field(name, figures, description or (lambda: _lines(figures()))))

    def include(self, voter: Voter) -> None:
        """Have ``voter`` vote in every ballot from now on, behind those who came before: the same
        ones in the same order on every rank."""
        self._voters.append(voter)

    def ballot(self) -> Ballot:
        """For this rank's next votes."""
        return Ballot(self._begun)

    def agree(self, ballot: Ballot, meanwhile: Callable[[], None] = nothing) -> BallotResult:
        """What every rank has voted for. ``meanwhile``: what is to be done in any case, while the
        others vote. DivergenceError where a digest differs."""
        self.ballots += 1
        for voter in self._voters:
            voter.vote(ballot)
        if self._ranks.size == 1:  # nobody to differ from
            meanwhile()
            return self._read(ballot.result(ballot.lanes))
        for at, field in enumerate(self._fields):
            ballot.digest(at, digest_of(field.figures()))
        result = ballot.result(self._ranks.all_reduce_min(ballot.lanes, meanwhile))
        apart = result.differing(len(self._fields))
        if apart is not None:
            self._diverged(self._fields[apart])
        return self._read(result)

    def _read(self, result: BallotResult) -> BallotResult:
        self._begun = result.begun
        for voter in self._voters:
            voter.agreed(result)
        return result

    def broadcast(self, message: bytes) -> bytes:
        """What rank 0 sends; the others' ``message`` is not read."""
        self.broadcasts += 1
        return self._ranks.broadcast(message)

    def gather(self, text: str) -> Sequence[str]:
        """What every rank sends, in order, where all of them have come to ask; no part of a
        step."""
        return self._ranks.gather(text)

    def part(self) -> None:
        """The other ranks are gone, or done: from now on this one agrees with itself."""
        self._ranks = SingleRank()

    def _diverged(self, field: _Field) -> None:
        """Every rank has seen the same minimum, so every rank comes here. Its description is
        what is there now: a step's backups may have been submitted since the digests were taken."""
        rank = self._ranks.rank
        dumps = [text.split("\n") for text in self._ranks.gather("\n".join(field.description()))]
        where = f"after {self.ballots} ballots ranks differ in {field.name}"
        other = next((at for at, dump in enumerate(dumps) if dump != dumps[rank]), None)
        if other is None:
            raise DivergenceError(f"{where}; when they described it, they had the same")
        mine, theirs = _apart(dumps[rank], dumps[other])
        raise DivergenceError(f"{where}: rank {rank} has {mine}; rank {other} has {theirs}")


def _lines(figures: DigestInputs) -> list[str]:
    return [f"{name} {value}" for name, value in figures.items()]


def _apart(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    """The first lines in which two dumps differ, of either."""
    pairs = [pair for pair in zip_longest(mine, theirs, fillvalue="nothing") if pair[0] != pair[1]]
    more = f" and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
    here, there = (", ".join(side) + more for side in zip(*pairs[:SHOWN], strict=True))
    return here, there
