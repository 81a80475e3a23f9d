"""The HTTP face of the question why a prompt was computed: ``/cache/why_miss``.

Owns its route and the shape of its answers. Must not know how the cache decides.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stratakv.cache.misses import MissReport
from stratakv.core.ids import TokenIds
from stratakv.engine.why_miss import PromptQuery
from stratakv.serve import bodies, fields, json_body, schemas
from stratakv.serve.decoding import CACHE_WORDS
from stratakv.serve.errors import ApiError, invalid
from stratakv.serve.fields import JsonObject
from stratakv.serve.lanes import client_of
from stratakv.serve.prompts import PromptEncoder
from stratakv.serve.service import Service

MAX_NAME_CHARS: Final = 512
FIELDS: Final = frozenset({"request", "prompts"})
_USES: Final = {use: word for word, use in CACHE_WORDS.items()}


class WhyMissApi:
    def __init__(self, service: Service, encoder: PromptEncoder) -> None:
        self._service = service
        self._encoder = encoder

    def routes(self) -> list[Route]:
        return [Route("/cache/why_miss", self.why_miss, methods=["POST"])]

    async def why_miss(self, request: Request) -> Response:
        """Of ``{"request": name}``, or of ``{"prompts": [earlier, later]}``, which are bodies as
        they would be sent."""
        service, client = self._service, client_of(request)
        with service.bodies.share(client) as hold:
            body = await bodies.whole(request, service.limits.body_bytes, hold)
            data = await service.lanes.run(client, len(body), lambda: json_body.read_object(body))
            for name in data.keys() - FIELDS:
                message = f"unrecognized request argument: '{name}'"
                raise ApiError(message, param=name, code="unknown_parameter")
            name = fields.text(data, "request", None, max_chars=MAX_NAME_CHARS)
            if (name is None) is (data.get("prompts") is None):
                raise invalid("request", "either 'request' or 'prompts' is needed")
            if name is not None:
                return _answer(await self._of_request(name))
            return _answer([await self._of_prompts(request, data)])

    async def _of_request(self, name: str) -> Sequence[MissReport]:
        driver, misses = self._service.driver, self._service.misses
        found = await asyncio.wrap_future(driver.ask(partial(misses.of_request, name)))
        if not found:
            message = f"nothing is remembered of a request {name[:64]!a}: it has not been admitted,"
            message += " or too many have come since"
            raise ApiError(message, status=404, param="request", code="not_found")
        return found

    async def _of_prompts(self, request: Request, data: JsonObject) -> MissReport:
        pair = fields.array("prompts", data["prompts"])
        if len(pair) != 2:
            raise invalid("prompts", "'prompts' are two: an earlier one and a later one")
        earlier, later = [
            await self._asked(request, fields.child({"prompts": one}, "prompts")) for one in pair
        ]
        misses = self._service.misses
        asked = self._service.driver.ask(partial(misses.of_prompts, earlier, later))
        return await asyncio.wrap_future(asked)

    async def _asked(self, request: Request, body: JsonObject) -> PromptQuery:
        vocab = self._service.limits.vocab
        if "messages" in body:
            call = schemas.chat_call(body, vocab)
        else:
            call = schemas.completion_call(body, vocab)
        _, adapter = self._service.named(call.model)
        (tokens, *more) = await self._encoder.of_call(request, call)
        if more:
            raise invalid("prompts", "each of 'prompts' holds one prompt")
        self._check(tokens)
        return PromptQuery(tokens=tokens, adapter=adapter, salt=call.decoding.salt or "")

    def _check(self, tokens: TokenIds) -> None:
        if not 0 < len(tokens) <= self._service.limits.max_model_len:
            message = "one of 'prompts' is empty, or longer than the model's context"
            raise invalid("prompts", message)


def _answer(found: Sequence[MissReport]) -> Response:
    return JSONResponse({"requests": [_shown(one) for one in found]})


def _shown(one: MissReport) -> JsonObject:
    shown: dict[str, object] = {**asdict(one), "use": _USES[one.use], "cached": None}
    if one.cached is not None:
        cached = one.cached
        shown["cached"] = {
            "device": cached.device, "host": cached.host, "storage": cached.storage,
        }  # fmt: skip
    if one.parting is not None:
        shown["parting"] = asdict(one.parting) | {"difference": one.parting.difference.value}
    if one.lost is not None:
        shown["lost"] = [
            {"tier": tier, "reason": reason, "tokens": tokens} for tier, reason, tokens in one.lost
        ]
    return shown
