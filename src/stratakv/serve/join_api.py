"""The HTTP face of a server that computes prompts, for those that decode: they join here.

Owns its route. Must not block the event loop: peers are the engine's thread's.
"""

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stratakv.core.errors import TransportError
from stratakv.disagg.http_join import JOIN_PATH
from stratakv.disagg.joining import JOIN_BYTES, decode_call, encode_answer
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
