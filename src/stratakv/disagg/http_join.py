"""Brings introductions over HTTP to the port where a prefill server is joined.

Owns the threads that wait for its answers, and how long a call may take: a client names the host,
so it may be one that never answers, or no prefill server at all. What such a one says is not told
to the client, who may not be able to ask it. Must not know what an introduction says.
"""

import http.client
import json
import logging
import socket
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from threading import BoundedSemaphore, Thread, Timer
from typing import Final

from stratakv.core.clock import MonotonicClock
from stratakv.core.errors import TransportError
from stratakv.disagg.deadlines import bounded
from stratakv.disagg.joining import (
    JOIN_BYTES,
    JoinAnswer,
    JoinRefused,
    decode_answer,
    encode_call,
)
from stratakv.disagg.peer_limits import MOST_PEERS, REASON_CHARS
from stratakv.disagg.resolver import Resolver, start
from stratakv.disagg.transport import PeerId

log = logging.getLogger(__name__)

JOIN_PATH: Final = "/disagg/join"
JOIN_MARK: Final = "X-Stratakv-Join"
"""A header of all that a server of ours answers there: what is without it is another service's."""
_LOGGED_BYTES: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """``deadline_s``: of a whole call; ``connect_s``: of one address of its host. ``at_once``: as
    many calls as there may be peers, so that none waits for others that never answer; one more is
    refused."""

    deadline_s: float = 30.0
    connect_s: float = 5.0
    at_once: int = MOST_PEERS


DEFAULT_CALLS: Final = CallLimits()


class HttpCarry:
    """``name``: of this side, for its peers. Each is told under which address of its own it was
    found too: a server of several (``localhost``, a name of the network's) is a peer for each of
    them, on both sides, with a link of its own. ``api_key``: what they may ask for; whom it is
    named to is for those to decide who ask (``serve/prefill_hosts``)."""

    def __init__(
        self, name: PeerId, api_key: str | None, limits: CallLimits = DEFAULT_CALLS
    ) -> None:
        self._name, self._limits = name, limits
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._free = BoundedSemaphore(limits.at_once)
        self._resolver = Resolver(limits.at_once)

    def __call__(self, peer: PeerId, introductions: Sequence[bytes]) -> "Future[JoinAnswer]":
        body = encode_call(PeerId(bounded(f"{self._name} by {peer}")), introductions)
        answer: Future[JoinAnswer] = Future()
        if not self._free.acquire(blocking=False):
            answer.set_result(_unasked(peer, f"{self._limits.at_once} others are being asked"))
            return answer
        try:
            asked = peer, body, answer
            start(Thread(target=self._ask, args=asked, name="stratakv-join", daemon=True))
        except OSError as error:
            self._free.release()
            answer.set_result(_unasked(peer, str(error)))
        return answer

    def _ask(self, peer: PeerId, body: bytes, answer: "Future[JoinAnswer]") -> None:
        try:
            found = self._asked(peer, body)
        except Exception:  # who waits takes the answer in a step of its engine
            log.exception("%s was not asked", peer)
            found = _unasked(peer, "this server failed; its log has the details")
        self._free.release()
        answer.set_result(found)

    def _asked(self, peer: PeerId, body: bytes) -> JoinAnswer:
        try:
            connection = _Connection(peer, self._limits, self._resolver)
        except http.client.HTTPException as error:
            return _unreached(peer, str(error))
        try:
            answer = self._post(connection, body)
            return _unreached(peer, self._late) if connection.late else _read(peer, answer)
        except OSError as error:
            return _unreached(peer, self._late if connection.late else str(error) or repr(error))
        except (ValueError, http.client.HTTPException) as error:
            if connection.late:
                return _unreached(peer, self._late)
            log.info("what is no HTTP from %s: %.500r", peer, error)
            return _unreached(peer, "it does not speak HTTP as a server of ours does")

    @property
    def _late(self) -> str:
        return f"it has not answered within {self._limits.deadline_s:g} s"

    def _post(self, connection: "_Connection", body: bytes) -> "_Answer":
        try:
            connection.request("POST", JOIN_PATH, body, self._headers)
            answer = connection.getresponse()
            ours = answer.getheader(JOIN_MARK) is not None
            return _Answer(answer.status, answer.read(JOIN_BYTES), ours)
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    data: bytes
    ours: bool


def _unreached(peer: PeerId, reason: str) -> JoinRefused:
    return JoinRefused(f"the prefill server {peer} cannot be reached: {reason}")


def _unasked(peer: PeerId, reason: str) -> JoinRefused:
    return JoinRefused(f"the prefill server {peer} cannot be asked: {reason}")


def _read(peer: PeerId, answer: _Answer) -> JoinAnswer:
    """Nothing of what another service says: a client names the host, which it may not reach."""
    if answer.ours and answer.status != 200:
        return JoinRefused(f"the prefill server {peer} answers {answer.status}{_words(answer)}")
    reason = "it has no mark of ours"
    if answer.ours:
        try:
            return decode_answer(answer.data)
        except TransportError as error:
            reason = str(error)
    log.info("no answer of ours from %s (%.500s): %r", peer, reason, answer.data[:_LOGGED_BYTES])
    found = "what no server of ours does" if answer.status == 200 else str(answer.status)
    return JoinRefused(f"the prefill server {peer} answers {found}")


def _words(answer: _Answer) -> str:
    """Of an error record (``serve/errors``)."""
    try:
        match json.loads(answer.data):
            case {"error": {"message": str(message)}}:
                return f": {message[:REASON_CHARS]}"
            case _:
                return ""
    except (ValueError, RecursionError):
        return ""


class _Connection(http.client.HTTPConnection):
    """Ends at the deadline whatever the other side does: a time-out of a socket is one of each
    read. ``late``: it did."""

    def __init__(self, peer: PeerId, limits: CallLimits, resolver: Resolver) -> None:
        super().__init__(peer)
        self._resolver = resolver
        self._clock, self._limits = MonotonicClock(), limits
        self._until_s = self._clock.now_s() + limits.deadline_s
        self._timer: Timer | None = None
        self.late = False

    def connect(self) -> None:
        opened = self._opened()
        opened.settimeout(None)  # of the connecting alone: an answer has the whole call's time
        self.sock = opened
        self._timer = Timer(self._left_s, self._end, (opened,))
        start(self._timer)  # a daemon, as the thread that it is made on

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().close()

    def _opened(self) -> socket.socket:
        failure: OSError = TimeoutError(f"{self.host} has no address")
        found = self._resolver.addresses(self.host, self._left_s)
        self.late = found is None
        for address in found or ():
            if not self._left_s:
                self.late = True
                break
            try:
                return socket.create_connection(
                    (address, self.port), min(self._left_s, self._limits.connect_s)
                )
            except OSError as error:
                failure = error
        raise failure

    @property
    def _left_s(self) -> float:
        return max(0.0, self._until_s - self._clock.now_s())

    def _end(self, opened: socket.socket) -> None:
        self.late = True
        with suppress(OSError):
            opened.shutdown(socket.SHUT_RDWR)
