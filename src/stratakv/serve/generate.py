"""One client request from parsed call to answer: prompts for the engine, text for the client.

Owns the life of a client request: its subscription, the watch on its connection, its accounts.
Must not parse bodies (``schemas``) nor spell answers (``replies``).
"""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, replace
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stratakv.core.ids import RequestId, TokenIds
from stratakv.engine.request import FinishReason, Output, Prompt, TransferSession
from stratakv.serve.decoding import Decoding
from stratakv.serve.errors import ApiError, ClientGoneError, internal, invalid, too_long
from stratakv.serve.hand_off import HandOffPlan
from stratakv.serve.lanes import EACH_BYTES, client_of
from stratakv.serve.metrics import TIERS
from stratakv.serve.replies import (
    DONE,
    Format,
    Json,
    encoded,
    error_event,
    event,
    size_of,
    usage,
)
from stratakv.serve.service import Service
from stratakv.serve.streams import Choice, Delta, EchoedPrompt, Generation
from stratakv.serve.subscription import Subscription, TimedOutput
from stratakv.serve.tool_parsers import ToolParser
from stratakv.serve.tracing import ABORTED, RequestSpan, traced

log = logging.getLogger(__name__)

SEED_MASK: Final = (1 << 64) - 1
STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that buffers would hold tokens back
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateCall:
    """What both endpoints come down to. ``adapter``: "" for none. ``field``: where the prompts
    stood. ``default_tokens``: most tokens of an answer to a call without ``max_tokens``. ``plan``:
    of its hand-off between servers. ``id``: of its requests to the engine, like no other's.
    ``parser``: makes one of an answer's calls of tools; None: there are none."""

    id: str
    prompts: Sequence[TokenIds]
    adapter: str
    decoding: Decoding
    format: Format
    field: str
    default_tokens: int
    start_s: float
    plan: HandOffPlan
    parser: Callable[[], ToolParser | None]


def engine_prompts(service: Service, call: GenerateCall) -> tuple[Prompt, ...]:
    """One prompt for the engine per prompt and choice, choices of one prompt together."""
    decoding = call.decoding
    fresh = secrets.randbits(64)
    own = () if decoding.ignore_eos else service.stop_tokens
    if decoding.sampling.grammar is not None:
        own = service.grammar_stops
    stop_tokens = tuple(dict.fromkeys((*own, *decoding.sampling.stop_tokens)))
    prompts: list[Prompt] = []
    for tokens in call.prompts:
        if len(tokens) == 0 or int(tokens.max()) >= service.limits.vocab:
            raise invalid(call.field, "the prompt is empty or holds a token the model has not")
        max_tokens = _max_tokens(service, call, len(tokens))
        for choice in range(decoding.n):
            session = call.plan.sessions[len(prompts)]
            if session is not None and decoding.sampling.prompt_logprobs is not None:
                message = "'echo' with 'logprobs' is not supported between servers"
                raise invalid("echo", message)
            sampling = replace(
                decoding.sampling,
                max_tokens=max_tokens,
                min_tokens=min(decoding.sampling.min_tokens, max_tokens),
                seed=_seed(decoding.seed, choice, fresh, session),
                stop_tokens=stop_tokens,
            )
            id_ = RequestId(f"{call.id}-{len(prompts)}")
            prompts.append(
                Prompt(
                    id=id_,
                    tokens=tokens,
                    sampling=sampling,
                    salt=decoding.salt or "",
                    adapter=call.adapter,
                    priority=decoding.priority,
                    use=decoding.cache,
                    session=session,
                )
            )
    return tuple(prompts)


