"""The end of requests: the outputs of their last steps, and when what they held is given back.

Owns the requests that have not ended, outputs that nobody has taken, and the rows of requests that
have ended: a launched step may compute such a row and a transfer may touch its pages, and until
neither does the row stays as it is. Torch-free; must not decide who ends.
"""

import logging

from stratakv.cache.kv_cache import KVCache
from stratakv.cache.records import CacheUse
from stratakv.core.ids import RequestId
from stratakv.engine.admission_scheduler import AdmissionScheduler, admission_request
from stratakv.engine.backlog import Backlog
from stratakv.engine.hand_off import Transfers
from stratakv.engine.request import Failure, FinishReason, Output, Phase, Request, Signal
from stratakv.engine.roles import Role
from stratakv.engine.running import Running
from stratakv.engine.stats import Totals
from stratakv.tiers.prefetch.request import ignored

log = logging.getLogger(__name__)


class Endings:
    def __init__(
        self,
        cache: KVCache,
        backlog: Backlog,
        running: Running,
        admissions: AdmissionScheduler,
        transfers: Transfers,
        role: Role,
        totals: Totals,
    ) -> None:
        self.requests: dict[RequestId, Request] = {}
        self._cache = cache
        self._backlog = backlog
        self._running = running
        self._admissions = admissions
        self._transfers = transfers
        self._role = role
        self._totals = totals
        self._outputs: list[Output] = []
        self._leaving: dict[int, bool] = {}  # rows, and whether what they have computed is kept

    @property
    def busy(self) -> bool:
        """Whether anything is left to report or to give back."""
        return bool(self._outputs or self._leaving)

    @property
    def answered(self) -> bool:
        """Whether anything is left to report."""
        return bool(self._outputs)

    def emit(self, outputs: list[Output]) -> None:
        self._outputs += outputs

    def take(self) -> list[Output]:
        """What is new; given once."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # -- ending ----------------------------------------------------------------------------------

    def abort(self, request: Request) -> None:
        if request.row < 0:
            self._backlog.remove(request)
        if request.retracted is not None:
            self._cache.retraction.forget(request.retracted)
        if request.phase is Phase.WAITING:
            self._cache.admission.abandon(admission_request(request))
        request.signal(Signal.ABORT)
        self._leave(request, keep=not self._transfers.receives(request))
        self.emit([Output(request=request.id, token=None, finish=FinishReason.ABORT)])

    def finish(self, request: Request, signal: Signal) -> None:
        """It has its last token, or another engine generates the rest."""
        request.signal(signal)
        self._leave(request, keep=True)

    def fail(self, request: Request, failure: Failure, reason: str = "") -> None:
        """End a request that is not in the backlog; nothing is kept but what the tree has.
        ``reason``: for its client."""
        if request.retracted is not None:
            self._cache.retraction.forget(request.retracted)
        reads = CacheUse.READ in request.prompt.use
        if request.row < 0 and request.phase is Phase.WAITING and reads:
            self._cache.storage.prefetcher.forget(request.id, ignored)
        request.signal(Signal.ABORT)
        self._leave(request, keep=False)
        self.emit_failure(request.id, failure, reason)

    def alone(self, request: Request, doing: str, error: Exception) -> None:
        """``error`` came while one request was admitted or planned: the others go on, unless what
        they share was harmed. AssertionError if it was."""
        log.error("request %s failed while it was %s", request.id, doing, exc_info=error)
        self.fail(request, Failure.INTERNAL)
        self._cache.check()

    def emit_failure(self, request: RequestId, failure: Failure, reason: str = "") -> None:
        self._totals.failures[failure] += 1
        error = FinishReason.ERROR
        self.emit([
            Output(request=request, token=None, finish=error, failure=failure, reason=reason)
        ])  # fmt: skip

    # -- giving back -----------------------------------------------------------------------------

    def _leave(self, request: Request, *, keep: bool) -> None:
        del self.requests[request.id]
        self._role.left(request.prompt)
        if request.row < 0:
            return
        self.stop(request)
        self._leaving[request.row] = keep
        self.settle()

    def stop(self, request: Request) -> None:
        """Compute no more of it."""
        if request in self._running.prefilling:
            self._admissions.computes_no_more(request)
        self._running.stop(request)

    def has_left(self, row: int) -> bool:
        """Whether the row's request has ended, and the row is still computed or touched."""
        return row in self._leaving

    def left(self) -> list[int]:
        """All such rows."""
        return list(self._leaving)

    def spoiled(self) -> list[int]:
        """Those of which nothing is to be kept."""
        return [row for row, keep in self._leaving.items() if not keep]

    def spoil(self, row: int) -> None:
        """What a request that has ended has computed since is not to be kept."""
        self._leaving[row] = False

    def settle(self) -> None:
        """Give back the rows that nothing computes or touches any more."""
        rows = self._running.rows
        for row in [row for row in self._leaving if not rows.in_flight[row]]:
            if self._transfers.touch(row):
                continue
            if self._leaving.pop(row):
                self._cache.release(row, rows.computed_tokens(row))
            else:
                self._cache.drop(row)

    def close(self) -> None:
        """Abort all. Of a row that a step computes, which nobody will collect, nothing is kept: its
        state is ahead of its tokens."""
        for request in list(self.requests.values()):
            self.abort(request)
        rows = self._running.rows
        for row in list(self._leaving):
            del self._leaving[row]
            self._cache.release(row, rows.computed_tokens(row)[:0])
