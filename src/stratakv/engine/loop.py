"""The engine: submit, abort, step. Receives, plans, executes, commits, ticks, answers.

Owns the queue of requests and the order of a step. Decisions are the scheduler's and the cache's,
tensors the runner's. One thread calls it; must not know HTTP.
"""

from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import torch

from stratakv.agreement.agreement import Figures
from stratakv.cache.admit import Wish
from stratakv.cache.kv_cache import KVCache
from stratakv.cache.records import Admission, CacheUse, Refusal
from stratakv.core.errors import RequestError
from stratakv.core.ids import NONE, PageKey, RequestId, RowIds
from stratakv.core.page_keys import PageHasher
from stratakv.engine.backlog import Backlog
from stratakv.engine.batch import StepBatch
from stratakv.engine.meeting import Meeting, NoMeeting
from stratakv.engine.namespaces import Namespaces
from stratakv.engine.request import FinishReason, Output, Phase, Prompt, Request, Signal
from stratakv.engine.roles import Role
from stratakv.engine.rows import Rows
from stratakv.engine.running import Running, Work
from stratakv.engine.sampling import Sampled
from stratakv.engine.scheduler import StepLimits, worth_waiting
from stratakv.engine.stats import EngineStats, Totals
from stratakv.policy.checkpoints import last_end
from stratakv.storage.io_worker import IoWorker
from stratakv.tiers.statistics import StorageStats

CLOSE_S: Final = 30.0
"""What storage gets, when the engine ends, to write what is queued."""


class Runner(Protocol):
    def forward(self, batch: StepBatch) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """``max_model_len``: tokens of prompt and output; ``max_running``: requests at once."""

    max_model_len: int
    max_running: int
    step: StepLimits


