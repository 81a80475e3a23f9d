"""The engine: submit, abort, step. Receives, launches, collects, ticks, answers.

Owns the queue of requests and the order of a step. What is launched and collected is ``steps``',
the end of a request ``endings``', decisions are the scheduler's and the cache's, tensors the
executor's. One thread calls it; must not know HTTP.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from stratakv.agreement.agreement import DigestInputs
from stratakv.cache.kv_cache import KVCache
from stratakv.cache.records import CacheUse
from stratakv.core.errors import RequestError
from stratakv.core.ids import NONE, RequestId
from stratakv.core.page_keys import PageHasher
from stratakv.engine.admission_scheduler import REQUEST_FAULTS, AdmissionScheduler
from stratakv.engine.attachment import BESIDE_STEPS, AttachmentReport, StorageCall
from stratakv.engine.backlog import Backlog
from stratakv.engine.endings import Endings
from stratakv.engine.executor import Executor
from stratakv.engine.grammars import NO_GRAMMARS, Grammars
from stratakv.engine.hand_off import Transfers
from stratakv.engine.namespaces import Namespaces
from stratakv.engine.request import Failure, Output, Prompt, Request
from stratakv.engine.roles import Role
from stratakv.engine.rows import Rows
from stratakv.engine.running import Running
from stratakv.engine.scheduler import StepLimits
from stratakv.engine.stats import EngineStats, RequestStatus, Totals, stats_of, status_of
from stratakv.engine.step_times import StepPart
from stratakv.engine.steps import Steps
from stratakv.engine.storage_control import NO_STORES, BackgroundStores, Openable, StorageControl
from stratakv.engine.why_miss import EngineMisses
from stratakv.storage.io_worker import IoWorker
from stratakv.tiers.statistics import StorageStats

log = logging.getLogger(__name__)

CLOSE_S: Final = 30.0
"""What storage gets, when the engine ends, to write what is queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """``max_model_len``: tokens of prompt and output; ``max_running``: requests at once;
    ``vocab_size``: token ids are below it."""

    max_model_len: int
    vocab_size: int
    max_running: int
    step: StepLimits


