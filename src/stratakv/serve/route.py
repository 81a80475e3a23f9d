"""``stratakv route``: one address for servers that compute prompts and servers that decode.

Owns who gets a request, the two calls of it, and what its client gets where one of them fails.
Both sides get the same body at once, with a session's name; the client gets what decode says. Must
not know models or tokens: what is wrong with a body the servers say.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final, TypeVar, cast

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from stratakv.core.config import RouteConfig
from stratakv.serve.errors import ApiError
from stratakv.serve.fields import parse_object
from stratakv.serve.hand_off import SALT_HEADER

log = logging.getLogger(__name__)
T = TypeVar("T")

BODY_BYTES: Final = 8 << 20
CONNECT_S: Final = 5.0
PROBE: Final = httpx.Timeout(10.0, connect=CONNECT_S)
"""Of what a server answers at once unless it hangs; an answer with tokens may take any time."""
KEPT: Final = ("authorization", "content-type", "x-request-id", SALT_HEADER)
"""Headers of a client that go on to the servers."""
SHOWN: Final = (
    "content-type", "cache-control", "x-accel-buffering", "retry-after", "www-authenticate",
)  # fmt: skip
"""Headers of a server that go back."""


class _GoneError(Exception):
    """The client hung up."""


def _unreachable(kind: str, url: str, error: Exception) -> ApiError:
    message = f"the {kind} server {url} cannot be reached: {str(error) or repr(error)}"
    return ApiError(message, status=502, kind="server_error", code=f"{kind}_unreachable")


@dataclass(slots=True, eq=False)
class _Answer:
    """Of one side, whose ``body`` has not been read."""

    response: httpx.Response
    parts: AsyncGenerator[bytes]
    first: bytes


class Router:
    def __init__(self, config: RouteConfig, client: httpx.AsyncClient) -> None:
        self._config, self._client = config, client
        self._joins: dict[str, tuple[str, int]] = {}  # where decode joins each prefill server
        self._prefills = cycle(config.prefill)
        self._turn = 0

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.generate, methods=["POST"]),
            Route("/v1/chat/completions", self.generate, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            *(
                Route(path, self.passed_on, methods=[method])
                for method, path in (
                    ("GET", "/v1/models"), ("GET", "/v1/models/{model:path}"),
                    ("POST", "/tokenize"), ("POST", "/detokenize"),
                )
            ),
        ]  # fmt: skip

    async def health(self, _request: Request) -> Response:
        """Ready while every server is."""
        for url in (*self._config.prefill, *self._config.decode):
            try:
                status = (await self._client.get(f"{url}/health", timeout=PROBE)).status_code
            except httpx.HTTPError:
                status = 0
            if status != 200:
                return JSONResponse({"status": f"{url} is not ready"}, 503)
        return JSONResponse({"status": "ready"})

    async def passed_on(self, request: Request) -> Response:
        """By a server that decodes: all have the same model."""
        body = await _body(request)
        for url in self._decodes():
            with suppress(httpx.ConnectError):
                answer = await self._client.request(
                    request.method, f"{url}{request.url.path}", content=body, headers=_kept(request)
                )
                return Response(answer.content, answer.status_code, _shown(answer))
        raise ApiError("no server that decodes can be reached", status=502, kind="server_error")

    async def generate(self, request: Request) -> "Response | _Stream":
        body = cast("dict[str, Any]", dict(parse_object(await _body(request))))
        watch = asyncio.ensure_future(_left(request.receive))
        try:
            answer = await _unless(watch, self._answered(request, body))
        except _GoneError:
            return Response(status_code=499)
        except BaseException:
            watch.cancel()
            raise
        return _Stream(answer, watch)

    async def _answered(self, request: Request, body: dict[str, Any]) -> _Answer:
        """Decode's answer, once it has begun; or prefill's, where that has failed before."""
        path, headers = request.url.path, _kept(request)
        url = next(self._prefills)
        host, port = await self._join(url, headers)
        body |= {
            "bootstrap_host": host,
            "bootstrap_port": port,
            "bootstrap_room": secrets.randbits(63),
        }
        if SALT_HEADER not in request.headers:
            body.setdefault("cache_salt", "")
        content = json.dumps(body).encode()
        prefill = asyncio.ensure_future(self._prefilled(url + path, content, headers))
        decode = asyncio.ensure_future(self._decoded(path, content, headers))
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if prefill.done() and not decode.done():
                await prefill  # raises what it has failed with
                await asyncio.wait((decode,))
            answer = await decode
        except BaseException:
            prefill.cancel()
            if decode.done() and not decode.cancelled() and decode.exception() is None:
                await decode.result().parts.aclose()
            decode.cancel()
            raise
        prefill.add_done_callback(_log_failure)
        return answer

    async def _join(self, url: str, headers: dict[str, str]) -> tuple[str, int]:
        """Asked for with the client's key; only what it has brought is kept for the others."""
        if url in self._joins:
            return self._joins[url]
        key = {name: headers[name] for name in headers if name == "authorization"}
        try:
            answer = await self._client.get(f"{url}/server_info", headers=key, timeout=PROBE)
        except httpx.HTTPError as error:
            raise _unreachable("prefill", url, error) from None
        if answer.status_code == 401:
            raise _ServerError(answer)
        try:
            found: Any = answer.json()["server"]
            join = str(found["advertise_host"] or httpx.URL(url).host), int(found["bootstrap_port"])
        except (KeyError, TypeError, ValueError):
            message = f"{url} is not a server that computes prompts (--role prefill)"
            raise ApiError(message, status=502, kind="server_error", code="no_prefill") from None
        self._joins[url] = join
        return join

    async def _prefilled(self, url: str, content: bytes, headers: dict[str, str]) -> None:
        try:
            answer = await self._client.post(url, content=content, headers=headers)
        except httpx.HTTPError as error:
            for each in list(self._joins):
                if url.startswith(each):
                    del self._joins[each]  # it may come back at another port
            raise _unreachable("prefill", url, error) from None
        if answer.status_code != 200:
            raise _ServerError(answer)

    async def _decoded(self, path: str, content: bytes, headers: dict[str, str]) -> _Answer:
        """From whoever takes it; nothing of it was given out before."""
        last: ApiError | None = None
        for url in self._decodes():
            request = self._client.build_request(
                "POST", f"{url}{path}", content=content, headers=headers
            )
            try:
                response = await self._client.send(request, stream=True)
            except httpx.ConnectError as error:
                last = _unreachable("decode", url, error)
                continue
            except httpx.HTTPError as error:
                raise _unreachable("decode", url, error) from None
            parts = _parts(response, url)
            return _Answer(response, parts, await anext(parts, b""))
        assert last is not None, "no server that decodes"
        raise last

    def _decodes(self) -> tuple[str, ...]:
        """All, the next one first."""
        self._turn = (self._turn + 1) % len(self._config.decode)
        return (*self._config.decode[self._turn :], *self._config.decode[: self._turn])


