"""A step of the engine in two halves: ``launch`` plans it and gives it to the executor, ``collect``
takes its tokens, commits what it has computed and answers.

Owns the steps that are launched and not collected. On a CPU there is never more than one; a device
that runs ahead computes one while the one before is collected here. Must not decide how deep
(``executor``), who comes in (``admission_scheduler``) or what an end means (``endings``).
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, assert_never

import numpy as np
import numpy.typing as npt

from stratakv.cache.kv_cache import KVCache
from stratakv.cache.records import TierTokens
from stratakv.core.ids import PageKey, RequestId, RowIds
from stratakv.core.logs import DETAILS
from stratakv.engine.admission_scheduler import (
    REQUEST_FAULTS,
    AdmissionScheduler,
    admission_request,
)
from stratakv.engine.endings import Endings
from stratakv.engine.executor import Executor
from stratakv.engine.hand_off import Transfers
from stratakv.engine.prompt_logprobs import ScoredTokens
from stratakv.engine.request import Failure, FinishReason, Output, Phase, Request, Signal
from stratakv.engine.roles import (
    FirstToken,
    MayStart,
    PartSent,
    Received,
    Sent,
    TransferFailed,
    TransferLost,
)
from stratakv.engine.running import Running, ScheduledStep
from stratakv.engine.sampling import Sampled
from stratakv.engine.stats import Totals
from stratakv.engine.step_times import StepPart

log = logging.getLogger(__name__)


RETRY_STEPS: Final = 4
"""Between two looks for somebody who could become resident again."""
RETURN_STEPS: Final = 16
"""Between two requests that become resident again: where pressure comes and goes, each costs its
request a step or two, and a load."""


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """``sampled``: which rows of ``step`` get a token, bool [R]."""

    step: ScheduledStep
    sampled: npt.NDArray[np.bool_]
    scored: ScoredTokens | None


class Steps:
    """``suspects``: keys of pages that a request may have failed over."""

    suspects: Final[set[PageKey]]

    def __init__(
        self,
        cache: KVCache,
        executor: Executor,
        running: Running,
        admissions: AdmissionScheduler,
        transfers: Transfers,
        endings: Endings,
        totals: Totals,
    ) -> None:
        self._cache = cache
        self._copies = cache.tiers.copies.flights
        self._page = cache.spec.page_tokens
        self._executor = executor
        self._running = running
        self._admissions = admissions
        self._transfers = transfers
        self._endings = endings
        self.suspects = set()
        self._totals = totals
        self._in_flight: deque[_Launched] = deque()
        self._until_return = 0
        self._drains = False  # who is to become resident again is in a launched step

    def __len__(self) -> int:
        """Steps that are launched and not collected."""
        return len(self._in_flight)

    # -- launch ----------------------------------------------------------------------------------

    def launch(self) -> bool:
        """Plan and launch the next step; False where there is nothing to compute now."""
        times = self._totals.times
        times.enter(StepPart.SCHEDULE)
        if self._drains and self._in_flight:
            return False
        step = self._planned()
        if step is None:
            return False
        self._totals.add(steps=1)
        times.enter(StepPart.TREE)
        self._cache.extend(step.rows, step.starts, step.ends)
        rows = self._running.rows
        times.enter(StepPart.COPIES)
        gate = self._copies.gate(self._running.take_tickets(step))
        times.enter(StepPart.SCHEDULE)
        scored = self._running.scored(step)
        batch = self._running.batch(step, gate, scored)
        sampling = rows.sampling(batch.rows[batch.sampled])
        if scored is not None:
            sampling = replace(sampling, targets=scored.targets)
        rows.launch(step.rows, step.ends, batch.sampled)
        self._in_flight.append(_Launched(step, batch.sampled, scored))
        times.enter(StepPart.FORWARD)
        self._executor.launch(batch, sampling)
        return True

    def admit(self) -> None:
        self._until_return = max(0, self._until_return - 1)
        self._drains = False
        if not self._until_return and not len(self._admissions.backlog):
            self._bring_back()
        self._admissions.admit(
            lambda request, error: self._endings.alone(request, "admitted", error)
        )

    def _bring_back(self) -> None:
        """Nobody waits: a request that reads pages on the host, and for which there is room again,
        is retracted, and comes in anew with all of them on the device. Where it is in a launched
        step, none is launched until that is collected."""
        self._until_return = RETRY_STEPS
        rows, columns = frozenset(self._cache.roomy()), self._running.rows
        for request in self._retractable() if rows else ():
            row = request.row
            tokens = columns.length.item(row) + columns.pending.item(row)
            if row not in rows or tokens - columns.launched.item(row) != 1:
                continue
            asked = replace(admission_request(request), tokens=tokens, again=True)
            if not self._cache.would_be_resident(row, asked):
                continue
            if columns.in_flight.item(row):
                self._drains, self._until_return = True, 0
                return
            self._until_return = RETURN_STEPS
            self.retract(request)
            return

    def _planned(self) -> ScheduledStep | None:
        """What runs next, without those who cannot be planned."""
        while True:
            try:
                return self._plan()
            except REQUEST_FAULTS as error:
                request = self._running.unplannable(REQUEST_FAULTS)
                if request is None:
                    raise
                self._endings.alone(request, "planned", error)

    def _plan(self) -> ScheduledStep | None:
        """What runs next. Where pages run short, the youngest request leaves until the rest
        fits."""
        while True:
            step = self._running.scheduled()
            if step is None or self._cache.fits(step.starts, step.ends):
                return step
            if self._cache.progress.wait():  # pages under a copy may be all that is missing
                continue
            others = len(self._retractable()) > 1
            if self._in_flight or (self._transfers and not others):
                return None  # or those of a request that ends there
            if not others and self._cache.storage.busy:
                return None  # host pages that storage reads or fills may be what is missing
            if not others:
                self._cannot_go_on()
                continue
            self.retract(max(self._retractable(), key=lambda request: request.serial))

    def _cannot_go_on(self) -> None:
        """A request that runs alone has no room for its next token."""
        assert self._cache.stuck, "a request that runs alone must fit"
        for request in self._retractable():
            log.error("request %s failed: its pages cannot be copied to the host", request.id)
            self._endings.fail(request, Failure.COPY)

    def _retractable(self) -> list[Request]:
        """The requests whose pages nobody else touches."""
        return [one for one in self._running.computing if not self._transfers.touch(one.row)]

    def retract(self, request: Request) -> None:
        """Take a request that computes off the device; it comes back before any new one starts. One
        whose pages somebody else touches, or that has ended by then, stays."""
        columns = self._running.rows
        while request in self._retractable() and columns.in_flight.item(request.row):
            self.collect()
        if request not in self._retractable():
            return
        self._totals.times.enter(StepPart.SCHEDULE)
        row = request.row
        known = columns.known_tokens(row).copy()
        self._endings.stop(request)
        request.retract(known, self._cache.retract(row, columns.computed_tokens(row)))
        self._admissions.backlog.put_back([request])

    # -- collect ---------------------------------------------------------------------------------

    def due(self, *, launched: bool) -> bool:
        """Whether the oldest step is to be collected before another one is launched."""
        deep = len(self._in_flight) >= self._executor.depth
        return deep or (bool(self._in_flight) and not launched)

    def collect(self) -> None:
        """Take the tokens of the oldest step, keep what it has computed, and answer."""
        launched = self._in_flight[0]
        times = self._totals.times
        times.enter(StepPart.SAMPLE)
        step, sampled = launched.step, self._executor.collect()
        rows = step.rows[launched.sampled]
        if launched.scored is not None:
            launched.scored.give(sampled.scores)
        failed = self._failed(step.rows, rows, sampled)
        if spoiled := [*failed, *self._endings.spoiled()]:
            kept = ~np.isin(step.rows, spoiled)
            left = [request for request in step.prefilling if request.row not in spoiled]
            step = step.only(kept, left)
        times.enter(StepPart.TREE)
        done = self._commit(step)
        times.enter(StepPart.SAMPLE)
        self._send_chunks(step, done)
        self._running.rows.collect(launched.step.rows, launched.sampled)
        self._in_flight.popleft()
        if left := self._endings.left():
            here = ~np.isin(rows, left)
            rows, sampled = rows[here], sampled.only(here)
        if len(rows):
            self._answer(rows, sampled, done)
        self._endings.settle()

    def _failed(self, batch: RowIds, rows: RowIds, sampled: Sampled) -> list[int]:
        """End the requests that can go on no further, before anything of the step is kept; their
        rows."""
        failures = sampled.failures(batch, rows)
        for row, failure in failures.items():
            if failure is Failure.NOT_FINITE and (suspect := self._cache.suspect(row)):
                self.suspects.add(suspect)
            if self._endings.has_left(row):
                self._endings.spoil(row)
                continue
            request = self._running.by_row[row]
            level = logging.INFO if failure is Failure.NO_TOKEN else logging.ERROR
            details = {DETAILS: {"id": request.id, "cause": failure.value}}
            log.log(level, "request %s failed: %s", request.id, failure.value, extra=details)
            self._endings.fail(request, failure)
        return list(failures)

    def _commit(self, step: ScheduledStep) -> list[Request]:
        """Record what has been computed; rows that filled a page hand it to the tree. Returns the
        requests whose prompts are complete."""
        done = self._running.computed(step)
        filled = step.rows[step.ends // self._page > step.starts // self._page]
        for row in filled.tolist():
            self._cache.commit(row, self._running.rows.computed_tokens(row))
        return [request for request in done if not self._endings.has_left(request.row)]

    def _send_chunks(self, step: ScheduledStep, done: Sequence[Request]) -> None:
        for request in step.prefilling:
            if request not in done and not self._endings.has_left(request.row):
                self._transfers.chunk_computed(request)

    def _answer(self, rows: RowIds, sampled: Sampled, done: Sequence[Request]) -> None:
        """Report tokens of ``rows``; those of ``done``, which are among them, are their first."""
        columns = self._running.rows
        columns.append(rows, sampled.tokens)
        stopped, full = columns.ended(rows, sampled.tokens)
        self._totals.add(output_tokens=len(rows))
        listed = sampled.tokens.tolist()
        requests = [self._running.by_row[row] for row in rows.tolist()]
        for request in done:
            at = requests.index(request)
            self._admissions.computes_no_more(request)
            self._transfers.prefilled(request, FirstToken(listed[at], sampled.logprobs[at]))
        outputs = [
            Output(
                request=request.id,
                token=token,
                logprob=logprob,
                cached=request.take_cached(),
                prompt_logprobs=request.take_scored(),
            )
            for request, token, logprob in zip(requests, listed, sampled.logprobs, strict=True)
        ]
        for at in np.flatnonzero(stopped | full).tolist():
            if requests[at].phase is Phase.TRANSFERRING:
                continue  # whoever decodes finds out
            reason = FinishReason.STOP if stopped[at] else FinishReason.LENGTH
            outputs[at] = replace(outputs[at], finish=reason)
            self._endings.finish(requests[at], Signal.STOPPED)
        self._endings.emit(outputs)

    # -- transfers -------------------------------------------------------------------------------

    def poll(self) -> None:
        """Go on with the requests whose transfers have, or that may start by now."""
        for end in self._transfers.events():
            request = self._endings.requests.get(end.request)
            if request is None:  # it has left; its row is given back below
                continue
            match end:
                case Received(_, first, cached):
                    self._received(request, first, cached)
                case Sent(name):
                    self._hand_off(name, request)
                case PartSent():
                    pass  # the rest is still to be computed
                case MayStart():
                    self._admissions.backlog.unblock(request)
                case TransferFailed(name, reason) if request.has_generated:
                    log.warning(
                        "request %s went back in vain, and is computed here: %s", name, reason
                    )
                    self._compute_here(request)
                case TransferFailed(name, reason) | TransferLost(name, reason):
                    log.error("the transfer of request %s failed: %s", name, reason)
                    if request.row < 0:
                        self._admissions.backlog.remove(request)
                    self._endings.fail(request, Failure.TRANSFER, reason)
                case _:
                    assert_never(end)
        self._endings.settle()

    def _received(self, request: Request, first: FirstToken, cached: TierTokens | None) -> None:
        if not self._transfers.knows(first):  # an embedding has no row for it
            reason = f"its first token is {first.token}, which the model has not"
            log.error("the transfer of request %s failed: %s", request.id, reason)
            self._endings.fail(request, Failure.TRANSFER, reason)
            return
        request.prefilled_elsewhere(cached)
        self._transfers.received(request)
        row = np.array([request.row], np.int32)
        tokens = np.array([first.token], np.int32)
        self._answer(row, Sampled(tokens, [first.logprob]), ())

    def _compute_here(self, request: Request) -> None:
        """It was retracted and sent back to be computed, in vain; the role has it computed here."""
        if request.row < 0:
            self._admissions.backlog.unblock(request)
            return
        row = request.row
        self._endings.stop(request)
        request.retract(request.known, self._cache.lose(row, len(request.known) - 1))
        self._admissions.backlog.put_back([request])

    def _hand_off(self, name: RequestId, request: Request) -> None:
        self._endings.finish(request, Signal.SENT)
        self._endings.emit([Output(request=name, token=None, finish=FinishReason.HANDED_OFF)])
