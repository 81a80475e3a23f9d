"""Answers that have to be of one form: which tokens may come next in the requests that want it.

Owns the protocol between the columns of running requests and a library of grammars. Torch-free.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import RowIds, TokenIds


@dataclass(frozen=True, slots=True)
class Grammar:
    """A form of answers, as text that the engine's ``Grammars`` reads."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenMasks:
    """Tokens that may come next in some of the sampled rows. at: index of each among these,
    increasing, int64 [G]. words: int32 [G, w], bit t % 32 of word t // 32 is set for a token t that
    may; tokens beyond them may not."""

    at: npt.NDArray[np.intp]
    words: npt.NDArray[np.int32]

    def only(self, rows: npt.NDArray[np.intp]) -> "TokenMasks | None":
        """Of some of the sampled rows, in increasing order; None if none of them is here."""
        kept = np.flatnonzero(np.isin(self.at, rows))
        if not len(kept):
            return None
        return TokenMasks(at=np.searchsorted(rows, self.at[kept]), words=self.words[kept])


class Grammars(Protocol):
    """Where each row of the block table stands in its grammar."""

    def refusal(self, grammar: Grammar) -> str | None:
        """None, or why no answer can be bound to it. May be called from any thread."""
        ...

    def begin(self, row: int, grammar: Grammar, output: TokenIds) -> None:
        """``row`` belongs to a request with ``grammar`` that has generated ``output``."""
        ...

    def append(self, rows: RowIds, tokens: TokenIds) -> None:
        """Each of ``rows``, all of which have begun, has one token more."""
        ...

    def masks(self, rows: RowIds) -> npt.NDArray[np.int32]:
        """[n, w]: the words of ``TokenMasks``."""
        ...


class NoGrammars:
    """An engine that knows no tokenizer."""

    def refusal(self, grammar: Grammar) -> str | None:
        return f"grammar is {grammar.text[:40]!r}; none is allowed, no tokenizer is known here"

    def begin(self, row: int, grammar: Grammar, output: TokenIds) -> None:
        raise AssertionError("a request with a grammar was taken")

    def append(self, rows: RowIds, tokens: TokenIds) -> None:
        raise AssertionError("a request with a grammar was taken")

    def masks(self, rows: RowIds) -> npt.NDArray[np.int32]:
        raise AssertionError("a request with a grammar was taken")


NO_GRAMMARS: Final = NoGrammars()


class RankZeroGrammars:
    """Those of another rank than the one that chooses tokens: nothing is masked here."""

    def refusal(self, grammar: Grammar) -> str | None:
        return None

    def begin(self, row: int, grammar: Grammar, output: TokenIds) -> None:
        pass

    def append(self, rows: RowIds, tokens: TokenIds) -> None:
        pass

    def masks(self, rows: RowIds) -> npt.NDArray[np.int32]:
        return np.full((len(rows), 0), 0, np.int32)


class GrammarRows:
    """Which rows are bound to a grammar; most are to none, which costs nothing."""

    def __init__(self, rows: int, grammars: Grammars) -> None:
        self.bound = np.zeros(rows, np.bool_)
        self._grammars = grammars

    def open(self, row: int, grammar: Grammar | None, output: TokenIds) -> None:
        self.bound[row] = grammar is not None
        if grammar is not None:
            self._grammars.begin(row, grammar, output)

    def append(self, rows: RowIds, tokens: TokenIds) -> None:
        bound = self.bound[rows]
        if bound.any():
            self._grammars.append(rows[bound], tokens[bound])

    def of(self, rows: RowIds) -> TokenMasks | None:
        at = np.flatnonzero(self.bound[rows])
        if not len(at):
            return None
        return TokenMasks(at=at, words=self._grammars.masks(rows[at]))
