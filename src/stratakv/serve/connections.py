"""One client's connection: uvicorn's, with an end to what a client may leave unfinished.

Owns a connection's clock: until a request has come, between two, and while nobody reads an answer.
Reads little at a time, so that a body of a million tiny chunks holds nobody up for long. Must not
know what is asked.
"""

import asyncio
import json
from enum import Enum
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from stratakv.serve.connection_limits import Crowd
from stratakv.serve.errors import ApiError, bad_framing, too_slow

READ_BYTES: Final = 1 << 14
BYTES_PER_S: Final = 1 << 14
"""A body may come as slowly as that, once the time for a request is over."""


class _Phase(Enum):
    """Between two requests; while one comes; while its answer is made."""

    WAITING = "waiting"
    COMING = "coming"
    ANSWERED = "answered"


class StrictFraming(h11.Connection):
    """h11's, which takes a request with two lengths, as proxies before us may not: what the one
    takes for a body is the next request to the other (RFC 9112, 6.3)."""

    def next_event(self) -> Any:  # noqa: ANN401 - h11's union of events and sentinels
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding")
        return event


class ClientConnection(H11Protocol, asyncio.BufferedProtocol):
    """``crowd``: of all connections of this server. The rest is uvicorn's."""

    def __init__(self, crowd: Crowd, **uvicorns: Any) -> None:  # noqa: ANN401
        super().__init__(**uvicorns)
        self.conn = StrictFraming(h11.SERVER)
        self._crowd = crowd
        self._limits = crowd.limits
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._phase = _Phase.WAITING
        self._received = 0
        self._began_s = 0.0
        self._before: object = None
        """The cycle of the last request when this one began."""
        self._end: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    # -- asyncio ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        if self._crowd.enter(self):
            self._end_in(self._limits.request_s)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.exit(self)
        self._end_in(None)
        self.resume_writing()
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        if self._phase is _Phase.WAITING:
            self._phase = _Phase.COMING
            self._received = 0
            self._began_s = self.loop.time()
            self._before = self.cycle
            self._end_in(self._limits.request_s)
        self._received += len(data)
        super().data_received(data)
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        longest_s = max(self._limits.keep_alive_s, self._limits.request_s)
        self._stall = self.loop.call_later(longest_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    # -- uvicorn ----------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase is _Phase.ANSWERED and self.cycle.response_complete:
            self._wait()
        self._look()

    def send_400_response(self, msg: str) -> None:
        del msg
        self._refuse(bad_framing())

    # -- ours -------------------------------------------------------------------------------------

    def leave(self) -> None:
        self.transport.abort()

    def _look(self) -> None:
        """Where the request is now."""
        theirs = self.conn.their_state
        if self._phase is not _Phase.COMING or self.transport.is_closing():
            return
        if theirs in {h11.DONE, h11.MUST_CLOSE}:
            if self.cycle.response_complete:
                self._wait()
            else:
                self._phase = _Phase.ANSWERED
                self._crowd.busy(self)
                self._end_in(None)
        elif theirs is h11.IDLE and self.cycle is not self._before:
            self._wait()  # its answer was ready before its body

    def _wait(self) -> None:
        self._phase = _Phase.WAITING
        self._crowd.idle(self)
        self._end_in(self._limits.keep_alive_s)

    def _end_in(self, seconds: float | None) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None
        if seconds is not None:
            self._end = self.loop.call_later(seconds, self._over)

    def _over(self) -> None:
        if self._phase is _Phase.WAITING:
            self.timeout_keep_alive_handler()
            return
        due_s = self._began_s + self._limits.request_s + self._received / BYTES_PER_S
        if (left_s := due_s - self.loop.time()) > 0 and self.conn.their_state is h11.SEND_BODY:
            self._end_in(left_s)
        else:
            self._refuse(too_slow(self._limits.request_s))

    def _refuse(self, error: ApiError) -> None:
        """Answer in the application's place, if it has not begun to, and close."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE} and not self.transport.is_closing():
            body = json.dumps(error.body).encode()
            head = h11.Response(
                status_code=error.status,
                headers=[
                    ("content-type", "application/json"),
                    ("content-length", str(len(body))),
                    ("connection", "close"),
                ],
                reason=STATUS_PHRASES[error.status],
            )
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