class Engine:
    """``namespaces``: where a request's pages belong. ``stores``: what opens one, once it runs.
    ``grammars``: forms that answers may have to have. Beside its own verbs, ``misses``: why
    prompts were computed."""

    def __init__(
        self,
        cache: KVCache,
        executor: Executor,
        role: Role,
        namespaces: Namespaces,
        limits: EngineLimits,
        stores: BackgroundStores = NO_STORES,
        grammars: Grammars = NO_GRAMMARS,
    ) -> None:
        self._cache, self._progress = cache, cache.progress
        self.beside_steps = BESIDE_STEPS
        self._storage = StorageControl(cache.storage, stores)
        self._executor = executor
        self._role = role
        self._totals = Totals()
        self._namespaces = namespaces
        self._limits = limits
        self._page = cache.spec.page_tokens
        self.misses = EngineMisses(cache.admission.misses, namespaces, self._page)
        self._grammars = grammars
        rows = Rows(limits.max_running, limits.max_model_len, self._grammars)
        self._running = Running(rows, limits.step, cache.cut, cache.hand_off.gives_state)
        self._backlog = Backlog()
        self._transfers = Transfers(cache, self._running, role, limits.vocab_size)
        self._admissions = AdmissionScheduler(
            cache, self._backlog, self._running, role, self._transfers, self._totals, limits.step
        )
        self._endings = Endings(
            cache,
            self._backlog,
            self._running,
            self._admissions,
            self._transfers,
            role,
            self._totals,
        )
        self._requests = self._endings.requests
        self._steps = Steps(
            cache,
            executor,
            self._running,
            self._admissions,
            self._transfers,
            self._endings,
            self._totals,
        )
        self._submitted = 0

    # -- requests --------------------------------------------------------------------------------

    def checked(self, prompt: Prompt) -> int:
        """How many tokens it may come to. RequestError if it could never be served, however long
        it waits."""
        length, most = len(prompt.tokens), self._limits.max_model_len
        if not length:
            raise RequestError("the prompt is empty")
        if length >= most:
            raise RequestError(f"the prompt has {length} tokens; at most {most - 1} are allowed")
        vocab = self._limits.vocab_size
        if prompt.tokens.min() < 0 or prompt.tokens.max() >= vocab:
            raise RequestError(f"the prompt has token ids outside [0, {vocab})")
        if reason := prompt.sampling.refusal():
            raise RequestError(reason)
        if prompt.sampling.prompt_logprobs is not None and CacheUse.READ in prompt.use:
            raise RequestError("prompt_logprobs need a request that reads no cache")
        grammar = prompt.sampling.grammar
        if grammar is not None and (reason := self._grammars.refusal(grammar)):
            raise RequestError(reason)
        if prompt.id in self._requests or prompt.id in self._transfers:
            raise RequestError(f"request {prompt.id} exists already")
        total = min(length + prompt.sampling.max_tokens, most)
        if reason := self._cache.admission.refusal(total, prompt.use):
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
        except REQUEST_FAULTS:
            log.exception("request %s failed while it was taken", prompt.id)
            self._endings.emit_failure(prompt.id, Failure.INTERNAL)
            self._role.left(prompt)
            return
        self._submitted += 1
        self._requests[request.id] = request
        self._backlog.submit(request)
        self._role.arrived(request)
        if CacheUse.READ in prompt.use:
            self._cache.storage.prefetcher.start(request.id, request.prefix, request.prompt_tokens)

    def _taken(self, prompt: Prompt) -> Request:
        total = self.checked(prompt)
        namespace = self._namespaces.of(prompt.adapter, prompt.salt)
        prefix = PageHasher(namespace, self._page, self._steps.suspects)
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
        if found is not None:
            self._endings.abort(found)

    def retract(self, request: RequestId) -> None:
        """Take a request off the device, if it runs, as where pages run short."""
        found = self._requests.get(request)
        if found is not None and found.row >= 0:
            self._steps.retract(found)
            self._totals.times.pause()

    def status(self, request: RequestId) -> RequestStatus | None:
        """Where a request is; None: it has ended, or there never was one."""
        found = self._requests.get(request)
        return None if found is None else status_of(found, self._running.rows)

    def statuses(self) -> list[RequestStatus]:
        """Of all that have not ended, in the order of submission."""
        return [status_of(request, self._running.rows) for request in self._requests.values()]

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._endings.busy or self._steps or self._progress.busy)

    def flush(self) -> bool:
        """Drop every cached page; False, and nothing done, while a request runs."""
        return self._progress.flush()

    def stats(self) -> EngineStats:
        return stats_of(
            self._totals, self._backlog, self._running, self._cache, self.storage_stats()
        )

    def figures(self) -> DigestInputs:
        """Who waits and runs, and what has just run, for ranks to compare."""
        return {**self._counts(), **self._running.figures()}

    def description(self) -> list[str]:
        """The same, to be read."""
        counts = [f"{name} {n}" for name, n in self._counts().items()]
        return counts + self._running.description() + [str(one) for one in self.statuses()]

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

    def call_storage(self, call: StorageCall) -> Sequence[AttachmentReport]:
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

    def admit(self) -> None:
        """Let in whoever fits, as each step begins: their loads begin, nothing is computed yet."""
        self._steps.admit()

    def step(self) -> list[Output]:
        """Admit, launch what can be computed next, and collect what was launched; returns what is
        new."""
        times = self._totals.times
        times.enter(StepPart.TREE)
        self.admit()
        launched = self._steps.launch()
        collects = self._steps.due(launched=launched)
        if collects:
            self._steps.collect()
        else:
            self._executor.idle()
        times.enter(StepPart.COPIES)
        # Whoever has failed as it was planned has made room for those that wait.
        self._tick(idle=not launched and not collects and not self._endings.answered)
        times.enter(StepPart.SCHEDULE)
        self._steps.poll()
        times.pause()
        return self._endings.take()

    def _tick(self, *, idle: bool) -> None:
        """``idle``: nothing runs. What is queued waits for a copy, for storage or for another
        engine, and without requests all of them only have to end."""
        head = self._backlog.head
        name = None if head is None else head.id
        if idle:
            self._totals.times.pause()  # until there is something to do
        if idle and (self._progress.busy or self._transfers or self._backlog.blocked):
            self._progress.pause(name)
            return
        assert not (idle and self._requests), "requests wait, but for nothing"
        self._progress.tick(name)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Abort what is left, wait for what was launched and for the copies, and at most
        ``timeout_s`` for what storage is to keep. Nobody touches pages of either tier any more."""
        with ExitStack() as rest:  # whatever fails: no thread may be left behind
            rest.callback(self._storage.close, timeout_s)
            rest.callback(self._progress.close, timeout_s)
            rest.callback(self._executor.launched().wait)
            self._endings.close()
