"""One engine on several ranks: rank 0 says what happens, and every rank does it at the same point.

Owns what the letter of a step asks for (``step_messages``), which is done when the step is over.
Must not decide anything that ``loop`` decides, nor look at a follower.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, assert_never

from stratakv.agreement.torch_ranks import is_loss, loss_told
from stratakv.core.errors import RankLostError, RequestError
from stratakv.core.ids import RequestId
from stratakv.engine.attaching import Attaching, Openable, Opener, Report, no_store
from stratakv.engine.loop import Engine
from stratakv.engine.request import Output, Prompt
from stratakv.engine.stats import EngineStats
from stratakv.engine.step_messages import (
    Abort,
    Attach,
    Attachment,
    CallOff,
    Clear,
    Command,
    Detach,
    Flush,
    Inquire,
    Keep,
    Prepare,
    StepSync,
    Stop,
    Submit,
)
from stratakv.storage.io_worker import IoWorker
from stratakv.tiers.statistics import StorageStats

CLOSE_S: Final = 10.0
Done: TypeAlias = bool | IoWorker | None


class RankedEngine:
    """An engine whose twins on other ranks do as it does. Rank 0 has the clients and calls all
    verbs; the others call ``follow``. ``opener``: opens this rank's end of a store."""

    def __init__(self, engine: Engine, sync: StepSync, opener: Opener = no_store) -> None:
        sync.watch("requests", engine.figures, engine.told)
        self._engine = engine
        self._sync = sync
        self._queued: set[RequestId] = set()
        self._news: list[Output] = []
        self._done: Done = None
        self._attaching = Attaching(opener)
        self._reports: tuple[Report, ...] = ()
        self._taken: IoWorker | None = None
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
        self._sync.outbox.append(Abort(request))

    def has_work(self) -> bool:
        return bool(self._sync.outbox or self._news) or self._engine.has_work()

    def step(self) -> list[Output]:
        """A step of all ranks, and then what the letter in it asks for. Whatever it raises, this
        rank meets the others no more, and may still be closed."""
        try:
            news = self._news + self._engine.step()
            self._news = []
            for command in self._sync.take():
                self._apply(command)
        except BaseException as error:
            self._stop()
            if is_loss(error):
                told = loss_told(error)
                raise RankLostError(f"a rank was lost in a step of the model: {told}") from error
            raise
        return news

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def check(self) -> None:
        self._engine.check()

    # -- what is asked between two steps ---------------------------------------------------------

    def flush(self) -> bool:
        """Drop every cached page; False, and nothing done, while a request runs."""
        return bool(self._now(Flush()))

    def prepare_storage(self, url: str) -> None:
        """Have every rank begin to open a store; none waits for it."""
        self._now(Prepare(url))

    def storage_reports(self) -> Sequence[Report]:
        """How far that is, by rank."""
        self._now(Inquire())
        return self._reports

    def take_storage(self) -> Openable:
        """What rank 0 has opened, to be attached or closed. Only where all have reported OPEN."""
        store = self._attaching.take()
        self._taken = store.worker
        return store

    def attach_storage(self, worker: IoWorker) -> None:
        """Use the store from now on, on every rank. ``worker``: of what was taken."""
        assert worker is self._taken, "a store that other ranks have not opened"
        self._now(Attach())

    def call_off_storage(self) -> None:
        """Have every rank close what it has opened or will, but for what was taken."""
        self._now(CallOff())

    def detach_storage(self, *, force: bool = False) -> IoWorker | None:
        worker = self._now(Detach(force))
        assert worker is None or isinstance(worker, IoWorker)
        return worker

    def keep_storage(self) -> None:
        self._now(Keep())

    def clear_storage(self) -> bool:
        return bool(self._now(Clear()))

    def storage_stats(self) -> StorageStats | None:
        return self._engine.storage_stats()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """End all ranks, if they have not ended of themselves."""
        try:
            if not self._stopped:
                self._now(Stop())
        finally:
            self._attaching.call_off()
            self._engine.close(timeout_s)

    def _stop(self) -> None:
        self._stopped = True
        self._sync.part()

    def _now(self, command: Command) -> Done:
        """Have all ranks do it in a step of its own; what came of it here."""
        self._done = None
        self._sync.outbox.append(command)
        self._news = self.step()
        return self._done

    # -- every rank ------------------------------------------------------------------------------

    def follow(self, detached: Callable[[IoWorker], None], timeout_s: float = CLOSE_S) -> None:
        """Do as rank 0 does, until it stops; ``detached`` gets a store that is used no more.
        RankLostError where a rank does not come; what is queued for storage has its time either
        way."""
        try:
            while not self._stopped:
                self.step()
                if isinstance(self._done, IoWorker):
                    detached(self._done)
                    self._done = None
        finally:
            self._attaching.call_off()
            self._engine.close(timeout_s)

    def _apply(self, command: Command) -> None:
        match command:
            case Submit(prompt):
                self._queued.discard(prompt.id)
                self._engine.submit(prompt)
            case Abort(request):
                self._engine.abort(request)
            case Flush():
                self._done = self._engine.flush()
            case Prepare() | Inquire() | Attach() | CallOff():
                self._attach(command)
            case Detach(force):
                self._done = self._engine.detach_storage(force=force)
            case Keep():
                self._engine.keep_storage()
            case Clear():
                self._done = self._engine.clear_storage()
            case Stop():
                self._stop()
            case _:
                assert_never(command)

    def _attach(self, command: Attachment) -> None:
        match command:
            case Prepare(url):
                self._attaching.prepare(url)
            case Inquire():
                said = self._sync.gather(self._attaching.report().pack())
                self._reports = tuple(map(Report.unpack, said))
            case Attach():
                taken, self._taken = self._taken, None
                worker = self._attaching.take().worker if taken is None else taken
                self._engine.attach_storage(worker)
            case CallOff():
                self._attaching.call_off()
            case _:
                assert_never(command)
