"""The engine: submit, abort, step. Receives, plans, executes, commits, ticks, answers.

Owns the queue of requests and the order of a step. Decisions are the scheduler's and the cache's,
tensors the runner's. One thread calls it; must not know HTTP.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from stratakv.agreement.agreement import Figures
from stratakv.cache.kv_cache import KVCache
from stratakv.cache.records import CacheUse
from stratakv.core.errors import RequestError
from stratakv.core.ids import NONE, PageKey, RequestId, RowIds
from stratakv.core.page_keys import PageHasher
from stratakv.engine.attachment import BESIDE_STEPS, Report, StorageCall
from stratakv.engine.backlog import Backlog
from stratakv.engine.batch import StepBatch
from stratakv.engine.forward import Forward
from stratakv.engine.namespaces import Namespaces
from stratakv.engine.request import (
    Failure,
    FinishReason,
    Output,
    Phase,
    Prompt,
    Request,
    Signal,
)
from stratakv.engine.roles import Role
from stratakv.engine.rows import Rows
from stratakv.engine.running import Running, ScheduledStep
from stratakv.engine.sampling import Sampled
from stratakv.engine.scheduler import StepLimits
from stratakv.engine.seating import ALONE, Seating, admission_request
from stratakv.engine.stats import EngineStats, Totals, stats_of
from stratakv.engine.storage_control import NO_STORES, BackgroundStores, Openable, StorageControl
from stratakv.engine.token_source import OwnTokens, TokenSource
from stratakv.storage.io_worker import IoWorker
from stratakv.tiers.prefetch.request import ignored
from stratakv.tiers.statistics import StorageStats

log = logging.getLogger(__name__)

CLOSE_S: Final = 30.0
"""What storage gets, when the engine ends, to write what is queued."""


class Runner(Protocol):
    def forward(self, batch: StepBatch) -> Forward: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """``max_model_len``: tokens of prompt and output; ``max_running``: requests at once."""

    max_model_len: int
    max_running: int
    step: StepLimits


class Engine:
    """``namespaces``: where a request's pages belong. ``stores``: what opens one, once it runs."""

    def __init__(
        self,
        cache: KVCache,
        runner: Runner,
        role: Role,
        namespaces: Namespaces,
        limits: EngineLimits,
        token_source: TokenSource | None = None,
        stores: BackgroundStores = NO_STORES,
    ) -> None:
        self._cache = cache
        self.beside_steps = BESIDE_STEPS
        self._storage = StorageControl(cache.storage, stores)
        self._token_source = token_source or OwnTokens()
        self._runner = runner
        self._role = role
        self._totals = Totals()
        self._namespaces = namespaces
        self._limits = limits
        self._page = cache.spec.page_tokens
        rows = Rows(limits.max_running, limits.max_model_len)
        self._running = Running(rows, limits.step, cache.cut)
        self._backlog = Backlog()
        self._seating = Seating(
            cache, self._backlog, self._running, role, self._totals, limits.step
        )
        self._suspects: set[PageKey] = set()
        self._submitted = 0
        self._requests: dict[RequestId, Request] = {}
        self._news: list[Output] = []
        self._torn = False  # in a step, or after one that failed: states are ahead of their tokens

    # -- requests --------------------------------------------------------------------------------

    def checked(self, prompt: Prompt) -> int:
        """How many tokens it may come to. RequestError if it could never be served, however long
        it waits."""
        length, most = len(prompt.tokens), self._limits.max_model_len
        if not length:
            raise RequestError("the prompt is empty")
        if length >= most:
            raise RequestError(f"the prompt has {length} tokens; at most {most - 1} are allowed")
        if reason := prompt.sampling.refusal():
            raise RequestError(reason)
        if prompt.id in self._requests:
            raise RequestError(f"request {prompt.id} exists already")
        total = min(length + prompt.sampling.max_tokens, most)
        if reason := self._cache.refusal(total):
            raise RequestError(
                f"{length} tokens of prompt and {total - length} to generate need {reason}"
            )
        self._namespaces.of(prompt.adapter, prompt.salt)
        return total

    def submit(self, prompt: Prompt) -> None:
        """Queue a prompt; RequestError as in ``checked``. What else fails over it ends it with an
        ``Output``."""
        try:
            request = self._taken(prompt)
        except RequestError:
            raise
        except ALONE:
            log.exception("request %s failed while it was taken", prompt.id)
            self._tell_failure(prompt.id, Failure.INTERNAL)
            return
        self._submitted += 1
        self._requests[request.id] = request
        self._backlog.submit(request)
        if CacheUse.READ in prompt.use:
            self._cache.storage.prefetch(request.id, request.prefix, request.prompt_tokens)

    def _taken(self, prompt: Prompt) -> Request:
        total = self.checked(prompt)
        namespace = self._namespaces.of(prompt.adapter, prompt.salt)
        prefix = PageHasher(namespace, self._page, self._suspects)
        prefix.extend(prompt.tokens)
        return Request(
            prompt=prompt,
            prefix=prefix,
            total_tokens=total,
            adapter=self._namespaces.place(prompt.adapter),
            serial=self._submitted + 1,
        )

    def abort(self, request: RequestId) -> None:
        """Forget a request, whatever its phase; unknown ones are no error. Its last ``Output``
        comes with the next step."""
        found = self._requests.get(request)
        if found is None:
            return
        if found.row < 0:
            self._backlog.remove(found)
        if found.retracted is not None:
            self._cache.forget(found.retracted)
        if found.phase is Phase.WAITING:
            self._cache.abandon(admission_request(found))
        found.signal(Signal.ABORT)
        self._leave(found)
        self._news.append(Output(request=request, token=None, finish=FinishReason.ABORT))

    def retract(self, request: RequestId) -> None:
        """Take a request off the device, if it runs, as where pages run short."""
        found = self._requests.get(request)
        if found is not None and found.row >= 0:
            self._retract(found)

    def has_work(self) -> bool:
        return bool(self._requests or self._news or self._cache.busy)

    def flush(self) -> bool:
        """Drop every cached page; False, and nothing done, while a request runs."""
        return self._cache.flush()

    def stats(self) -> EngineStats:
        return stats_of(
            self._totals, self._backlog, self._running, self._cache, self.storage_stats()
        )

    def figures(self) -> Figures:
        """Who waits and runs, and what has just run, for ranks to compare."""
        return {**self._counts(), **self._running.figures()}

    def told(self) -> list[str]:
        """The same, to be read."""
        return [f"{name} {n}" for name, n in self._counts().items()] + self._running.told()

    def _counts(self) -> dict[str, int]:
        head = self._backlog.head
        return {
            "submitted": self._submitted,
            "waiting": len(self._backlog),
            "running": len(self._running),
            "steps": self._totals.steps,
            "next to run": NONE if head is None else head.serial,
        }

    def check(self) -> None:
        """Verify the tree and that every pool accounts for every page; AssertionError if not."""
        self._cache.check()

    # -- storage ---------------------------------------------------------------------------------

    def attach_storage(self, worker: IoWorker) -> None:
        """Use an open store from now on; AssertionError if there is one."""
        self._storage.given(worker)

    def call_storage(self, call: StorageCall) -> Sequence[Report]:
        """Do it, without waiting; what has come of it, by rank."""
        return (self._storage.call(call),)

    @property
    def store(self) -> Openable | None:
        """What a call has attached."""
        return self._storage.store

    def storage_stats(self) -> StorageStats | None:
        """None: nothing is attached."""
        return self._cache.storage.stats(busy=self.has_work())

    # -- a step ----------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Advance every running request once; returns what is new."""
        self._admit()
        step = self._planned()
        if step is None:
            self._token_source.idle()
            self._wait()
            return self._take_news()
        self._totals.steps += 1
        self._cache.extend(step.rows, step.starts, step.ends)
        batch = self._running.batch(step, self._cache.gate(step.take_tickets()))
        self._torn = True
        forward = self._runner.forward(batch)
        rows = batch.rows[batch.sampled]
        sampled = self._token_source.choose(forward, self._running.rows.sampling(rows))
        if failures := sampled.failures(batch.rows, rows):
            step, rows, sampled = self._without(failures, step, rows, sampled)
        self._commit(step)
        self._torn = False
        if len(rows):
            self._news += self._answer(rows, sampled)
        self._cache.tick(self._head())
        return self._take_news()

    def _take_news(self) -> list[Output]:
        news, self._news = self._news, []
        return news

    def _head(self) -> RequestId | None:
        head = self._backlog.head
        return None if head is None else head.id

    def _wait(self) -> None:
        """Nothing can run: what is queued waits for a copy or for storage, and without requests
        both only have to end."""
        if self._cache.busy:
            self._cache.pause(self._head())
            return
        assert not self._requests, "requests wait, but for nothing"
        self._cache.tick(self._head())

    def _admit(self) -> None:
        self._seating.admit(lambda request, error: self._alone(request, "seated", error))

    def _planned(self) -> ScheduledStep | None:
        """What runs next, without those who cannot be planned."""
        while True:
            try:
                return self._plan()
            except ALONE as error:
                request = self._running.unplannable(ALONE)
                if request is None:
                    raise
                self._alone(request, "planned", error)

    def _plan(self) -> ScheduledStep | None:
        """What runs next. Where pages run short, the youngest request leaves until the rest
        fits."""
        while True:
            step = self._running.scheduled()
            if step is None or self._cache.fits(step.starts, step.ends):
                return step
            if not self._cache.wait():  # pages under a copy may be all that is missing
                assert len(self._running) > 1, "a request that runs alone must fit"
                self._retract(self._running.youngest())

    def _retract(self, request: Request) -> None:
        """Take a running request off the device; it comes back before any new one starts."""
        row, columns = request.row, self._running.rows
        request.known = columns.known_tokens(row).copy()
        self._stop(request)
        request.retracted = self._cache.retract(row, columns.computed_tokens(row))
        request.row = -1
        request.tickets = ()
        request.signal(Signal.RETRACT)
        self._backlog.put_back([request])

    def _commit(self, step: ScheduledStep) -> None:
        """Record what the forward has computed; rows that filled a page hand it to the tree."""
        done = self._running.computed(step)
        filled = step.rows[step.ends // self._page > step.starts // self._page]
        for row in filled.tolist():
            self._cache.commit(row, self._running.rows.computed_tokens(row))
        for request in done:
            self._seating.computes_no_more(request)
            request.signal(self._role.prefilled(request))
            if request.phase is Phase.DECODING:
                self._running.decode(request)
                self._cache.prefilled(request.row, request.total_tokens)

    def _without(
        self, failures: Mapping[int, Failure], step: ScheduledStep, rows: RowIds, sampled: Sampled
    ) -> tuple[ScheduledStep, RowIds, Sampled]:
        """End the requests at ``failures``, before anything of this step is kept; what is left."""
        for row, failure in failures.items():
            request = self._running.by_row[row]
            log.error("request %s failed: %s", request.id, failure.value)
            if suspect := self._cache.suspect(row):
                self._suspects.add(suspect)
            self._fail(request, failure)
        failed = list(failures)
        kept = ~np.isin(rows, failed)
        left = [request for request in step.prefilling if request.row not in failures]
        return step.only(~np.isin(step.rows, failed), left), rows[kept], sampled.only(kept)

    def _answer(self, rows: RowIds, sampled: Sampled) -> list[Output]:
        columns = self._running.rows
        columns.append(rows, sampled.tokens)
        stopped, full = columns.ended(rows, sampled.tokens)
        self._totals.output_tokens += len(rows)
        listed = sampled.tokens.tolist()
        requests = [self._running.by_row[row] for row in rows.tolist()]
        news = [
            Output(request=request.id, token=token, logprob=logprob, cached=request.cached)
            for request, token, logprob in zip(requests, listed, sampled.logprobs, strict=True)
        ]
        for request in requests:
            request.cached = None  # told with the first token only
        for at in np.flatnonzero(stopped | full).tolist():
            reason = FinishReason.STOP if stopped[at] else FinishReason.LENGTH
            news[at] = replace(news[at], finish=reason)
            requests[at].signal(Signal.STOPPED)
            self._leave(requests[at])
        return news

    def _leave(self, request: Request) -> None:
        """Let go of everything a finished or aborted request holds."""
        del self._requests[request.id]
        if request.row < 0:
            return
        self._stop(request)
        computed = self._running.rows.computed_tokens(request.row)
        self._cache.release(request.row, computed[:0] if self._torn else computed)

    def _alone(self, request: Request, doing: str, error: Exception) -> None:
        """``error`` came while one request was seated or planned: the others go on, unless what
        they share was harmed. AssertionError if it was."""
        log.error("request %s failed while it was %s", request.id, doing, exc_info=error)
        self._fail(request, Failure.INTERNAL)
        self.check()

    def _fail(self, request: Request, failure: Failure) -> None:
        """End a request that is not in the backlog; nothing of its last step is kept."""
        if request.retracted is not None:
            self._cache.forget(request.retracted)
        if request.row >= 0:
            self._stop(request)
            self._cache.drop(request.row)
        elif request.phase is Phase.WAITING and CacheUse.READ in request.prompt.use:
            self._cache.storage.forget(request.id, ignored)
        request.signal(Signal.ABORT)
        del self._requests[request.id]
        self._tell_failure(request.id, failure)

    def _tell_failure(self, request: RequestId, failure: Failure) -> None:
        self._totals.failures[failure] += 1
        ended = Output(request=request, token=None, finish=FinishReason.ERROR, failure=failure)
        self._news.append(ended)

    def _stop(self, request: Request) -> None:
        if request in self._running.prefilling:
            self._seating.computes_no_more(request)
        self._running.stop(request)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Abort what is left, wait for the copies, and at most ``timeout_s`` for what storage is to
        keep."""
        for request in list(self._requests):
            self.abort(request)
        self._cache.close(timeout_s)
        self._storage.close(timeout_s)
