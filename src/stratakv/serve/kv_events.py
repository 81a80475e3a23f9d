"""Publishes KV events over ZeroMQ, as vLLM does, and sends old ones again.

Owns the sockets, the thread that uses them and the batches kept for a replay. A step only appends
to a bounded queue: no subscriber, a slow one or none, ever holds it up. Must not know the tree.

PUB: ``[topic, number, payload]``; the number is 8 bytes, big-endian, one per batch from 0. ROUTER:
who sends ``[b"", number]`` gets ``[b"", topic, number, payload]`` for every batch kept from there
on, then ``[b"", b"", END, b""]``. Batch 0 states that nothing is cached. Numbers that are missing
and that a replay does not bring are lost batches: a subscriber should then forget this server's
pages.
"""

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import zmq

from stratakv.core.clock import Clock
from stratakv.core.errors import ConfigError
from stratakv.serve.kv_wire import Encoder
from stratakv.spec.groups import CacheSpec
from stratakv.tiers.events import AllCleared, CacheEvent, CacheEvents

log = logging.getLogger(__name__)

END: Final = (-1).to_bytes(8, "big", signed=True)
HELD_BY_SUBSCRIBER: Final = 10_000
"""Batches that ZeroMQ keeps for one slow subscriber before it drops some."""
LINGER_MS: Final = 2000
CLOSE_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsOptions:
    """``endpoint`` is bound where it is a wildcard or ipc, else connected to, as vLLM does.
    ``replay`` is bound. ``queue_batches`` wait for the thread; ``kept_batches`` and ``kept_bytes``
    bound what can be sent again."""

    endpoint: str
    replay: str | None = None
    topic: str = ""
    queue_batches: int = 10_000
    kept_batches: int = 10_000
    kept_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherStats:
    """``endpoint``, ``replay``: as they were bound or connected to, "" for none. ``batches``: so
    far, those that were lost too; ``queued`` of them wait for the thread, and ``kept`` can be sent
    again, up to ``newest_kept``. ``running``: whether the thread is."""

    endpoint: str
    replay: str
    batches: int
    queued: int
    kept: int
    newest_kept: int | None
    running: bool


def _nobody_counts() -> None:
    pass


