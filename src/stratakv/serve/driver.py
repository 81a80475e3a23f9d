"""The engine's thread and the bridge between it and the event loops of clients.

Owns the thread, the inbox into it and the routes out of it. Only this thread calls the engine.
Nothing here waits for a client: a subscription holds at most what its requests may produce.
Must not know of HTTP, text or JSON.

Lock order: there is one lock, ``_wake``; nothing is called under it but ``has_work``.
"""

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final, Generic, TypeAlias, TypeVar, assert_never

from stratakv.core.clock import Clock
from stratakv.core.errors import RankLostError, RequestError
from stratakv.core.ids import RequestId
from stratakv.engine.request import FinishReason, Output, Prompt
from stratakv.engine.stats import EngineStats
from stratakv.serve.engine_protocols import EnginePort, PublisherPort
from stratakv.serve.errors import (
    ApiError,
    engine_failed,
    overloaded,
    refused,
    shut_down,
    unavailable,
)
from stratakv.serve.subscription import (
    Accepted,
    Refused,
    Subscription,
    SubscriptionEvent,
    TimedOutput,
)

log = logging.getLogger(__name__)
T = TypeVar("T")


class Health(Enum):
    """READY alone takes requests. FAILED is for ever."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, eq=False)
class _Submit:
    subscription: Subscription


@dataclass(frozen=True, slots=True)
class _Abort:
    requests: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class _AbortAll:
    pass


@dataclass(frozen=True, slots=True, eq=False)
class _Ask(Generic[T]):
    """Something to do on the engine's thread, between two steps."""

    work: Callable[[], T]
    answer: "Future[T]"


@dataclass(frozen=True, slots=True, eq=False)
class _AskLater(Generic[T]):
    """The same of something that a later step answers."""

    work: Callable[[], "Future[T]"]
    answer: "Future[T]"


_Command: TypeAlias = _Submit | _Abort | _AbortAll | _Ask[Any] | _AskLater[Any]
_Loop: TypeAlias = asyncio.AbstractEventLoop


