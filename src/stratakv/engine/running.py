"""The requests that run: who prefills, who decodes, and what each may compute next.

A step may be planned while others are launched and not yet collected. Then a row that decodes goes
on after a token that nobody here knows yet; one whose prompt ends in those steps waits for their
end, since what becomes of it is decided there, and so does one that gives its state away there.

Owns these sets, and the columns of ``rows.Rows`` through them. Torch-free; must not take pages or
decide who comes in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from stratakv.agreement.agreement import DigestInputs
from stratakv.core.ids import NONE, RowIds, TicketId
from stratakv.engine.batch import StepBatch
from stratakv.engine.prompt_logprobs import ScoredTokens, room_for_scores, scored_tokens
from stratakv.engine.request import Phase, Request
from stratakv.engine.rows import Rows
from stratakv.engine.scheduler import StepLimits, chunk_sizes, prefill_room
from stratakv.transfer.engine import LayerGate

GivesState: TypeAlias = Callable[[RowIds, RowIds], npt.NDArray[np.bool_]]


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledStep:
    """One step's tokens [starts, ends) of each row, int32 [R]; decoding rows first, then the
    chunks of ``prefilling``."""

    rows: RowIds
    starts: RowIds
    ends: RowIds
    prefilling: tuple[Request, ...]

    def only(self, kept: npt.NDArray[np.bool_], prefilling: Sequence[Request]) -> "ScheduledStep":
        """Some of the rows; ``prefilling``: of theirs."""
        return ScheduledStep(self.rows[kept], self.starts[kept], self.ends[kept], tuple(prefilling))


class Running:
    """``cut``: the token at which the next chunk of a row must end, or None. ``gives_state``: of
    rows, whether each gives its state away where it has so many tokens, bool [n]."""

    def __init__(
        self,
        rows: Rows,
        limits: StepLimits,
        cut: Callable[[int], int | None],
        gives_state: GivesState,
    ) -> None:
        self.rows = rows
        self.by_row: dict[int, Request] = {}
        self.prefilling: list[Request] = []
        self.decoding: RowIds = np.empty(0, np.int32)
        self._landing: list[Request] = []  # those that decode, and whose pages are being loaded
        self._limits = limits
        self._cut = cut
        self._gives_state = gives_state

    def __len__(self) -> int:
        """Requests that hold a row; ``computing`` of them compute."""
        return len(self.by_row)

    @property
    def computing(self) -> list[Request]:
        """Those whose pages nobody else fills, or needs all of."""
        return [one for one in self.by_row.values() if one.phase is not Phase.TRANSFERRING]

    def prefill(self, request: Request, computed: int) -> None:
        """``request.row`` begins to run, with KV of its first ``computed`` tokens."""
        self.rows.open(request, computed)
        self.by_row[request.row] = request
        self.prefilling.append(request)

    def open(self, request: Request, computed: int) -> None:
        """The same, but what else it knows is computed elsewhere."""
        self.rows.open(request, computed)
        self.by_row[request.row] = request

    def computed_elsewhere(self, request: Request) -> None:
        """All that it knows has its KV."""
        row = request.row
        self.rows.computed[row] = self.rows.launched[row] = self.rows.length[row]

    def pause(self, request: Request) -> None:
        """Its prompt is computed, and it computes no more here."""
        self.prefilling.remove(request)

    def decode(self, request: Request) -> None:
        """Its prompt has its KV."""
        if request in self.prefilling:
            self.prefilling.remove(request)
        self.decoding = np.append(self.decoding, np.int32(request.row))
        if request.tickets:
            self._landing.append(request)

    def take_tickets(self, step: ScheduledStep) -> list[TicketId]:
        """The loads that the step's first-timers wait for; given once."""
        first = (*step.prefilling, *self._landing)
        found = [ticket for request in first for ticket in request.take_tickets()]
        self._landing.clear()
        return found

    def stop(self, request: Request) -> None:
        if request in self.prefilling:
            self.prefilling.remove(request)
        if request in self._landing:
            self._landing.remove(request)
        self.decoding = self.decoding[self.decoding != request.row]
        self.by_row.pop(request.row, None)  # a retraction that failed has stopped it already

    def figures(self) -> DigestInputs:
        """Lengths and newest tokens of all rows, whoever sits there, for ranks to compare."""
        columns = self._compared()
        return {name: crc32(column.data) for name, column in columns.items()}

    def description(self) -> list[str]:
        """The same, to be read."""
        return [f"{name} {column.tolist()}" for name, column in self._compared().items()]

    def _compared(self) -> dict[str, npt.NDArray[np.int32]]:
        rows = self.rows
        newest = rows.tokens[np.arange(len(rows.length)), np.maximum(rows.length - 1, 0)]
        return {"lengths": rows.length, "computed": rows.computed, "newest tokens": newest}

    # -- what is left to do ----------------------------------------------------------------------

    def left(self, request: Request) -> int:
        """Tokens that the request knows, and that no step has computed or computes."""
        return int(self.rows.length[request.row] - self.rows.launched[request.row])

    def has_room(self) -> bool:
        """Whether the next step has tokens that nobody running has a claim to."""
        left = [self.left(request) for request in self.prefilling]
        return prefill_room(self._limits, len(self.decoding), left) > 0

    def _chunk(self, request: Request) -> int:
        """The most that its next chunk may hold."""
        left, cut = self.left(request), self._cut(request.row)
        return left if cut is None else min(left, cut - self.rows.launched.item(request.row))

    def unplannable(self, errors: tuple[type[Exception], ...]) -> Request | None:
        """The first of those who prefill whose next chunk cannot be planned, but for ``errors``."""
        for request in self.prefilling:
            try:
                self._chunk(request)
            except errors:
                return request
        return None

    def scheduled(self) -> ScheduledStep | None:
        """The next step: one token of every decoding request, and chunks in what is left."""
        decoding = self._going_on()
        decodes = len(decoding)
        chunks = [self._chunk(request) for request in self.prefilling]
        chunks = room_for_scores(self.prefilling, chunks)
        sizes = chunk_sizes(self._limits, decodes, chunks)
        some = [pair for pair in zip(self.prefilling, sizes, strict=True) if pair[1]]
        if not some and not decodes:
            return None
        rows = np.array([request.row for request, _ in some], np.int32)
        rows = np.concatenate((decoding, rows))
        starts = self.rows.launched[rows]
        counts = np.ones(len(rows), np.int32)
        counts[decodes:] = [size for _, size in some]
        return ScheduledStep(rows, starts, starts + counts, tuple(request for request, _ in some))

    def scored(self, step: ScheduledStep) -> ScoredTokens | None:
        """Of its prompt tokens those whose log-probabilities somebody wants."""
        decodes = len(step.rows) - len(step.prefilling)
        starts, ends = step.starts[decodes:], step.ends[decodes:]
        return scored_tokens(step.prefilling, starts, ends, decodes)

    def batch(
        self, step: ScheduledStep, gate: LayerGate | None, scored: ScoredTokens | None
    ) -> StepBatch:
        """``step`` with its tokens, as a runner takes it."""
        columns, rows = self.rows, step.rows
        decodes = len(rows) - len(step.prefilling)
        some, at = rows[:decodes], step.starts[:decodes]
        known = at < columns.length[some]
        tokens = [np.where(known, columns.tokens[some, at], np.int32(NONE))]
        for at, request in enumerate(step.prefilling, start=decodes):
            tokens.append(columns.tokens[request.row, step.starts[at] : step.ends[at]])
        return StepBatch(
            rows=rows,
            starts=step.starts,
            counts=step.ends - step.starts,
            tokens=np.concatenate(tokens),
            sampled=step.ends == columns.length[rows] + columns.pending[rows],
            gate=gate,
            adapters=columns.adapters(rows),
            scored=None if scored is None else _marked(scored, step),
        )

    def _going_on(self) -> RowIds:
        """Of those that decode, whose next token can be computed now: not where the steps in flight
        choose its last one, or end where it gives its state away, or choose a token that the choice
        of the next one depends on."""
        rows, decoding = self.rows, self.decoding
        ahead = np.flatnonzero(rows.in_flight[decoding])
        if not len(ahead):
            return decoding
        known = rows.length[decoding] + rows.pending[decoding]
        on = known < rows.limit[decoding]
        at = rows.launched[decoding]
        on[ahead[self._gives_state(decoding[ahead], at[ahead])]] = False
        on[ahead[rows.reads_back(decoding[ahead])]] = False
        return decoding[on]

    def computed(self, step: ScheduledStep) -> list[Request]:
        """The step's KV is there; the requests that have it of all they know."""
        self.rows.computed[step.rows] = step.ends
        columns = self.rows
        return [
            request
            for request in step.prefilling
            if columns.computed.item(request.row) == columns.length.item(request.row)
        ]


def _marked(scored: ScoredTokens, step: ScheduledStep) -> npt.NDArray[np.bool_]:
    marks = np.zeros(int((step.ends - step.starts).sum()), np.bool_)
    marks[scored.at] = True
    return marks
