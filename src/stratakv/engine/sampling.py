"""Chooses the next token of every sampled row, all rows at once, and reports which rows it cannot.

Owns what a choice is: on its device (``Drawn``), and once it was read (``Sampled``). All that a
step chooses is read at once; nothing before that waits for a number of the device. Must not know
how tokens are drawn (``drawing``).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from stratakv.core.ids import RowIds, TokenIds
from stratakv.engine.batch import SamplingBatch
from stratakv.engine.drawing import NO_TOKEN, NOT_FINITE, chosen_tokens
from stratakv.engine.forward import Forward
from stratakv.engine.logprobs import Reports, reports, scores
from stratakv.engine.request import Failure, TokenLogprob
from stratakv.engine.tensors import ToHost

FAILED: Final = -2
FAILURES: Final = {
    NOT_FINITE: Failure.NOT_FINITE, FAILED: Failure.INTERNAL, NO_TOKEN: Failure.NO_TOKEN,
}  # fmt: skip
"""What stands where there is no token, and why: ranks exchange tokens."""

Places: TypeAlias = npt.NDArray[np.intp]


def nowhere() -> Places:
    return np.empty(0, np.intp)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """tokens: int32 [S], or one of ``FAILURES``. logprobs: [S], None where the row wants none.
    broken: places in the step's batch of the requests of which not all is finite, int64 [B].
    scores: of the prompt tokens that were to be scored, [K]; None where another rank knows."""

    tokens: TokenIds
    logprobs: list[TokenLogprob | None]
    broken: Places = field(default_factory=nowhere)
    scores: Sequence[TokenLogprob | None] = ()

    def failures(self, batch: RowIds, rows: RowIds) -> dict[int, Failure]:
        """Which rows go on no further; ``batch``: all rows of the step, ``rows``: [S] of them."""
        if not len(self.broken) and (not len(self.tokens) or self.tokens.min() >= 0):
            return {}
        found = dict.fromkeys(batch[self.broken].tolist(), Failure.NOT_FINITE)
        bad = np.flatnonzero(self.tokens < 0)
        for row, token in zip(rows[bad].tolist(), self.tokens[bad].tolist(), strict=True):
            found.setdefault(row, FAILURES[token])
        return found

    def only(self, kept: npt.NDArray[np.bool_]) -> "Sampled":
        """Some of the sampled rows, none of them broken, and no scores."""
        logprobs = [self.logprobs[at] for at in np.flatnonzero(kept).tolist()]
        return Sampled(self.tokens[kept], logprobs)


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """What a step has chosen, where it runs. tokens: int64 [S], or one of ``FAILURES``. finite:
    bool [R], of all that was computed of each of its requests. reports: of the tokens; scores: of
    the prompt tokens that were to be scored, in order."""

    tokens: torch.Tensor
    finite: torch.Tensor
    reports: Sequence[Reports] = ()
    scores: Sequence[Reports] = ()

    def coming(self) -> "Coming":
        """On its way to the host from now on: what the device is given later comes behind it."""
        asked = (*self.reports, *self.scores)
        numbers = (one for each in asked for one in each.tensors)
        return Coming(self.reports, self.scores, ToHost(self.tokens, self.finite, *numbers))


@dataclass(frozen=True, slots=True, eq=False)
class Coming:
    """The numbers of a ``Drawn``, under way."""

    reports: Sequence[Reports]
    scores: Sequence[Reports]
    numbers: ToHost

    def read(self) -> Sampled:
        """The calling thread waits once, until they are there."""
        tokens, finite, *numbers = self.numbers.wait()
        found: list[TokenLogprob | None] = [None] * len(tokens)
        scored: list[TokenLogprob | None] = []
        for at, each in enumerate((*self.reports, *self.scores)):
            read = each.read(*numbers[4 * at : 4 * at + 4])
            if at >= len(self.reports):
                scored += read
                continue
            for row, report in zip(each.rows.tolist(), read, strict=True):
                found[row] = report
        return Sampled(tokens.astype(np.int32), found, np.flatnonzero(~finite), scored)


def choose(forward: Forward, params: SamplingBatch) -> Sampled:
    """A token for every row that can have one; of a forward that brings its own, those."""
    if forward.chosen is not None:
        return forward.chosen
    return drawn(forward, params).coming().read()


def drawn(forward: Forward, params: SamplingBatch) -> Drawn:
    """The same, still to be read."""
    tokens, found = _each(forward.logits, params)
    if params.targets is None:
        return Drawn(tokens, forward.finite, found)
    assert forward.scored is not None, "the runner has scored nothing"
    return Drawn(tokens, forward.finite, found, scores(forward.scored, params.targets))


def _each(logits: torch.Tensor, params: SamplingBatch) -> tuple[torch.Tensor, list[Reports]]:
    """``_together``, and where that fails row by row, so that only the rows fail that must."""
    try:
        return _together(logits, params)
    except AssertionError:
        raise
    except Exception:
        log.exception("sampling %s rows at once failed; each is tried alone", len(logits))
    tokens = torch.full((len(logits),), FAILED, dtype=torch.int64, device=logits.device)
    found: list[Reports] = []
    for row in range(len(logits)):
        try:
            token, its = _together(logits[row : row + 1], params.only(np.array([row])))
        except AssertionError:
            raise
        except Exception:
            log.exception("sampling failed for one request")
            continue
        tokens[row : row + 1] = token
        found += [each.moved(row) for each in its]
    return tokens, found


def _together(logits: torch.Tensor, params: SamplingBatch) -> tuple[torch.Tensor, list[Reports]]:
    tokens = chosen_tokens(logits, params)
    return tokens, reports(logits, tokens, params.logprobs)


def sample(logits: torch.Tensor, params: SamplingBatch) -> Sampled:
    """logits: float32 [S, vocab] -> one token a row, as ``chosen_tokens`` says; read at once."""
    everything = torch.ones(0, dtype=torch.bool, device=logits.device)
    tokens, found = _together(logits, params)
    return Drawn(tokens, everything, found).coming().read()