class EngineDriver:
    """Runs ``engine`` on a thread of its own, from ``start`` to ``stop``.

    ``max_waiting`` bounds the requests that are queued for their first token. ``publisher`` is
    notified of every turn, and of the end. ``heartbeat_s``: an engine without work is stepped that
    often, so that ranks that wait for it know that it lives, and it that they do.
    """

    def __init__(
        self,
        engine: EnginePort,
        *,
        max_waiting: int,
        clock: Clock,
        publisher: PublisherPort | None = None,
        heartbeat_s: float | None = None,
    ) -> None:
        self._engine = engine
        self._heartbeat_s = heartbeat_s
        self._publisher = publisher
        self._clock = clock
        self.max_waiting: Final = max_waiting
        self._wake = threading.Condition()
        self._health = Health.STARTING
        self._inbox: deque[_Command] = deque()
        self._open: set[Subscription] = set()
        self._waiting: set[RequestId] = set()
        # The engine thread's own:
        self._taken: deque[_Command] = deque()
        self._later: list[Future[Any]] = []  # of which some have been answered
        self._routes: dict[RequestId, Subscription] = {}
        self._mail: defaultdict[_Loop, list[tuple[Subscription, SubscriptionEvent]]] = defaultdict(
            list
        )
        self._thread = threading.Thread(target=self._run, name="stratakv-engine", daemon=True)

    @property
    def health(self) -> Health:
        return self._health

    @property
    def open_requests(self) -> int:
        """Client requests that are not answered to the end."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Prompts without a first token."""
        return len(self._waiting)

    @property
    def open_prompts(self) -> int:
        """Prompts of open requests; one that has ended counts until its request has."""
        with self._wake:
            return sum(len(subscription.prompts) for subscription in self._open)

    def start(self) -> None:
        with self._wake:
            if self._health is Health.STARTING:
                self._health = Health.READY
        self._thread.start()

    def subscribe(self, prompts: tuple[Prompt, ...]) -> Subscription:
        """Queue prompts of one client, all or none; called on the client's event loop.

        Raises ApiError (503) when too many wait or the engine takes no requests. The subscription
        is a context manager; leaving it aborts what is unfinished.
        """
        subscription = Subscription(prompts, asyncio.get_running_loop(), self._release)
        with self._wake:
            if self._health is not Health.READY:
                raise unavailable(self._health.value)
            if len(self._waiting) + len(prompts) > self.max_waiting:
                raise overloaded(len(self._waiting), self.max_waiting)
            self._open.add(subscription)
            self._waiting.update(subscription.ids)
            self._inbox.append(_Submit(subscription))
            self._wake.notify()
        return subscription

    async def flush(self) -> bool:
        """Drop every cached page; False while requests are running."""
        return await asyncio.wrap_future(self.ask(self._engine.flush))

    async def stats(self) -> EngineStats:
        """The engine's figures after the step that is running now."""
        return await asyncio.wrap_future(self.ask(self._engine.stats))

    def ask(self, work: Callable[[], T]) -> "Future[T]":
        """Call ``work`` on the engine's thread, after the step that is running; from any thread.

        It must not block, and what it raises ends the engine's life. The future fails with ApiError
        where the engine ended before; ApiError (503) at once where it has.
        """
        answer: Future[T] = Future()
        self._put(_Ask(work, answer))
        return answer

    def ask_later(self, work: "Callable[[], Future[T]]") -> "Future[T]":
        """As ``ask``, of what a later step answers, or whoever else: where the engine ends before,
        the future fails then. What ``work`` returns never raises."""
        answer: Future[T] = Future()
        self._put(_AskLater(work, answer))
        return answer

    def _put(self, command: _Command) -> None:
        with self._wake:
            if self._health not in {Health.READY, Health.DRAINING}:
                raise unavailable(self._health.value)
            self._inbox.append(command)
            self._wake.notify()

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        with self._wake:
            if self._health in {Health.STARTING, Health.READY}:
                self._health = Health.DRAINING

    def abort_all(self) -> None:
        """End every running request with ABORT."""
        with self._wake:
            self._inbox.append(_AbortAll())
            self._wake.notify()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the running step; False if that took longer than ``timeout_s``."""
        with self._wake:
            if self._health is not Health.FAILED:
                self._health = Health.STOPPED
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _release(self, subscription: Subscription, unfinished: tuple[RequestId, ...]) -> None:
        with self._wake:
            self._waiting.difference_update(unfinished)
            if subscription.closed:
                self._open.discard(subscription)
            if unfinished:
                self._inbox.append(_Abort(unfinished))
                self._wake.notify()

    # -- the engine thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except RankLostError as error:  # the environment's: a traceback would say nothing more
            log.error("the engine has ended: %s", error)
            self._end(Health.FAILED, engine_failed())
        except BaseException:  # whatever it was: no client may wait for a dead thread
            log.exception("the engine failed")
            self._end(Health.FAILED, engine_failed())
        else:
            self._end(Health.STOPPED, shut_down())
        if self._publisher is not None:
            self._publisher.close()

    def _turn(self) -> bool:
        with self._wake:
            due = self._wake.wait_for(self._called, self._heartbeat_s)
            if self._health is Health.STOPPED:
                return False
            self._taken.extend(self._inbox)
            self._inbox.clear()
        while self._taken:
            self._apply(self._taken[0])
            self._taken.popleft()  # only now: who asked gets the error, should the engine die of it
        self._send_mail()
        if self._engine.has_work() or not due:
            self._fan_out(self._engine.step())
            self._send_mail()
        if self._publisher is not None:
            self._publisher.step_done()
        return True

    def _called(self) -> bool:
        """Whether there is anything to do."""
        if self._health is Health.STOPPED:
            return True
        return bool(self._inbox) or self._engine.has_work()

    def _apply(self, command: _Command) -> None:
        match command:
            case _Submit(subscription):
                self._submit(subscription)
            case _Abort(requests):
                for request in requests:
                    if self._routes.pop(request, None) is not None:
                        self._engine.abort(request)
            case _AbortAll():
                self._abort_every_request()
            case _Ask(work, answer):
                if answer.set_running_or_notify_cancel():
                    answer.set_result(work())
            case _AskLater(work, answer):
                if answer.set_running_or_notify_cancel():
                    later = work()
                    self._later = [one for one in self._later if not one.done()] + [answer]
                    later.add_done_callback(partial(_pass_on, answer))
            case _:
                assert_never(command)

    def _abort_every_request(self) -> None:
        now_s = self._clock.now_s()
        for request, subscription in self._routes.items():
            self._engine.abort(request)
            ended = Output(request=request, token=None, finish=FinishReason.ABORT)
            self._post(subscription, TimedOutput(now_s, ended))
        self._routes.clear()

    def _submit(self, subscription: Subscription) -> None:
        taken: list[RequestId] = []
        try:
            for prompt in subscription.prompts:
                self._engine.submit(prompt)
                taken.append(prompt.id)
        except RequestError as error:
            for request in taken:
                self._engine.abort(request)
            self._post(subscription, Refused(refused(str(error))))
            return
        self._routes.update(dict.fromkeys(taken, subscription))
        self._post(subscription, Accepted())

    def _fan_out(self, outputs: Sequence[Output]) -> None:
        now_s = self._clock.now_s()
        for output in outputs:
            subscription = self._routes.get(output.request)
            if subscription is None:
                continue  # aborted while the step ran
            self._post(subscription, TimedOutput(now_s, output))
            if output.finish is not None:
                del self._routes[output.request]
        with self._wake:
            self._waiting.difference_update([output.request for output in outputs])

    def _post(self, subscription: Subscription, event: SubscriptionEvent) -> None:
        self._mail[subscription.loop].append((subscription, event))

    def _send_mail(self) -> None:
        """Wake each event loop once, however many requests have outputs."""
        for loop, posted in self._mail.items():
            try:
                loop.call_soon_threadsafe(_deliver, posted)
            except RuntimeError:  # the loop is closed: its clients are gone
                for subscription in {subscription for subscription, _ in posted}:
                    subscription.close()
                    self._release(subscription, subscription.ids)
        self._mail.clear()

    def _end(self, health: Health, error: ApiError) -> None:
        """Notify everyone who waits; nothing can be queued afterwards."""
        with self._wake:
            self._health = health
            self._taken.extend(self._inbox)
            self._inbox.clear()
            subscriptions = tuple(self._open)
        for subscription in subscriptions:
            self._post(subscription, Refused(error))
        self._send_mail()
        for answer in self._later:
            with suppress(InvalidStateError):  # it has come
                answer.set_exception(error)
        while self._taken:
            match self._taken.popleft():
                case _Ask(answer=answer) | _AskLater(answer=answer):
                    _refuse(answer, error)
                case _Submit() | _Abort() | _AbortAll():
                    pass  # every open subscription was notified above


def _deliver(posted: list[tuple[Subscription, SubscriptionEvent]]) -> None:
    for subscription, event in posted:
        subscription.push(event)


def _pass_on(answer: "Future[T]", later: "Future[T]") -> None:
    with suppress(InvalidStateError):  # the engine has ended, which was the answer
        answer.set_result(later.result())


def _refuse(waiting: "Future[Any]", error: ApiError) -> None:
    # One whose work killed the engine is running already.
    if waiting.running() or waiting.set_running_or_notify_cancel():
        waiting.set_exception(error)