class Engine:
    """``namespaces``: where a request's pages belong, by its adapter and its salt."""

    def __init__(
        self,
        cache: KVCache,
        runner: Runner,
        role: Role,
        namespaces: Namespaces,
        limits: EngineLimits,
        meeting: Meeting | None = None,
    ) -> None:
        self._cache = cache
        self._meeting = meeting or NoMeeting()
        self._runner = runner
        self._role = role
        self._namespaces = namespaces
        self._limits = limits
        self._page = cache.spec.page_tokens
        rows = Rows(limits.max_running, limits.max_model_len)
        self._running = Running(rows, limits.step, cache.cut)
        self._backlog = Backlog()
        self._submitted = 0
        self._requests: dict[RequestId, Request] = {}
        self._computing: set[PageKey] = set()
        self._news: list[Output] = []
        self._totals = Totals()
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
        if prompt.sampling.max_tokens < 1:
            raise RequestError(f"max_tokens is {prompt.sampling.max_tokens}; at least 1 is needed")
        if prompt.id in self._requests:
            raise RequestError(f"request {prompt.id} exists already")
        total = min(length + prompt.sampling.max_tokens, most)
        if reason := self._cache.could_ever_fit(total):
            raise RequestError(
                f"{length} tokens of prompt and {total - length} to generate need {reason}"
            )
        self._namespaces.of(prompt.adapter, prompt.salt)
        return total

    def submit(self, prompt: Prompt) -> None:
        """Queue a prompt; RequestError as in ``checked``."""
        total = self.checked(prompt)
        prefix = PageHasher(self._namespaces.of(prompt.adapter, prompt.salt), self._page)
        prefix.extend(prompt.tokens)
        adapter = self._namespaces.place(prompt.adapter)
        self._submitted += 1
        request = Request(
            prompt=prompt,
            prefix=prefix,
            total_tokens=total,
            adapter=adapter,
            serial=self._submitted,
        )
        self._requests[request.id] = request
        self._backlog.submit(request)
        if CacheUse.READ in prompt.use:
            self._cache.storage.prefetch(request.id, prefix, request.prompt_tokens)

    def abort(self, request: RequestId) -> None:
        """Forget a request, whatever its phase; unknown ones are no error. Its last ``Output``
        comes with the next step."""
        found = self._requests.get(request)
        if found is None:
            return
        if found.row < 0:
            self._backlog.remove(found)
        if found.parked is not None:
            self._cache.forget(found.parked)
        if found.phase is Phase.WAITING:
            self._cache.abandon(_wish(found))
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
        totals = self._totals
        return EngineStats(
            waiting=len(self._backlog),
            retracted=self._backlog.retracted,
            running=len(self._running),
            steps=totals.steps,
            prompt_tokens=totals.prompt_tokens,
            output_tokens=totals.output_tokens,
            cached_device_tokens=totals.cached_device_tokens,
            cached_host_tokens=totals.cached_host_tokens,
            cached_storage_tokens=totals.cached_storage_tokens,
            known_tokens=self._cache.losses.known,
            lost_tokens=self._cache.losses.by_tier(),
            pages=self._cache.stats(),
            counters=self._cache.counters.snapshot(),
            storage=self.storage_stats(),
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
        self._cache.storage.attach(worker)

    def detach_storage(self, *, force: bool = False) -> IoWorker | None:
        """The store, of which nothing is used any more; None: not yet, ask again after a step.
        ``force``: what is queued is given up."""
        return self._cache.storage.detach(force=force)

    def keep_storage(self) -> None:
        """A detach is given up: go on as before."""
        self._cache.storage.keep()

    def clear_storage(self) -> bool:
        """Forget every object of the store, after what is queued; False: too much is queued."""
        return self._cache.storage.clear()

    def storage_stats(self) -> StorageStats | None:
        """None: nothing is attached."""
        return self._cache.storage.stats(busy=self.has_work())

    # -- a step ----------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Advance every running request once; returns what is new."""
        self._admit()
        news, self._news = self._news, []
        work = self._plan()
        if work is None:
            self._meeting.idle()
            self._wait()
            return news
        self._totals.steps += 1
        self._cache.extend(work.rows, work.starts, work.ends)
        batch = self._running.batch(work, self._cache.gate(work.take_tickets()))
        self._torn = True
        logits = self._runner.forward(batch)
        rows = batch.rows[batch.sampled]
        sampled = self._meeting.choose(logits, self._running.rows.sampling(rows))
        self._commit(work)
        self._torn = False
        if len(rows):
            news += self._answer(rows, sampled)
        self._cache.tick(self._head())
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
        """Seat requests whose turn it is, until one does not fit."""
        held: list[Request] = []
        for _ in range(min(len(self._backlog), self._limits.step.look_ahead)):
            if not self._running.has_room():
                break
            request = self._backlog.pop()
            if self._must_wait(request):
                held.append(request)
                continue
            answer = self._ask(request)
            if isinstance(answer, Refusal):
                held.append(request)
                break
            self._seat(request, answer)
        self._backlog.put_back(held)

    def _ask(self, request: Request) -> Admission | Refusal:
        wish = _wish(request)
        if request.parked is None:
            return self._cache.admit(wish)
        return self._cache.resume(request.parked, wish)

    def _must_wait(self, request: Request) -> bool:
        if request.parked is not None:
            return False
        if not self._role.may_start(request) or self._cache.storage.holds_back(request.id):
            return True
        if not self._computing or CacheUse.READ not in request.prompt.use:
            return False
        limit = last_end(request.prompt_tokens, self._page)
        end = self._cache.match(request.prefix, request.prompt_tokens).end
        return worth_waiting(request.prefix.keys, end, limit, self._computing)

    def _seat(self, request: Request, admission: Admission) -> None:
        if request.phase is Phase.WAITING:
            request.cached = admission.cached
            totals = self._totals
            totals.prompt_tokens += request.prompt_tokens
            totals.cached_device_tokens += admission.cached.device
            totals.cached_host_tokens += admission.cached.host
            totals.cached_storage_tokens += admission.cached.storage
        request.row = admission.row
        request.tickets = admission.tickets
        request.parked = None
        request.signal(Signal.ADMITTED)
        self._running.seat(request, admission.computed)
        if admission.cached.use is CacheUse.ALL:
            self._computing.update(request.prefix.keys[admission.computed // self._page :])

    def _plan(self) -> Work | None:
        """What runs next. Where pages run short, the youngest request leaves until the rest
        fits."""
        while True:
            work = self._running.work()
            if work is None or self._cache.fits(work.starts, work.ends):
                return work
            if not self._cache.wait():  # pages under a copy may be all that is missing
                assert len(self._running) > 1, "a request that runs alone must fit"
                self._retract(self._running.youngest())

    def _retract(self, request: Request) -> None:
        """Take a running request off the device; it comes back before any new one starts."""
        row, columns = request.row, self._running.rows
        request.known = columns.known_tokens(row).copy()
        self._stop(request)
        request.parked = self._cache.retract(row, columns.computed_tokens(row))
        request.row = -1
        request.tickets = ()
        request.signal(Signal.RETRACT)
        self._backlog.put_back([request])

    def _commit(self, work: Work) -> None:
        """Record what the forward has computed; rows that filled a page hand it to the tree."""
        done = self._running.computed(work)
        filled = work.rows[work.ends // self._page > work.starts // self._page]
        for row in filled.tolist():
            self._cache.commit(row, self._running.rows.computed_tokens(row))
        for request in done:
            self._computes_no_more(request)
            request.signal(self._role.prefilled(request))
            if request.phase is Phase.DECODING:
                self._running.decode(request)
                self._cache.prefilled(request.row, request.total_tokens)

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

    def _stop(self, request: Request) -> None:
        if request in self._running.prefilling:
            self._computes_no_more(request)
        self._running.stop(request)

    def _computes_no_more(self, request: Request) -> None:
        if request.prompt.use is CacheUse.ALL:  # nobody waits for the pages of the others
            self._computing.difference_update(request.prefix.keys)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Abort what is left, wait for the copies, and at most ``timeout_s`` for what storage is to
        keep."""
        for request in list(self._requests):
            self.abort(request)
        self._cache.close(timeout_s)


def _wish(request: Request) -> Wish:
    """Of one that does not run."""
    return Wish(
        prefix=request.prefix,
        tokens=len(request.known),
        total_tokens=request.total_tokens,
        request=request.id,
        priority=request.prompt.priority,
        again=request.phase is Phase.RETRACTED,
        use=request.prompt.use,
    )
