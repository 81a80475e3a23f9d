"""Lets waiting requests in: whose turn it is, what it must wait for, and its place in the cache.

Owns which pages running requests are computing for others. Torch-free; the cache decides whether a
request fits.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

from stratakv.cache.admit import AdmissionRequest
from stratakv.cache.kv_cache import KVCache
from stratakv.cache.records import Admission, CacheUse, Refusal
from stratakv.core.ids import PageKey
from stratakv.engine.backlog import Backlog
from stratakv.engine.request import Phase, Request, Signal
from stratakv.engine.roles import Role
from stratakv.engine.running import Running
from stratakv.engine.scheduler import StepLimits, worth_waiting
from stratakv.engine.stats import Totals
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
        totals: Totals,
        limits: StepLimits,
    ) -> None:
        self._cache = cache
        self._backlog = backlog
        self._running = running
        self._role = role
        self._totals = totals
        self._look_ahead = limits.look_ahead
        self._page = cache.spec.page_tokens
        self._computing: set[PageKey] = set()

    def admit(self, failed: Failed) -> None:
        """Seat requests whose turn it is, until one does not fit. ``failed`` is told of one that
        cannot be seated; it is not in the backlog then, and may hold a row."""
        held: list[Request] = []
        for _ in range(min(len(self._backlog), self._look_ahead)):
            if not self._running.has_room():
                break
            request = self._backlog.pop()
            try:
                if request.retracted is None or request.retracted.hold is None:
                    request.prefix = request.prefix.trusted(request.known)
                if self._must_wait(request):
                    held.append(request)
                    continue
                answer = self._ask(request)
                if isinstance(answer, Refusal):
                    held.append(request)
                    break
                self._seat(request, answer)
            except ALONE as error:
                failed(request, error)
        self._backlog.put_back(held)

    def _ask(self, request: Request) -> Admission | Refusal:
        asked = admission_request(request)
        if request.retracted is None:
            return self._cache.admit(asked)
        return self._cache.resume(request.retracted, asked)

    def _must_wait(self, request: Request) -> bool:
        if request.retracted is not None:
            return False
        if not self._role.may_start(request) or self._cache.storage.must_wait(request.id):
            return True
        if not self._computing or CacheUse.READ not in request.prompt.use:
            return False
        limit = last_end(request.prompt_tokens, self._page)
        end = self._cache.match(request.prefix, request.prompt_tokens).end
        return worth_waiting(request.prefix.keys, end, limit, self._computing)

    def _seat(self, request: Request, admission: Admission) -> None:
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
