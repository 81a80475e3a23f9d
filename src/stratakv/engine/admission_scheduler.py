"""Lets waiting requests in: whose turn it is, what it must wait for, and its place in the cache.

Owns which pages running requests are computing for others. Torch-free; the cache decides whether a
request fits.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeAlias

from stratakv.cache.kv_cache import KVCache
from stratakv.cache.prices import AdmissionRequest
from stratakv.cache.records import Admission, CacheUse, Refusal
from stratakv.core.ids import PageKey
from stratakv.engine.backlog import Backlog
from stratakv.engine.hand_off import Transfers
from stratakv.engine.request import Phase, Request, Signal
from stratakv.engine.roles import Role, Start
from stratakv.engine.running import Running
from stratakv.engine.scheduler import StepLimits, worth_waiting
from stratakv.engine.stats import Totals
from stratakv.policy.checkpoints import last_end

REQUEST_FAULTS: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What one request's values may raise. It fails alone, where nothing that others share is harmed:
not so a failed ``assert``, the loss of a rank, or what torch raises."""

OnFailed: TypeAlias = Callable[[Request, Exception], None]


class AdmissionScheduler:
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
        self._admission = cache.admission
        self._prefetcher = cache.storage.prefetcher
        self.backlog = backlog
        self._running = running
        self._role = role
        self._transfers = transfers
        self._totals = totals
        self._look_ahead = limits.look_ahead
        self._page = cache.spec.page_tokens
        self._computing: set[PageKey] = set()

    def admit(self, failed: OnFailed) -> None:
        """Admit requests whose turn it is, until one does not fit. ``failed`` is called for one
        that cannot be admitted; it is not in the backlog then, and may hold a row."""
        held: list[Request] = []
        looks = self._look_ahead
        while self.backlog.ready and looks and self._running.has_room():
            request = self.backlog.pop()
            try:
                if not _is_saved(request):
                    request.trust()
                start = Start.COMPUTE if _is_saved(request) else self._role.may_start(request)
                if start is Start.WAIT:  # who waits for another engine holds up nobody
                    self.backlog.block(request)
                    continue
                looks -= 1
                if self._waits_here(request, start):
                    held.append(request)
                    continue
                answer = self._ask(request, start)
                if answer is Refusal.GAVE_UP:  # it may be another one's to compute now
                    self.backlog.put_back([request])
                    looks += 1
                    continue
                if isinstance(answer, Refusal):
                    held.append(request)
                    break
                self._place(request, answer, start)
            except REQUEST_FAULTS as error:
                failed(request, error)
        self.backlog.put_back(held)

    def _ask(self, request: Request, start: Start) -> Admission | Refusal:
        asked = admission_request(request)
        asked = replace(asked, receives=start is Start.RECEIVE, ahead=self._ahead(request))
        if request.retracted is None:
            return self._admission.admit(asked)
        return self._admission.resume(request.retracted, asked)

    def _ahead(self, request: Request) -> tuple[AdmissionRequest, ...]:
        """Those that were retracted, wait for the role, and come before ``request``."""
        return tuple(
            replace(admission_request(one), receives=True)
            for one in self.backlog.blocked_retracted
            if request.phase is not Phase.RETRACTED or one.serial < request.serial
        )

    def _waits_here(self, request: Request, start: Start) -> bool:
        """Whether it waits for something of this engine's."""
        if request.retracted is not None:
            return False
        if self._prefetcher.must_wait(request.id):
            return True
        return start is Start.COMPUTE and self._is_being_computed(request)

    def _is_being_computed(self, request: Request) -> bool:
        """Whether the first page that it would compute is computed for another one."""
        if not self._computing or CacheUse.READ not in request.prompt.use:
            return False
        limit = last_end(request.prompt_tokens, self._page)
        end = self._admission.match(request.prefix, request.prompt_tokens).end
        return worth_waiting(request.prefix.keys, end, limit, self._computing)

    def _place(self, request: Request, admission: Admission, start: Start) -> None:
        cached = admission.cached
        request.admit(admission.row, admission.tickets, cached)
        if request.phase is Phase.WAITING:
            self._totals.add(
                prompt_tokens=request.prompt_tokens,
                cached_device_tokens=cached.device,
                cached_host_tokens=cached.host,
                cached_storage_tokens=cached.storage,
            )
        if start is Start.RECEIVE:
            self._transfers.receive(request, admission.computed)
            return
        request.signal(Signal.ADMITTED)
        self._running.prefill(request, admission.computed)
        if cached.use is CacheUse.ALL:
            self._computing.update(request.prefix.keys[admission.computed // self._page :])

    def computes_no_more(self, request: Request) -> None:
        """What a request was to compute, which prefilled until now."""
        if request.prompt.use is CacheUse.ALL:  # nobody waits for the pages of the others
            self._computing.difference_update(request.prefix.keys)


def _is_saved(request: Request) -> bool:
    """Whether the host holds all that a retracted request needs."""
    return request.retracted is not None and request.retracted.hold is not None


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
