"""Lets waiting requests in: whose turn it is, what it must wait for, and its place in the cache.

Owns which pages running requests are computing for others, and whether somebody waited for the role
at the last look (``waits_for_role``). Torch-free; the cache decides whether a
request fits.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeAlias

from stratakv.cache.admit import AdmissionRequest
from stratakv.cache.kv_cache import KVCache
from stratakv.cache.records import Admission, CacheUse, Refusal
from stratakv.core.ids import PageKey
from stratakv.engine.backlog import Backlog
from stratakv.engine.request import Phase, Request, Signal
from stratakv.engine.roles import Role, Start
from stratakv.engine.running import Running
from stratakv.engine.scheduler import StepLimits, worth_waiting
from stratakv.engine.stats import Totals
from stratakv.engine.transfers import Transfers
from stratakv.policy.checkpoints import last_end

ALONE: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What one request's values may raise. It fails alone, where nothing that others share is harmed:
not so a failed ``assert``, the loss of a rank, or what torch raises."""

Failed: TypeAlias = Callable[[Request, Exception], None]


class Seating:
    def __init__(
        self,
        cache: KVCache,
        backlog: Backlog,
        running: Running,
        role: Role,
        transfers: Transfers,
        totals: Totals,
        limits: StepLimits,
    ) -> None:
        self._cache = cache
        self._backlog = backlog
        self._running = running
        self._role = role
        self._transfers = transfers
        self._totals = totals
        self._look_ahead = limits.look_ahead
        self._page = cache.spec.page_tokens
        self._computing: set[PageKey] = set()
        self.waits_for_role = False

    def admit(self, failed: Failed) -> None:
        """Seat requests whose turn it is, until one does not fit. ``failed`` is told of one that
        cannot be seated; it is not in the backlog then, and may hold a row."""
        held: list[Request] = []
        self.waits_for_role = False
        for _ in range(min(len(self._backlog), self._look_ahead)):
            if not self._running.has_room():
                break
            request = self._backlog.pop()
            try:
                if request.retracted is None or request.retracted.hold is None:
                    request.prefix = request.prefix.trusted(request.known)
                start = self._start(request)
                if start is Start.WAIT:
                    held.append(request)
                    continue
                answer = self._ask(request, start)
                if isinstance(answer, Refusal):
                    held.append(request)
                    break
                self._seat(request, answer, start)
            except ALONE as error:
                failed(request, error)
        self._backlog.put_back(held)

    def put_back(self, request: Request) -> None:
        """One that ran goes to the head of the queue."""
        self._backlog.put_back([request])

    def withdraw(self, request: Request) -> None:
        """One that waits does not any more."""
        self._backlog.remove(request)

    def _ask(self, request: Request, start: Start) -> Admission | Refusal:
        asked = admission_request(request)
        if request.retracted is None:
            return self._cache.admit(replace(asked, receives=start is Start.RECEIVE))
        return self._cache.resume(request.retracted, asked)

    def _start(self, request: Request) -> Start:
        if request.retracted is not None:
            return Start.COMPUTE
        start = self._role.may_start(request)
        self.waits_for_role |= start is Start.WAIT
        if start is Start.WAIT or self._cache.storage.must_wait(request.id):
            return Start.WAIT
        waits = start is Start.COMPUTE and self._is_being_computed(request)
        return Start.WAIT if waits else start

    def _is_being_computed(self, request: Request) -> bool:
        """Whether the first page that it would compute is computed for another one."""
        if not self._computing or CacheUse.READ not in request.prompt.use:
            return False
        limit = last_end(request.prompt_tokens, self._page)
        end = self._cache.match(request.prefix, request.prompt_tokens).end
        return worth_waiting(request.prefix.keys, end, limit, self._computing)

    def _seat(self, request: Request, admission: Admission, start: Start) -> None:
        request.row = admission.row
        if request.phase is Phase.WAITING:
            request.cached = admission.cached
            totals = self._totals
            totals.prompt_tokens += request.prompt_tokens
            totals.cached_device_tokens += admission.cached.device
            totals.cached_host_tokens += admission.cached.host
            totals.cached_storage_tokens += admission.cached.storage
        request.tickets = admission.tickets
        request.retracted = None
        if start is Start.RECEIVE:
            self._transfers.receive(request, admission.computed)
            return
        request.signal(Signal.ADMITTED)
        self._running.seat(request, admission.computed)
        if admission.cached.use is CacheUse.ALL:
            self._computing.update(request.prefix.keys[admission.computed // self._page :])

    def computes_no_more(self, request: Request) -> None:
        """What a request was to compute, which prefilled until now."""
        if request.prompt.use is CacheUse.ALL:  # nobody waits for the pages of the others
            self._computing.difference_update(request.prefix.keys)


def admission_request(request: Request) -> AdmissionRequest:
    """Of one that does not run."""
    return AdmissionRequest(
        prefix=request.prefix,
        tokens=len(request.known),
        total_tokens=request.total_tokens,
        request=request.id,
        priority=request.prompt.priority,
        again=request.phase is Phase.RETRACTED,
        use=request.prompt.use,
    )