def _seed(asked: int | None, choice: int, fresh: int, session: TransferSession | None) -> int:
    """Of a choice of a request that has ``asked`` for a seed, or for none. Where two servers share
    the request they have to draw alike: from the name that both know."""
    if asked is None and session is not None:
        digest = hashlib.blake2b(session.name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")
    return derived_seed(fresh if asked is None else asked, choice)


def derived_seed(seed: int, choice: int) -> int:
    """Seed of one of n choices, 64 bits; the first is the client's own, so that n = 1 and the first
    of n are the same answer."""
    if choice == 0:
        return seed & SEED_MASK
    data = (seed & SEED_MASK).to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


async def answer(
    service: Service, request: Request, call: GenerateCall
) -> "Response | EventStream":
    """Run ``call`` in the engine. Raises ApiError as long as no status line has gone out."""
    client = client_of(request)
    size = EACH_BYTES * len(call.prompts) * call.decoding.n
    if call.decoding.text.echo:
        size += sum(tokens.nbytes for tokens in call.prompts)
    prompts, choices = await service.lanes.run(client, size, lambda: _begun(service, call))
    with ExitStack() as stack:
        subscription = stack.enter_context(service.driver.subscribe(prompts))
        watch = asyncio.create_task(_watch(request.receive, subscription))
        stack.callback(watch.cancel)
        account = _Account(service, call, prompts, choices, traced(request.headers))
        stack.callback(account.close)
        await subscription.accepted()
        generation = Generation(subscription, choices, account.observe)
        if call.plan.params is not None:
            watch.cancel()  # from now on the server that decodes says whether it is wanted
            service.detached.run(_go_on(generation, stack.pop_all()))
            return _named(service, call, generation, call.plan.params)
        if call.decoding.stream:
            return EventStream(_chunks(service, call, generation), stack.pop_all())
        return await _whole(service, client, call, generation)


async def _go_on(generation: Generation, cleanup: ExitStack) -> None:
    """Until the requests have ended, to which nobody listens here."""
    with cleanup, suppress(ApiError):
        async with aclosing(generation.deltas()) as deltas:
            async for _ in deltas:
                pass


def _named(
    service: Service, call: GenerateCall, generation: Generation, params: Mapping[str, object]
) -> Response:
    """An answer without a token, for a router that brings ``params`` to the server that decodes."""
    empty = [
        Delta(each.index, "", (), FinishReason.LENGTH, first=True) for each in generation.choices
    ]
    whole = {
        **call.format.whole_head(),
        "choices": [call.format.whole([delta]) for delta in empty],
        "usage": _usage(service, call, generation),
        "kv_transfer_params": params,
    }
    return Response(encoded(whole), media_type="application/json")


def _begun(service: Service, call: GenerateCall) -> tuple[tuple[Prompt, ...], list[Choice]]:
    prompts, options, n = engine_prompts(service, call), call.decoding.text, call.decoding.n
    echoed: list[EchoedPrompt | None] = [None] * len(call.prompts)
    if options.echo:
        echoed = [EchoedPrompt.of(one, service.tokenizer, options) for one in call.prompts]
    choices = [
        Choice(
            i,
            service.tokenizer,
            options,
            prompt.sampling.stop_tokens,
            echoed[i // n],
            call.parser(),
        )
        for i, prompt in enumerate(prompts)
    ]
    return prompts, choices


class EventStream:
    """The ASGI response of a streamed answer; owns what ``cleanup`` releases."""

    def __init__(self, chunks: AsyncIterator[bytes], cleanup: ExitStack) -> None:
        self._chunks = chunks
        self._cleanup = cleanup

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        with self._cleanup:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            try:
                async for chunk in self._chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                last = DONE
            except ClientGoneError:
                return
            except ApiError as error:
                last = error_event(error) + DONE
            except Exception:  # the status line is out: the stream must say it
                log.exception("a streamed answer failed")
                last = error_event(internal()) + DONE
            await send({"type": "http.response.body", "body": last})


async def _watch(receive: Receive, subscription: Subscription) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    subscription.fail(ClientGoneError("the client closed the connection"))


async def _chunks(
    service: Service, call: GenerateCall, generation: Generation
) -> AsyncIterator[bytes]:
    head = call.format.chunk_head()
    decoding = call.decoding
    tail: Json = {"usage": None} if decoding.include_usage else {}
    async with aclosing(generation.deltas()) as deltas:
        async for found in deltas:
            if decoding.usage_each:
                tail = {"usage": _usage(service, call, generation)}
            yield b"".join(
                [event({**head, "choices": [call.format.chunk(delta)], **tail}) for delta in found]
            )
    if decoding.include_usage:
        yield event({**head, "choices": [], "usage": _usage(service, call, generation)})


async def _whole(
    service: Service, client: str, call: GenerateCall, generation: Generation
) -> Response:
    parts: list[list[Delta]] = [[] for _ in generation.choices]
    size = EACH_BYTES * len(parts)
    async with aclosing(generation.deltas()) as deltas:
        async for found in deltas:
            for delta in found:
                parts[delta.index].append(delta)
                size += size_of(delta)

    def work() -> Response:
        whole = {
            **call.format.whole_head(),
            "choices": [call.format.whole(part) for part in parts],
            "usage": _usage(service, call, generation),
        }
        return Response(encoded(whole), media_type="application/json")

    return await service.lanes.run(client, size, work)


def _usage(service: Service, call: GenerateCall, generation: Generation) -> Json:
    prompt_tokens = sum(len(tokens) for tokens in call.prompts)
    return usage(prompt_tokens, generation.choices, call.decoding.n, service.groups)


def _max_tokens(service: Service, call: GenerateCall, prompt_tokens: int) -> int:
    most = service.limits.max_model_len
    room = most - prompt_tokens
    if room < 1:
        message = (
            f"this model's maximum context length is {most} tokens, "
            f"your prompt has {prompt_tokens} and leaves no room for an answer"
        )
        raise too_long(call.field, message)
    wanted = call.decoding.max_tokens
    if wanted is None:
        return min(call.default_tokens, room)
    wanted = max(1, wanted)  # the engine makes at least one
    if wanted > room:
        message = (
            f"this model's maximum context length is {most} tokens, you asked for "
            f"{prompt_tokens + wanted}: {prompt_tokens} in the prompt, {wanted} to generate"
        )
        raise too_long("max_tokens", message)
    return wanted


class _Account:
    """One client request in the metrics."""

    def __init__(
        self,
        service: Service,
        call: GenerateCall,
        prompts: Sequence[Prompt],
        choices: Sequence[Choice],
        caller: Mapping[str, str],
    ) -> None:
        self._service = service
        self._metrics = service.metrics
        self._call = call
        self._caller = caller
        self._start_s = call.start_s
        self._first_s: float | None = None
        self._cached: dict[str, int] = dict.fromkeys(TIERS, 0)
        self._prompt_tokens = {prompt.id: len(prompt.tokens) for prompt in prompts}
        self._last_s: dict[RequestId, float] = {}
        self._choices = choices

    def observe(self, timed: TimedOutput) -> None:
        output = timed.output
        last_s = self._last_s.get(output.request)
        if last_s is None:
            self._first(timed.at_s, output)
        else:
            self._metrics.between_tokens_s.observe(timed.at_s - last_s)
        self._last_s[output.request] = timed.at_s

    def _first(self, at_s: float, output: Output) -> None:
        """The first token of a choice."""
        self._metrics.first_token_s.observe(at_s - self._start_s)
        self._metrics.prompted(self._prompt_tokens[output.request], output.cached)
        if self._first_s is None:
            self._first_s = at_s
        if output.cached is not None:
            tiers = (output.cached.device, output.cached.host, output.cached.storage)
            for tier, tokens in zip(TIERS, tiers, strict=True):
                self._cached[tier] += tokens

    def close(self) -> None:
        for choice in self._choices:
            if choice.finish is None:
                self._metrics.aborted(choice.generated)
            else:
                self._metrics.finished(choice.finish.value, choice.generated)
        end_s = self._service.clock.now_s()
        if all(choice.finish is not None for choice in self._choices):
            self._metrics.whole_s.observe(end_s - self._start_s)
        self._service.spans.export(self._span(end_s))

    def _span(self, end_s: float) -> RequestSpan:
        call, sampling = self._call, self._call.decoding.sampling
        reasons = [choice.finish for choice in self._choices]
        return RequestSpan(
            caller=self._caller,
            id=call.id,
            model=self._service.model,
            start_s=self._start_s,
            first_s=self._first_s,
            end_s=end_s,
            prompt_tokens=sum(len(tokens) for tokens in call.prompts),
            generated_tokens=sum(choice.generated for choice in self._choices),
            cached=self._cached,
            finish=[ABORTED if reason is None else reason.value for reason in reasons],
            n=call.decoding.n,
            max_tokens=call.decoding.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )
