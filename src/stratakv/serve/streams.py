"""Tokens of running requests to the text that clients see.

Owns what of a token may be shown when: characters that are complete, text before a stop string
(however it was split into pieces),
log-probabilities of shown tokens. Must not know JSON, nor talk to the engine but through a
subscription.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from stratakv.core.ids import RequestId, TokenIds
from stratakv.engine.request import CachedTokens, FinishReason, Output, TokenLogprob
from stratakv.serve.decoding import TextOptions
from stratakv.serve.errors import request_failed, shut_down
from stratakv.serve.stops import StopMatcher
from stratakv.serve.subscription import Subscription, TimedOutput
from stratakv.serve.tokenizer import StreamDecoder, Tokenizer
from stratakv.serve.tool_parsers import CallDelta, ToolParser


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of the answer; ``offset``: where its text begins, in characters of the answer.
    ``logprob`` None: the first of a prompt, which follows nothing."""

    token: int
    offset: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained; ``finish`` with its last one. ``first``: its first one. ``ids``: all
    tokens since the last one, where they are wanted. ``calls``: what calls of tools gained;
    ``called``: there was one, here or before."""

    index: int
    text: str
    tokens: tuple[ShownToken, ...]
    finish: FinishReason | None
    first: bool
    ids: tuple[int, ...] = ()
    calls: tuple[CallDelta, ...] = ()
    called: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class EchoedPrompt:
    """A prompt as an answer shows it that begins with it. ``offsets``: where the text of each token
    begins, in characters."""

    tokens: tuple[int, ...]
    text: str
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, tokens: TokenIds, tokenizer: Tokenizer, options: TextOptions) -> "EchoedPrompt":
        decoder, pieces, offsets, end = StreamDecoder(tokenizer, special=options.special), [], [], 0
        listed = tokens.tolist()
        for token in listed:
            offsets.append(end)
            pieces.append(decoder.feed(token))
            end += len(pieces[-1])
        pieces.append(decoder.flush())
        return cls(tuple(listed), "".join(pieces), tuple(offsets))

    def shown(self, logprobs: Sequence[TokenLogprob]) -> list[ShownToken]:
        """``logprobs``: of each token but the first."""
        every = zip(self.tokens, self.offsets, (None, *logprobs), strict=True)
        return [ShownToken(*one) for one in every]


class Choice:
    """One request on its way to the client. ``prompt``: what its answer begins with; None: with
    what is generated. ``parser``: of its calls of tools; None: it may have none."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        options: TextOptions,
        stop_tokens: Sequence[int],
        prompt: EchoedPrompt | None = None,
        parser: ToolParser | None = None,
    ) -> None:
        self.index: Final = index
        self._options = options
        self.generated = 0
        """Tokens that the engine made for this choice, the one that ended it included."""
        self.cached: CachedTokens | None = None
        self.finish: FinishReason | None = None
        self._decoder = StreamDecoder(tokenizer, special=options.special)
        self._stops = StopMatcher(options.stop, keep=options.keep_stop)
        self._stop_tokens = frozenset(stop_tokens)
        self._ready: list[str] = []
        self._ids: list[int] = []
        self._hidden: list[ShownToken] = []
        self._decoded = 0  # characters, held ones included
        self._shown = 0  # characters that are before any stop string
        self._taken = 0  # deltas
        self._parser = parser
        self._calls: list[CallDelta] = []
        self._called = False
        self._prompt = prompt
        if prompt is not None:
            self._ready.append(prompt.text)
            self._decoded = self._shown = len(prompt.text)

    def feed(self, output: Output) -> None:
        """Take one output of the engine; ignored once the choice is finished."""
        if self.finish is not None:
            return
        self.finish = output.finish
        self.cached = self.cached or output.cached
        if output.prompt_logprobs is not None:
            assert self._prompt is not None, "only an answer that echoes its prompt scores it"
            self._hidden += self._prompt.shown(output.prompt_logprobs)
        if self._options.prompt_only and output.token is not None:
            self.finish = FinishReason.LENGTH  # the engine has made one, which nobody asked for
            return
        piece = "" if output.token is None else self._piece(output.token, output)
        if output.finish is not None:
            piece += self._decoder.flush()
        self._decoded += len(piece)
        text = self._stops.feed(piece, early=self.generated <= self._options.min_tokens)
        if self._stops.matched:
            self.finish = FinishReason.STOP
        elif output.finish is not None:
            text += self._stops.flush()
        self._shown += len(text)
        if self._parser is not None:
            text = self._read_calls(self._parser, text)
        if text:
            self._ready.append(text)

    def take(self) -> Delta | None:
        """What may be shown since the last call; None if that is nothing."""
        # Once the choice is finished, hidden tokens that begin at the end have no text (or are of
        # the stop string): they show only if no stop string cut them off.
        everything = self.finish is not None and not self._stops.matched
        tokens = tuple(t for t in self._hidden if everything or t.offset < self._shown)
        gained = self._ready or tokens or self._ids or self._calls
        if not gained and self.finish is None:
            return None
        ids = tuple(self._ids)
        self._ids.clear()
        del self._hidden[: len(tokens)]
        text = "".join(self._ready)
        self._ready.clear()
        self._taken += 1
        calls = tuple(self._calls)
        self._calls.clear()
        first = self._taken == 1
        return Delta(self.index, text, tokens, self.finish, first, ids, calls, self._called)

    def _read_calls(self, parser: ToolParser, text: str) -> str:
        """What of ``text`` is of no call."""
        parts = [*parser.feed(text)]
        if self.finish is not None:
            parts += parser.flush()
        self._calls += [part for part in parts if isinstance(part, CallDelta)]
        self._called = self._called or bool(self._calls)
        return "".join(part for part in parts if isinstance(part, str))

    def _piece(self, token: int, output: Output) -> str:
        self.generated += 1
        if self._options.token_ids:
            self._ids.append(token)
        ended = output.finish is FinishReason.STOP and token in self._stop_tokens
        if ended and not self._options.keep_stop:
            return ""  # the token that ends it is no part of the text
        if output.logprob is not None:
            self._hidden.append(ShownToken(token, self._decoded, output.logprob))
        return self._decoder.feed(token)


class Generation:
    """All choices of one client request, while they run.

    ``observe`` is called with the time and output of every token, in order of arrival.
    """

    def __init__(
        self,
        subscription: Subscription,
        choices: Sequence[Choice],
        observe: Callable[[TimedOutput], None],
    ) -> None:
        self.choices: Final = tuple(choices)
        self._subscription = subscription
        self._observe = observe
        self._running: dict[RequestId, Choice] = dict(
            zip(subscription.ids, self.choices, strict=True)
        )

    async def deltas(self) -> AsyncGenerator[list[Delta]]:
        """What the choices gained, as it comes, at most one delta of each at a time.

        Raises what the subscription raises, and ApiError when the server aborts a request or one
        fails.
        """
        while self._running:
            touched: dict[RequestId, Choice] = {}
            for timed in await self._subscription.take():
                output = timed.output
                choice = self._running.get(output.request)
                if choice is None:
                    continue  # its stop string came before
                if output.finish is FinishReason.ABORT:
                    raise shut_down()
                if output.failure is None:
                    self._observe(timed)
                choice.feed(output)
                if output.failure is not None:
                    raise request_failed(output.failure, output.reason)
                touched[output.request] = choice
                if choice.finish is not None:
                    del self._running[output.request]
                    self._subscription.cancel(output.request)
            found = [delta for choice in touched.values() if (delta := choice.take()) is not None]
            if found:
                yield found
