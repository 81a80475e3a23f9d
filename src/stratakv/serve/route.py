"""``stratakv route``: one address for servers that compute prompts and servers that decode.

Owns the two calls of a request, and what its client gets where one of them fails. Both sides get
the same body at once, with a session's name; the client gets what decode answers. Until it has
something a prefill server that fails is replaced by the next one. Must not know models or tokens:
what is wrong with a body the servers say.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Final, TypeVar, cast

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from stratakv.core.clock import Clock, MonotonicClock
from stratakv.core.config import RouteConfig
from stratakv.serve.errors import ApiError, invalid
from stratakv.serve.fields import parse_object
from stratakv.serve.hand_off import SALT_HEADER
from stratakv.serve.route_servers import (
    CONNECT_S,
    SILENCE_S,
    DecodeAnswer,
    RoutedError,
    Servers,
    shown,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

BODY_BYTES: Final = 8 << 20
KEPT: Final = ("authorization", "content-type", "x-request-id", SALT_HEADER)
"""Headers of a client that go on to the servers."""
OTHERS_MAY: Final = ("prefill_unreachable", "no_prefill")
"""Codes of failures after which another prefill server is asked."""


class _GoneError(Exception):
    """The client hung up."""


class Router:
    def __init__(self, servers: Servers) -> None:
        self._servers = servers

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
        why = await self._servers.unready()
        return JSONResponse({"status": why or "ready"}, 503 if why else 200)

    async def passed_on(self, request: Request) -> Response:
        """By a server that decodes."""
        body = await _body(request)
        asked = self._servers.ask(request.method, request.url.path, body, _kept(request))
        answer = await asked
        return Response(answer.content, answer.status_code, shown(answer))

    async def generate(self, request: Request) -> "Response | _Stream":
        body = cast("dict[str, Any]", dict(parse_object(await _body(request))))
        if body.get("kv_transfer_params"):
            message = "'kv_transfer_params' name a hand-off between servers, and so does stratakv "
            message += "route for each request; leave it out, or ask a server itself"
            raise invalid("kv_transfer_params", message)
        watch = asyncio.ensure_future(_left(request.receive))
        try:
            answer = await _unless(watch, self._answered(request, body))
        except _GoneError:
            return Response(status_code=499)
        except BaseException:
            watch.cancel()
            raise
        return _Stream(answer, watch)

    async def _answered(self, request: Request, body: dict[str, Any]) -> DecodeAnswer:
        """Decode's answer, once it has begun; or the failure of the last prefill server."""
        failure: Exception | None = None
        for url in self._servers.prefills():
            try:
                return await self._attempt(url, request, body)
            except (ApiError, RoutedError) as error:
                if not _others_may(error):
                    raise
                log.warning("prefill server %s: %s", url, error)
                self._servers.failed(url)
                failure = error
        assert failure is not None, "no prefill server"
        raise failure

    async def _attempt(self, url: str, request: Request, body: dict[str, Any]) -> DecodeAnswer:
        """With one prefill server: decode's answer, or prefill's where that has failed before."""
        path, headers = request.url.path, _kept(request)
        host, port = await self._servers.join(url, headers)
        body |= {
            "bootstrap_host": host,
            "bootstrap_port": port,
            "bootstrap_room": secrets.randbits(63),
        }
        if SALT_HEADER not in request.headers:
            body.setdefault("cache_salt", "")
        content = json.dumps(body).encode()
        prefill = asyncio.ensure_future(self._servers.prefill(url, path, content, headers))
        decode = asyncio.ensure_future(self._servers.decode(path, content, headers))
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


class _Stream:
    """The ASGI response of what a server says, as it says it."""

    def __init__(self, answer: DecodeAnswer, watch: "asyncio.Future[None]") -> None:
        self._answer, self._watch = answer, watch

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        answer = self._answer
        headers = [(k.encode(), v.encode()) for k, v in answer.headers.items()]
        try:
            async with aclosing(answer.parts) as parts:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                part = answer.first
                while part:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                    part = await _unless(self._watch, anext(parts, b""))
            await send({"type": "http.response.body", "body": b""})
        except _GoneError:
            pass
        finally:
            self._watch.cancel()


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


def _others_may(error: ApiError | RoutedError) -> bool:
    """Whether another prefill server may do better; the client has got nothing yet."""
    return error.others_may if isinstance(error, RoutedError) else error.code in OTHERS_MAY


def _log_failure(prefill: "asyncio.Future[None]") -> None:
    """Its pages are where they should be; what it says after that is for nobody."""
    if not prefill.cancelled() and (error := prefill.exception()) is not None:
        log.warning("prefill, after decode has answered: %s", error)


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _routed_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RoutedError)
    return Response(error.content, error.status, error.headers)


def build_router(
    config: RouteConfig,
    transport: httpx.AsyncBaseTransport | None = None,
    clock: Clock | None = None,
    silence_s: float = SILENCE_S,
) -> Starlette:
    """``transport``: how servers are reached; None: over the network. ``silence_s``: after how long
    without a word a server is asked for its health."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    timeout = httpx.Timeout(None, connect=CONNECT_S)
    client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False, transport=transport)
    servers = Servers(config, client, clock or MonotonicClock(), silence_s)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None]:
        async with client:
            yield

    return Starlette(
        routes=Router(servers).routes(),
        exception_handlers={ApiError: _api_error, RoutedError: _routed_error},
        lifespan=lifespan,
    )
