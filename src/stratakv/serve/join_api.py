"""The HTTP face of a server that computes prompts, for those that decode: they join here.

Owns its route, and the mark by which they know an answer of ours. Must not block the event loop:
peers are the engine's thread's.
"""

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stratakv.core.errors import TransportError
from stratakv.disagg.http_join import JOIN_MARK, JOIN_PATH
from stratakv.disagg.joining import JOIN_BYTES, decode_call, encode_answer
from stratakv.disagg.messages import PROTOCOL
from stratakv.serve import bodies
from stratakv.serve.driver import EngineDriver
from stratakv.serve.errors import invalid
from stratakv.serve.lanes import client_of
from stratakv.serve.service import Joins, Service


class JoinApi:
    def __init__(self, service: Service, joins: Joins) -> None:
        self._driver: EngineDriver = service.driver
        self._bodies = service.bodies
        self._joins = joins

    def routes(self) -> list[Route]:
        return [Route(JOIN_PATH, self.join, methods=["POST"])]

    async def join(self, request: Request) -> Response:
        with self._bodies.share(client_of(request)) as hold:
            body = await bodies.whole(request, JOIN_BYTES, hold)
        try:
            peer, introductions = decode_call(body)
        except TransportError as error:
            raise invalid("introduction", str(error)) from None
        joined = self._driver.ask_later(partial(self._joins, peer, introductions))
        answer = await asyncio.wrap_future(joined)
        return Response(encode_answer(answer), media_type="application/json")


class MarksJoins:
    """Marks all that is answered where peers join, also who has no key or finds no such route:
    they pass on to clients what a server of ours says, and of other services nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def marking(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (JOIN_MARK.encode(), str(PROTOCOL).encode())
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        here = scope["type"] == "http" and scope["path"] == JOIN_PATH
        await self._app(scope, receive, marking if here else send)
