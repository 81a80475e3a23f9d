"""The servers behind ``stratakv route``: who is asked next, how each is reached, how one fails.

Owns the calls. A server may take any time for tokens, but while it is silent it is asked for its
``/health``: one that does not answer that either is dead. Must not know what follows from a
failure (``route``).
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import httpx

from stratakv.core.clock import Clock
from stratakv.core.config import RouteConfig
from stratakv.serve.errors import ApiError

T = TypeVar("T")
Headers: TypeAlias = dict[str, str]

CONNECT_S: Final = 5.0
SILENCE_S: Final = 5.0
"""After so long without a word a server is asked for its health."""
REST_S: Final = 30.0
"""For so long a prefill server that has failed is asked after all others."""
_SHOWN_BYTES: Final = 500
"""Of an answer that nobody expects, in an error."""
PROBE: Final = httpx.Timeout(10.0, connect=CONNECT_S)
"""Of what a server answers at once unless it hangs."""
SHOWN: Final = (
    "content-type", "cache-control", "x-accel-buffering", "retry-after", "www-authenticate",
)  # fmt: skip
"""Headers of a server that go back."""
_EVENT: Final = b"data: "
_ERROR: Final = b'{"error"'


class RoutedError(Exception):
    """A server's own words, which the client gets as they are. ``others_may``: another prefill
    server may do better."""

    def __init__(self, status: int, content: bytes, headers: Headers, *, others_may: bool) -> None:
        super().__init__(content.decode(errors="replace"))
        self.status, self.content, self.headers = status, content, headers
        self.others_may = others_may


class UnreachableError(ApiError):
    """``asked``: whether the server may have begun to do what it was asked for."""

    def __init__(self, role: str, url: str, error: Exception) -> None:
        message = f"the {role} server {url} cannot be reached: {str(error) or repr(error)}"
        super().__init__(message, status=502, kind="server_error", code=f"{role}_unreachable")
        self.asked = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


@dataclass(slots=True, eq=False)
class DecodeAnswer:
    """Of a server that decodes, which has begun well: what comes after ``first`` was not read."""

    headers: Headers
    parts: AsyncGenerator[bytes]
    first: bytes


class Servers:
    """``silence_s``: as ``SILENCE_S``."""

    def __init__(
        self, config: RouteConfig, client: httpx.AsyncClient, clock: Clock, silence_s: float
    ) -> None:
        self._config, self._client = config, client
        self._clock, self._silence_s = clock, silence_s
        self._joins: dict[str, tuple[str, int]] = {}  # where decode joins each prefill server
        self._rests: dict[str, float] = {}  # until when it is asked last
        self._prefill_turn = self._decode_turn = -1

    def prefills(self) -> list[str]:
        """All, the next one first, and at the end those that have just failed."""
        self._prefill_turn, found = _in_turn(self._config.prefill, self._prefill_turn)
        now_s = self._clock.now_s()
        return sorted(found, key=lambda url: now_s < self._rests.get(url, now_s))

    def _decodes(self) -> tuple[str, ...]:
        """All, the next one first."""
        self._decode_turn, found = _in_turn(self._config.decode, self._decode_turn)
        return found

    async def unready(self) -> str | None:
        """The first of all that is not ready, and why."""
        for url in (*self._config.prefill, *self._config.decode):
            try:
                status = (await self._client.get(f"{url}/health", timeout=PROBE)).status_code
            except httpx.HTTPError as error:
                return f"{url} is not ready: {str(error) or repr(error)}"
            if status != 200:
                return f"{url} is not ready: it answers {status}"
        return None

    async def ask(self, method: str, path: str, content: bytes, headers: Headers) -> httpx.Response:
        """Something without tokens, of a server that decodes: all have the same model."""
        failure: ApiError | None = None
        timeout = PROBE if method == "GET" else self._client.timeout
        for url in self._decodes():
            asked = self._client.request(
                method, f"{url}{path}", content=content, headers=headers, timeout=timeout
            )
            try:
                return await self._while_alive("decode", url, asked)
            except UnreachableError as error:
                failure = error
        assert failure is not None, "no server that decodes"
        raise failure

    # -- the calls of a request ------------------------------------------------------------------

    async def join(self, url: str, headers: Headers) -> tuple[str, int]:
        """Where decode joins a prefill server. Asked for with the client's key; only what it has
        brought is kept for the others."""
        if url in self._joins:
            return self._joins[url]
        key = {name: headers[name] for name in headers if name == "authorization"}
        try:
            answer = await self._client.get(f"{url}/server_info", headers=key, timeout=PROBE)
        except httpx.HTTPError as error:
            raise UnreachableError("prefill", url, error) from None
        if answer.status_code == 401:
            raise _of_prefill(answer)
        if answer.status_code != 200:
            text = answer.content[:_SHOWN_BYTES].decode(errors="replace")
            raise _no_prefill(f"{url}/server_info answers {answer.status_code}: {text}")
        try:
            found: Any = answer.json()["server"]
            join = str(found["advertise_host"] or httpx.URL(url).host), int(found["bootstrap_port"])
        except (KeyError, TypeError, ValueError):
            message = f"{url} is not a server that computes prompts (--role prefill)"
            raise _no_prefill(message) from None
        self._joins[url] = join
        return join

    async def prefill(self, url: str, path: str, content: bytes, headers: Headers) -> None:
        asked = self._client.post(f"{url}{path}", content=content, headers=headers)
        answer = await self._while_alive("prefill", url, asked)
        if answer.status_code != 200:
            raise _of_prefill(answer)

    def failed(self, url: str) -> None:
        """A prefill server has, or decode has lost it: for a while others are asked first, and it
        is asked where it is joined, since it may be back at another place."""
        self._joins.pop(url, None)
        self._rests[url] = self._clock.now_s() + REST_S

    async def decode(self, path: str, content: bytes, headers: Headers) -> DecodeAnswer:
        """From whoever takes it. RoutedError where it fails before there is a token."""
        failure: ApiError | None = None
        for url in self._decodes():
            request = self._client.build_request(
                "POST", f"{url}{path}", content=content, headers=headers
            )
            sent = self._client.send(request, stream=True)
            try:
                response = await self._while_alive("decode", url, sent)
            except UnreachableError as error:
                if error.asked:
                    raise
                failure = error
                continue
            return await self._begun(url, response)
        assert failure is not None, "no server that decodes"
        raise failure

    async def _begun(self, url: str, response: httpx.Response) -> DecodeAnswer:
        parts = self._parts(url, response)
        try:
            first = await anext(parts, b"")
            if response.status_code != 200:
                content = b"".join([first, *[part async for part in parts]])
                raise _of_decode(response.status_code, content, shown(response))
            if first.startswith(_EVENT + _ERROR):  # a stream whose first event is its end
                content = first.removeprefix(_EVENT).partition(b"\n")[0]
                raise _of_decode(500, content, {"content-type": "application/json"})
        except BaseException:
            await parts.aclose()
            raise
        return DecodeAnswer(shown(response), parts, first)

    async def _parts(self, url: str, response: httpx.Response) -> AsyncGenerator[bytes]:
        """What a server answers; one that dies meanwhile is an error like any other."""
        stream = response.headers.get("content-type", "").startswith("text/event-stream")
        read, begun = response.aiter_raw(), False
        try:
            while part := await self._while_alive("decode", url, _next(read)):
                yield part
                begun = True
        except UnreachableError as error:
            if not (stream and begun):
                raise
            yield _EVENT + json.dumps(error.body).encode() + b"\n\ndata: [DONE]\n\n"
        finally:
            await response.aclose()

    async def _while_alive(self, role: str, url: str, work: Awaitable[T]) -> T:
        """What ``work`` comes to, however long that takes; UnreachableError where the server cannot
        be reached, or is silent and does not answer for its health either."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait((task,), timeout=self._silence_s))[0]:
                try:
                    await self._client.get(f"{url}/health", timeout=PROBE)
                except httpx.HTTPError:
                    if not task.done():
                        raise
            return task.result()
        except httpx.HTTPError as error:
            raise UnreachableError(role, url, error) from None
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, httpx.HTTPError):
                    await task


def _in_turn(urls: tuple[str, ...], turn: int) -> tuple[int, tuple[str, ...]]:
    turn = (turn + 1) % len(urls)
    return turn, (*urls[turn:], *urls[:turn])


async def _next(parts: AsyncIterator[bytes]) -> bytes:
    """b"": there is no more."""
    return await anext(parts, b"")


def _no_prefill(message: str) -> ApiError:
    return ApiError(message, status=502, kind="server_error", code="no_prefill")


def _of_prefill(answer: httpx.Response) -> RoutedError:
    busy = answer.status_code >= 500
    return RoutedError(answer.status_code, answer.content, shown(answer), others_may=busy)


def _of_decode(status: int, content: bytes, headers: Headers) -> RoutedError:
    lost = b'"request_failed_transfer"' in content
    return RoutedError(status, content, headers, others_may=lost)


def shown(response: httpx.Response) -> Headers:
    return {name: response.headers[name] for name in SHOWN if name in response.headers}
