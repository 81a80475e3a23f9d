"""The HTTP face: routes, bodies in, answers and error objects out.

Owns which path does what. Must not know how an answer is made (``generate``).
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar, assert_never

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from stratakv.core.ids import TokenIds
from stratakv.disagg.statistics import SessionStats
from stratakv.engine.stats import EngineStats
from stratakv.serve import bodies, hand_off, json_body, schemas
from stratakv.serve.admin_api import AdminApi
from stratakv.serve.bodies import HoldBytes
from stratakv.serve.connection_limits import Crowd, TurnAway
from stratakv.serve.dashboard import dashboard
from stratakv.serve.decoding import Decoding
from stratakv.serve.docs_page import DocsPages
from stratakv.serve.driver import Health
from stratakv.serve.errors import (
    ApiError,
    ClientGoneError,
    conflict,
    internal,
    invalid,
    unavailable,
)
from stratakv.serve.fields import JsonObject
from stratakv.serve.generate import EventStream, GenerateCall, answer
from stratakv.serve.join_api import JoinApi, MarksJoins
from stratakv.serve.lanes import LONG_BYTES, client_of
from stratakv.serve.middleware import ANSWER_ID, REQUEST_ID, BearerKeys, RequestIds
from stratakv.serve.prompts import PromptEncoder
from stratakv.serve.replies import ChatFormat, CompletionFormat
from stratakv.serve.schemas import ChatCall, CompletionCall, PromptOptions
from stratakv.serve.service import Service
from stratakv.serve.tool_parsers import no_parser, parser_of
from stratakv.serve.tools import AutoCall, ToolUse
from stratakv.serve.why_miss_api import WhyMissApi

SCRAPE_S: Final = 2.0

T = TypeVar("T")


class Api:
    """The endpoints of one service."""

    def __init__(self, service: Service, prompts: PromptEncoder) -> None:
        self._service = service
        self._created = int(time.time())
        self._stats: EngineStats | None = None
        self._sessions: SessionStats | None = None
        self._lanes = service.lanes
        self._bodies = service.bodies
        self._prompts = prompts

    def routes(self) -> list[Route]:
        get, post = ["GET"], ["POST"]
        return [
            Route("/v1/models", self.models, methods=get),
            Route("/v1/models/{model:path}", self.model, methods=get),
            Route("/v1/completions", self.completions, methods=post),
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
            Route("/flush_cache", self.flush_cache, methods=post),
            Route("/", dashboard, methods=get),
            Route("/health", self.health, methods=get),
            Route("/ping", self.health, methods=get),
            Route("/metrics", self.metrics, methods=get),
            Route("/server_info", self.server_info, methods=get),
            Route("/version", self.version, methods=get),
        ]

    async def completions(self, request: Request) -> Response | EventStream:
        vocab = self._service.limits.vocab
        return await self._generate(request, lambda body: schemas.completion_call(body, vocab))

    async def chat(self, request: Request) -> Response | EventStream:
        vocab = self._service.limits.vocab
        return await self._generate(request, lambda body: schemas.chat_call(body, vocab))

    async def models(self, _request: Request) -> Response:
        names = (self._service.model, *self._service.adapters)
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        name, _ = self._service.named(request.path_params["model"])
        return JSONResponse(self._model(name))

    async def tokenize(self, request: Request) -> Response:
        """``{"prompt": text}`` or ``{"messages": [...]}`` -> token ids."""
        limit = self._service.limits.body_bytes
        with self._bodies.share(client_of(request)) as hold:
            found = await self._read(request, hold, lambda body: schemas.tokenize_call(body, limit))
            if isinstance(found.prompt, str):
                options = PromptOptions(special=found.special)
                (tokens,) = await self._prompts.encode(request, (found.prompt,), options)
            else:
                options = PromptOptions(special=False)
                tokens = await self._prompts.encode_chat(request, found.prompt, options)
        most = self._service.limits.max_model_len
        return await self._lanes.run(
            client_of(request),
            tokens.nbytes,
            lambda: JSONResponse({
                "tokens": tokens.tolist(), "count": len(tokens), "max_model_len": most,
            }),
        )  # fmt: skip

    async def detokenize(self, request: Request) -> Response:
        """``{"tokens": [...]}`` -> text."""
        limits = self._service.limits
        vocab, most = limits.vocab, limits.max_model_len
        with self._bodies.share(client_of(request)) as hold:
            tokens = await self._read(
                request, hold, lambda body: schemas.detokenize_call(body, vocab, most)
            )
        decode = self._service.tokenizer.decode_long
        return await self._lanes.run(
            client_of(request),
            tokens.nbytes,
            lambda: JSONResponse({"prompt": decode(tokens.tolist())}),
        )

    async def flush_cache(self, _request: Request) -> Response:
        if not await self._service.driver.flush():
            message = "requests are running; flush when the server is idle"
            raise conflict(message, "busy")
        return JSONResponse({"flushed": True})

    async def health(self, _request: Request) -> Response:
        state = self._service.driver.health
        if state is not Health.READY:
            raise unavailable(state.value)
        return JSONResponse({"status": state.value})

    async def metrics(self, _request: Request) -> Response:
        """The engine is asked after its running step; after a step that takes long, or its death,
        the last known figures must do."""
        driver, disagg = self._service.driver, self._service.disagg
        with suppress(TimeoutError, ApiError):
            self._stats = await asyncio.wait_for(driver.stats(), SCRAPE_S)
            if disagg is not None:
                sessions = asyncio.wrap_future(driver.ask(disagg.stats))
                self._sessions = await asyncio.wait_for(sessions, SCRAPE_S)
        text = self._service.metrics.render(self._stats, self._sessions)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def server_info(self, _request: Request) -> Response:
        service = self._service
        return JSONResponse(
            {
                "version": self._service.version,
                "state": service.driver.health.value,
                "model": service.model,
                "max_model_len": service.limits.max_model_len,
                "max_waiting": service.driver.max_waiting,
                "open_requests": service.driver.open_requests,
                **service.info,
            }
        )

    async def version(self, _request: Request) -> Response:
        return JSONResponse({"version": self._service.version})

    async def _generate(
        self, request: Request, read: Callable[[JsonObject], CompletionCall | ChatCall]
    ) -> Response | EventStream:
        start_s, service = self._service.clock.now_s(), self._service
        with self._bodies.share(client_of(request)) as hold:
            found = await self._read(request, hold, read)
            name, adapter = service.named(found.model)
            decoding, parser = self._salted(request, found.decoding), no_parser
            match found:
                case CompletionCall():
                    spell, prefix, field = CompletionFormat, "cmpl", "prompt"
                    self._check_choices(len(found.prompts), found.decoding.n)
                case ChatCall():
                    spell, prefix, field = ChatFormat, "chatcmpl", "messages"
                    self._check_choices(1, found.decoding.n)
                    parser = partial(parser_of, found.use, service.tool_format)
                    decoding = self._marked(found.use, decoding)
                case _:
                    assert_never(found)
            prompts = await self._prompts.of_call(request, found)
        unique = uuid.uuid4().hex
        call = GenerateCall(
            id=f"{prefix}-{unique}" if decoding.id is None else f"{decoding.id}-{unique}",
            prompts=prompts,
            adapter=adapter,
            decoding=decoding,
            format=spell(
                id=f"{prefix}-{decoding.id or unique}",
                created=int(time.time()),
                model=name,
                tokenizer=service.tokenizer,
                logprobs=decoding.sampling.logprobs is not None,
                prompts=_of_choices(prompts, decoding) if decoding.text.token_ids else None,
            ),
            field=field,
            default_tokens=self._prompts.default_tokens(found),
            start_s=start_s,
            plan=service.hand_offs.rules.plan(decoding.hand_off, len(prompts) * decoding.n),
            parser=parser,
        )
        request.scope[ANSWER_ID] = call.id
        await self._check_grammar(request, decoding)
        return await answer(service, request, call)

    def _marked(self, use: ToolUse | None, decoding: Decoding) -> Decoding:
        """With the special tokens that mark calls."""
        form = self._service.tool_format
        if use is None or not isinstance(use.choice, AutoCall) or form is None or not form.special:
            return decoding
        return replace(decoding, text=replace(decoding.text, special=True))

    async def _check_grammar(self, request: Request, decoding: Decoding) -> None:
        """Compile it beside the event loop: the engine's thread finds it done."""
        grammar = decoding.sampling.grammar
        if grammar is None:
            return
        grammars, client = self._service.grammars, client_of(request)
        size = max(LONG_BYTES, len(grammar.text))  # however short, it may take long to compile
        reason = await self._lanes.run(client, size, lambda: grammars.refusal(grammar))
        if reason is not None:
            field = decoding.form_field
            raise invalid(field, f"no answer can have the form in '{field}': {reason[:500]}")

    def _salted(self, request: Request, decoding: Decoding) -> Decoding:
        """With its tenant's salt, wherever that stood."""
        offs = self._service.hand_offs
        offs.rules.plan(decoding.hand_off, 0)  # whose role it is, before what it lacks
        salt = hand_off.salt_of(request.headers.get(hand_off.SALT_HEADER), decoding.salt)
        hand_off.check_salt(offs, decoding.hand_off, salt)
        return replace(decoding, salt=salt)

    async def _read(self, request: Request, hold: HoldBytes, make: Callable[[JsonObject], T]) -> T:
        """What ``make`` makes of the body."""
        body = await bodies.whole(request, self._service.limits.body_bytes, hold)
        if len(body) <= json_body.SMALL_BYTES:
            return make(json_body.read_object(body))
        return await self._lanes.run(
            client_of(request), len(body), lambda: make(json_body.read_object(body))
        )

    def _check_choices(self, prompts: int, n: int) -> None:
        most = self._service.driver.max_waiting
        if prompts * n > most:
            field = "n" if n > 1 else "prompt"
            raise invalid(field, f"{prompts} prompts x {n} choices are more than {most} requests")

    def _model(self, name: str) -> Mapping[str, object]:
        """``parent``: the model under an adapter."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "stratakv",
            "parent": None if name == self._service.model else self._service.model,
            "max_model_len": self._service.limits.max_model_len,
        }


def _of_choices(prompts: Sequence[TokenIds], decoding: Decoding) -> Sequence[TokenIds]:
    return [prompt for prompt in prompts for _ in range(decoding.n)]


def build_app(service: Service, crowd: Crowd) -> ASGIApp:
    """The ASGI application of ``service``, whose driver is started by whoever runs it. ``crowd``:
    of the connections over which it is asked."""
    prompts = PromptEncoder(service.tokenizer, service.limits, service.lanes)
    routes = [*Api(service, prompts).routes(), *AdminApi(service).routes()]
    routes += WhyMissApi(service, prompts).routes()
    if service.joins is not None:
        routes += JoinApi(service, service.joins).routes()
    routes += DocsPages(service.version, [route.path for route in routes]).routes()
    app = Starlette(
        routes=routes,
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            ClientGoneError: _gone,
            Exception: _failure,
        },
    )
    app.router.redirect_slashes = False
    guarded = BearerKeys(app, service.api_keys, service.admin_key)
    guarded = MarksJoins(TurnAway(guarded, crowd))
    if service.web.origins:  # outside of the keys: a browser's first question carries none
        guarded = CORSMiddleware(
            guarded,
            allow_origins=service.web.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    paths = [route.path for route in routes]
    return RequestIds(guarded, paths, service.metrics.responded, service.clock)


# Coroutines, although they wait for nothing: for other functions Starlette makes threads.


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own answers: no such path, no such method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    found = ApiError(f"{error.detail}: {where}", status=error.status_code, code=code)
    return JSONResponse(found.body, found.status, error.headers)


async def _gone(_request: Request, _error: Exception) -> Response:
    """Nobody reads this; 499 is what proxies log for it."""
    return Response(status_code=499)


async def _failure(_request: Request, _error: Exception) -> Response:
    """Ours; Starlette raises the error again after this answer, and the server logs it and closes
    the connection, as the answer must say: who used it again would read nothing."""
    error = internal()
    return JSONResponse(error.body, error.status, {"Connection": "close"})
