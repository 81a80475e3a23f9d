"""One engine on several ranks: rank 0 decides, and every rank does it at the same point.

Owns what the message of a step asks for (``step_messages``), which is done when the step is over.
Must not decide anything that ``loop`` decides, nor look at a follower.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final, assert_never

from stratakv.agreement.ranks import nothing
from stratakv.agreement.torch_ranks import is_loss, loss_description
from stratakv.core.errors import RankLostError, RequestError
from stratakv.core.ids import RequestId
from stratakv.engine.attachment import AttachmentReport, StorageCall, Verb
from stratakv.engine.loop import Engine
from stratakv.engine.ranks.peer_calls import PeerCall
from stratakv.engine.ranks.step_messages import AbortRequest, Command, Flush, StepSync, Stop, Submit
from stratakv.engine.request import Output, Prompt
from stratakv.engine.stats import EngineStats
from stratakv.engine.storage_control import Openable
from stratakv.tiers.statistics import StorageStats

CLOSE_S: Final = 10.0


class RankedEngine:
    """An engine whose twins on other ranks do as it does. Rank 0 has the clients and calls all
    verbs; the others call ``follow``."""

    def __init__(self, engine: Engine, sync: StepSync) -> None:
        self._engine = engine
        self._sync = sync
        self._queued: set[RequestId] = set()
        self._outputs: list[Output] = []
        self._flushed = False
        self._reports: tuple[AttachmentReport, ...] = ()
        self._stopped = False

    # -- requests --------------------------------------------------------------------------------

    def submit(self, prompt: Prompt) -> None:
        """RequestError if it could never be served, which every rank would find."""
        if prompt.id in self._queued:
            raise RequestError(f"request {prompt.id} exists already")
        self._engine.checked(prompt)
        self._queued.add(prompt.id)
        self._sync.outbox.append(Submit(prompt))

    def abort(self, request: RequestId) -> None:
        self._sync.outbox.append(AbortRequest(request))

    def has_work(self) -> bool:
        return bool(self._sync.outbox or self._outputs) or self._engine.has_work()

    def step(self) -> list[Output]:
        """A step of all ranks, and then what the message in it asks for. Whatever it raises, this
        rank meets the others no more, and may still be closed."""
        try:
            outputs = self._outputs + self._engine.step()
            self._outputs = []
            for command in self._sync.take():
                self.apply(command)
        except BaseException as error:
            self._stop()
            if is_loss(error):
                why = loss_description(error)
                raise RankLostError(f"a rank was lost in a step of the model: {why}") from error
            raise
        return outputs

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def check(self) -> None:
        self._engine.check()

    # -- what is asked between two steps ---------------------------------------------------------

    def flush(self) -> bool:
        """Drop every cached page; False, and nothing done, while a request runs."""
        self._now(Flush())
        return self._flushed

    @property
    def beside_steps(self) -> frozenset[Verb]:
        """No call: each one is a step of all ranks."""
        return frozenset()

    def call_storage(self, call: StorageCall) -> Sequence[AttachmentReport]:
        """Have every rank do it, in one step; what has come of it on each."""
        self._now(call)
        return self._reports

    @property
    def store(self) -> Openable | None:
        """What a call has attached here."""
        return self._engine.store

    def storage_stats(self) -> StorageStats | None:
        return self._engine.storage_stats()

    def close(self, timeout_s: float = CLOSE_S, stopped: Callable[[], None] = nothing) -> None:
        """End all ranks, if they have not ended of themselves. ``stopped``: called when no rank
        steps any more, before anything is given back."""
        with ExitStack() as rest:
            rest.callback(self._engine.close, timeout_s)
            rest.callback(stopped)
            if not self._stopped:
                self._now(Stop())

    def _stop(self) -> None:
        self._stopped = True
        self._sync.part()

    def _now(self, command: Command) -> None:
        """Have all ranks do it in a step of its own."""
        self._sync.outbox.append(command)
        self._outputs = self.step()

    # -- every rank ------------------------------------------------------------------------------

    def follow(self, timeout_s: float = CLOSE_S, stopped: Callable[[], None] = nothing) -> None:
        """Do as rank 0 does, until it stops. RankLostError where a rank does not come; what is
        queued for storage has its time either way. ``stopped``: as in ``close``."""
        with ExitStack() as rest:
            rest.callback(self._engine.close, timeout_s)
            rest.callback(stopped)
            while not self._stopped:
                self.step()

    def apply(self, command: Command) -> None:
        """What one step's message asks of this rank."""
        match command:
            case Submit(prompt):
                self._queued.discard(prompt.id)
                self._engine.submit(prompt)
            case AbortRequest(request):
                self._engine.abort(request)
            case Flush():
                self._flushed = self._engine.flush()
            case StorageCall():
                (report,) = self._engine.call_storage(command)
                self._reports = tuple(
                    map(AttachmentReport.unpack, self._sync.gather(report.pack()))
                )
            case PeerCall():
                self._sync.call_peers(command)
            case Stop():
                self._stop()
            case _:
                assert_never(command)