class _ServerError(Exception):
    """A server's own words, which the client gets as they are."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(response.text)
        self.response = response


class _Stream:
    """The ASGI response of what a server says, as it says it."""

    def __init__(self, answer: _Answer, watch: "asyncio.Future[None]") -> None:
        self._answer, self._watch = answer, watch

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        answer = self._answer
        headers = [(k.encode(), v.encode()) for k, v in _shown(answer.response).items()]
        status = answer.response.status_code
        try:
            async with aclosing(answer.parts) as parts:
                await send({"type": "http.response.start", "status": status, "headers": headers})
                part = answer.first
                while part:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                    part = await _unless(self._watch, anext(parts, b""))
            await send({"type": "http.response.body", "body": b""})
        except _GoneError:
            pass
        finally:
            self._watch.cancel()


async def _parts(response: httpx.Response, url: str) -> AsyncGenerator[bytes]:
    """What a server says; of one that dies meanwhile, its client hears as of any other error."""
    try:
        async for part in response.aiter_raw():
            yield part
    except httpx.HTTPError as error:
        found = _unreachable("decode", url, error)
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            raise found from None
        yield b"data: " + json.dumps(found.body).encode() + b"\n\ndata: [DONE]\n\n"
    finally:
        await response.aclose()


async def _unless(watch: "asyncio.Future[None]", work: Awaitable[T]) -> T:
    """What ``work`` comes to. _GoneError, and it is called off, where the client leaves."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((watch, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _GoneError
        return await task
    finally:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    found = bytearray()
    async for chunk in request.stream():
        found += chunk
        if len(found) > BODY_BYTES:
            message = f"the request body has more than {BODY_BYTES} bytes"
            raise ApiError(message, status=413, code="body_too_large")
    return bytes(found)


def _kept(request: Request) -> dict[str, str]:
    return {name: request.headers[name] for name in KEPT if name in request.headers}


def _shown(response: httpx.Response) -> dict[str, str]:
    return {name: response.headers[name] for name in SHOWN if name in response.headers}


def _log_failure(prefill: "asyncio.Future[None]") -> None:
    """Its pages are where they should be; what it says after that is for nobody."""
    if not prefill.cancelled() and (error := prefill.exception()) is not None:
        log.warning("prefill, after decode has answered: %s", error)


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _server_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, _ServerError)
    found = error.response
    return Response(found.content, found.status_code, _shown(found))


def build_router(
    config: RouteConfig, transport: httpx.AsyncBaseTransport | None = None
) -> Starlette:
    """``transport``: how servers are reached; None: over the network."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    timeout = httpx.Timeout(None, connect=CONNECT_S)
    client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False, transport=transport)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None]:
        async with client:
            yield

    return Starlette(
        routes=Router(config, client).routes(),
        exception_handlers={ApiError: _api_error, _ServerError: _server_error},
        lifespan=lifespan,
    )
