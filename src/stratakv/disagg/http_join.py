"""Brings introductions over HTTP to the port where a prefill server is joined.

Owns the threads that wait for its answers. Must not know what an introduction says.
"""

import http.client
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from stratakv.core.errors import TransportError
from stratakv.disagg.joining import (
    JOIN_BYTES,
    JoinAnswer,
    JoinRefused,
    decode_answer,
    encode_call,
)
from stratakv.disagg.transport import PeerId

JOIN_PATH: Final = "/disagg/join"
_TIMEOUT_S: Final = 30.0
_THREADS: Final = 4


class HttpCarry:
    """``name``: of this side, for its peers. ``api_key``: what they may ask for."""

    def __init__(self, name: PeerId, api_key: str | None) -> None:
        self._name = name
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="stratakv-join")

    def __call__(self, peer: PeerId, introductions: Sequence[bytes]) -> "Future[JoinAnswer]":
        return self._threads.submit(self._asked, peer, encode_call(self._name, introductions))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _asked(self, peer: PeerId, body: bytes) -> JoinAnswer:
        try:
            status, data = self._post(peer, body)
            if status != 200:
                text = data[:500].decode(errors="replace")
                return JoinRefused(f"the prefill server {peer} answers {status}: {text}")
            return decode_answer(data)
        except TransportError as error:
            return JoinRefused(f"the prefill server {peer}: {error}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = str(error) or repr(error)
            return JoinRefused(f"the prefill server {peer} cannot be reached: {reason}")

    def _post(self, peer: PeerId, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(peer, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", JOIN_PATH, body, self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read(JOIN_BYTES)
        finally:
            connection.close()
