"""The one place where ranks meet: a ballot a step, and a letter from rank 0 a step.

Owns the fields that are compared and the count of meetings. A field that differs ends the process:
two ranks that disagree on what is cached would answer with each other's tokens. Must not decide
anything by what one rank knows.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from stratakv.agreement.ballot import DIGEST_BITS, FIELDS, Ballot, Result
from stratakv.agreement.ranks import Alone, Ranks
from stratakv.core.errors import DivergenceError

log = logging.getLogger(__name__)

_MASK: Final = (1 << DIGEST_BITS) - 1
Figures: TypeAlias = tuple["int | Figures", ...]
"""Numbers, and tuples of them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Field:
    name: str
    figures: Callable[[], Figures]


def digest_of(figures: Figures) -> int:
    """62 bits. Python hashes numbers and tuples alike in every process; bytes and text it salts."""
    return hash(figures) & _MASK


class Agreement:
    """``ballots`` and ``letters`` count the meetings."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks: Ranks = ranks
        self._fields: list[_Field] = []
        self.ballots = 0
        self.letters = 0

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, the one that clients talk to."""
        return self._ranks.rank == 0

    def watch(self, name: str, figures: Callable[[], Figures]) -> None:
        """Compare ``figures()`` in every ballot from now on. Every rank watches the same names in
        the same order."""
        assert len(self._fields) < FIELDS, f"no lane for {name}"
        self._fields.append(_Field(name, figures))

    def agree(self, ballot: Ballot) -> Result:
        """What every rank has voted for. DivergenceError where a digest differs."""
        self.ballots += 1
        if self._ranks.size == 1:  # nobody to differ from
            return ballot.result(ballot.lanes)
        for at, field in enumerate(self._fields):
            ballot.digest(at, digest_of(field.figures()))
        result = ballot.result(self._ranks.least(ballot.lanes))
        apart = result.differing(len(self._fields))
        if apart is not None:
            self._diverged(self._fields[apart])
        return result

    def tell(self, letter: bytes) -> bytes:
        """What rank 0 says; the others' ``letter`` is not read."""
        self.letters += 1
        return self._ranks.tell(letter)

    def part(self) -> None:
        """The other ranks are gone, or done: from now on this one agrees with itself."""
        self._ranks = Alone()

    def _diverged(self, field: _Field) -> None:
        """Every rank has seen the same minimum, so every rank comes here."""
        dumps = self._ranks.gather(repr(field.figures()))
        here = dumps[self._ranks.rank]
        there = next((at for at, dump in enumerate(dumps) if dump != here), None)
        told = "all dumps are alike" if there is None else f"rank {there} has {dumps[there]}"
        raise DivergenceError(
            f"after {self.ballots} ballots ranks differ in {field.name}: rank {self._ranks.rank} "
            f"has {here}; {told}"
        )
