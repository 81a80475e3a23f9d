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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Timer
from typing import Any, Final

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
from stratakv.disagg.resolver import Resolver
from stratakv.disagg.transport import PeerId

log = logging.getLogger(__name__)

JOIN_PATH: Final = "/disagg/join"
_LOGGED_BYTES: Final = 500
_ERROR_FIELDS: Final = {"message", "type", "param", "code"}
"""Of our own error records (``serve/errors``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """``deadline_s``: of a whole call; ``connect_s``: of one address of its host. ``at_once``: as
    many calls as there may be peers, so that none waits for others that never answer."""

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
        self._threads = ThreadPoolExecutor(limits.at_once, thread_name_prefix="stratakv-join")
        self._resolver = Resolver(limits.at_once)

    def __call__(self, peer: PeerId, introductions: Sequence[bytes]) -> "Future[JoinAnswer]":
        name = PeerId(bounded(f"{self._name} by {peer}"))
        return self._threads.submit(self._asked, peer, encode_call(name, introductions))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _asked(self, peer: PeerId, body: bytes) -> JoinAnswer:
        try:
            connection = _Connection(peer, self._limits, self._resolver)
        except http.client.HTTPException as error:
            return JoinRefused(f"the prefill server {peer} cannot be reached: {error}")
        try:
            status, data = self._post(connection, body)
            if connection.late:
                return JoinRefused(f"the prefill server {peer} cannot be reached: {self._late}")
            if status != 200:
                return JoinRefused(
                    f"the prefill server {peer} answers {status}{_words(peer, data)}"
                )
            return self._read(peer, data)
        except OSError as error:
            reason = self._late if connection.late else str(error) or repr(error)
            return JoinRefused(f"the prefill server {peer} cannot be reached: {reason}")
        except (ValueError, http.client.HTTPException) as error:
            if connection.late:
                reason = self._late
            else:
                log.info("what is no HTTP from %s: %.500r", peer, error)
                reason = "it does not speak HTTP as a server of ours does"
            return JoinRefused(f"the prefill server {peer} cannot be reached: {reason}")

    def _read(self, peer: PeerId, data: bytes) -> JoinAnswer:
        try:
            return decode_answer(data)
        except TransportError as error:
            log.info("no answer of ours from %s (%.500s): %r", peer, error, data[:_LOGGED_BYTES])
            return JoinRefused(f"the prefill server {peer} answers what no server of ours does")

    @property
    def _late(self) -> str:
        return f"it has not answered within {self._limits.deadline_s:g} s"

    def _post(self, connection: "_Connection", body: bytes) -> tuple[int, bytes]:
        try:
            connection.request("POST", JOIN_PATH, body, self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read(JOIN_BYTES)
        finally:
            connection.close()


def _words(peer: PeerId, data: bytes) -> str:
    """What a client may read of a failure's body: that of our own error records."""
    try:
        match json.loads(data):
            case {"error": {"message": str(message), **rest}, **more} if _is_ours(rest, more):
                return f": {message[:REASON_CHARS]}"
            case _:
                pass
    except (ValueError, RecursionError):
        pass
    log.info("no error of ours from %s: %r", peer, data[:_LOGGED_BYTES])
    return ""


def _is_ours(rest: dict[str, Any], more: dict[str, Any]) -> bool:
    kind, param, code = (rest.get(name) for name in ("type", "param", "code"))
    texts = isinstance(kind, str) and isinstance(param, str | None) and isinstance(code, str | None)
    return texts and not more and {"message", *rest} == _ERROR_FIELDS


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
        self._timer.start()

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