class KvEventPublisher:
    """Takes its endpoints at once, ConfigError where it cannot, and publishes from ``observe`` on.
    All its verbs are for one thread, the engine's. ``on_dropped``: called for every batch that is
    lost because the queue is full."""

    def __init__(
        self,
        options: KvEventsOptions,
        clock: Clock,
        on_dropped: Callable[[], None] = _nobody_counts,
    ) -> None:
        self._options = options
        self._endpoint = self._replay_endpoint = ""
        self._clock = clock
        self._on_dropped = on_dropped
        self._topic = options.topic.encode()
        self._next = 0
        self._queue: deque[tuple[int, float, Sequence[CacheEvent]]] = deque()
        self._kept: deque[tuple[int, bytes]] = deque()  # the thread's own
        self._kept_bytes = 0
        self._closing = False
        self._events: CacheEvents | None = None
        self._thread: threading.Thread | None = None
        self._bell, self._ear = socket.socketpair()
        self._bell.settimeout(0)
        self._ear.settimeout(0)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay = None if options.replay is None else self._context.socket(zmq.ROUTER)
        try:
            self._open()
        except ConfigError:
            self._close_sockets(linger_ms=0)
            raise

    def _open(self) -> None:
        endpoint, replay = self._options.endpoint, self._options.replay
        binds = any(mark in endpoint for mark in ("*", "::", "ipc://"))
        self._pub.set_hwm(HELD_BY_SUBSCRIBER)
        _attach(self._pub, "--kv-events", endpoint, binds=binds)
        self._endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        if binds:
            log.info("KV events: bound to %s; subscribers connect to it", self._endpoint)
        else:
            port = endpoint.rpartition(":")[2]
            log.info(
                "KV events: connected to %s, where a subscriber has to be bound; tcp://*:%s would "
                "be bound here",
                endpoint, port,
            )  # fmt: skip
        if self._replay is not None and replay is not None:
            # A whole replay must fit: what a ROUTER cannot queue, it drops without a word.
            self._replay.set_hwm(self._options.kept_batches + 1)
            _attach(self._replay, "--kv-events-replay", replay, binds=True)
            self._replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    def observe(self, spec: CacheSpec, adapters: Mapping[str, bytes]) -> CacheEvents:
        """Begin to publish what happens to a cache that is still empty; ``adapters``: digests by
        name. The cache is to be given what this returns."""
        assert self._events is None, "one publisher observes one cache"
        self._events = CacheEvents(spec.page_tokens, adapters)
        self._thread = threading.Thread(
            target=self._run, args=(Encoder(spec),), name="stratakv-kv-events", daemon=True
        )
        self._offer([AllCleared()])
        self._thread.start()
        return self._events

    def step_done(self) -> None:
        """Queue what is new as one batch, if anything is. Never blocks."""
        assert self._events is not None, "nothing is observed yet"
        events = self._events.take()
        if events:
            self._offer(events)

    def stats(self) -> PublisherStats:
        kept = self._kept
        return PublisherStats(
            endpoint=self._endpoint,
            replay=self._replay_endpoint,
            batches=self._next,
            queued=len(self._queue),
            kept=len(kept),
            newest_kept=kept[-1][0] if kept else None,
            running=self._thread is not None and self._thread.is_alive(),
        )

    def close(self) -> None:
        """Send what is queued and end the thread."""
        if self._thread is None:
            self._close_sockets(linger_ms=0)
            return
        self._closing = True
        self._ring()
        self._thread.join(CLOSE_S)

    def _offer(self, events: Sequence[CacheEvent]) -> None:
        number, self._next = self._next, self._next + 1  # lost batches leave a gap
        if len(self._queue) >= self._options.queue_batches:
            self._on_dropped()
            return
        self._queue.append((number, self._clock.now_s(), events))
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError):  # rung often enough, or nobody is left to wake
            self._bell.send(b"\0")

    # -- the thread -------------------------------------------------------------------------------

    def _run(self, encoder: Encoder) -> None:
        poller = zmq.Poller()
        poller.register(self._ear, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            closing = False
            while not closing:
                ready = [found for found, _ in poller.poll()]
                closing = self._closing  # what was queued before that is sent below
                if self._ear.fileno() in ready:
                    self._ear.recv(4096)
                self._send(encoder)
                if self._replay is not None and self._replay in ready:
                    self._send_again(self._replay)
        except Exception:
            log.exception("the KV events failed: subscribers get no more of them")
        finally:
            self._close_sockets(linger_ms=LINGER_MS)

    def _send(self, encoder: Encoder) -> None:
        options = self._options
        while self._queue:
            number, wall_s, events = self._queue.popleft()
            payload = encoder.encode(events, wall_s)
            self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
            if self._replay is None:
                continue
            self._kept.append((number, payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > options.kept_batches or self._kept_bytes > options.kept_bytes:
                self._kept_bytes -= len(self._kept.popleft()[1])

    def _send_again(self, replay: "zmq.Socket[bytes]") -> None:
        match replay.recv_multipart():
            case [who, b"", start] if len(start) == 8:
                first = int.from_bytes(start, "big")
                for number, payload in self._kept:
                    if number >= first:
                        frames = (who, b"", self._topic, number.to_bytes(8, "big"), payload)
                        replay.send_multipart(frames)
                replay.send_multipart((who, b"", b"", END, b""))
            case other:
                log.warning(
                    "a replay request has %d frames, not an empty one and 8 bytes", len(other)
                )

    def _close_sockets(self, linger_ms: int) -> None:
        self._context.destroy(linger=linger_ms)
        self._bell.close()
        self._ear.close()


def _attach(end: "zmq.Socket[Any]", flag: str, endpoint: str, *, binds: bool) -> None:
    end.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        if binds:
            end.bind(endpoint)
        else:
            end.connect(endpoint)
    except zmq.ZMQError as error:
        verb = "bound" if binds else "connected to"
        raise ConfigError(
            f"{flag} {endpoint} cannot be {verb}: {error}; allowed is an endpoint that can"
        ) from error
