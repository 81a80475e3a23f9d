"""Answers as OpenAI spells them: whole ones, streamed chunks, usage, log-probabilities.

Owns the JSON shapes. Plain dictionaries and one encoding a chunk: this is the per-token path. A
whole answer is spelled in pieces.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Final, cast

from stratakv.cache.records import CacheUse, TierTokens
from stratakv.core.ids import GroupId, TokenIds
from stratakv.engine.request import CachedTokens, FinishReason
from stratakv.serve.decoding import CACHE_WORDS
from stratakv.serve.errors import ApiError
from stratakv.serve.streams import Choice, Delta, ShownToken
from stratakv.serve.tokenizer import Tokenizer
from stratakv.serve.tool_parsers import CallDelta

Json = dict[str, object]

ENCODER: Final = json.JSONEncoder(separators=(",", ":"))
WHOLE_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
DONE: Final = b"data: [DONE]\n\n"
CACHE_WORD_OF: Final = {use: word for word, use in CACHE_WORDS.items()}
ALTERNATIVE_BYTES: Final = 4
"""A token with its log-probability costs as much as that many bytes of text to be tokenized."""
PIECE: Final = 64
"""Values of an array that are spelled at once."""
CHOICE_DEPTH: Final = 4
"""From an answer to the arrays of its choices' tokens."""
LOWEST_LOGPROB: Final = -9999.0
"""JSON has no infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    id: str
    created: int
    model: str
    tokenizer: Tokenizer
    logprobs: bool
    prompts: Sequence[TokenIds] | None = None
    """Of each choice, where tokens are to be shown beside the text."""

    def _head(self, what: str) -> Json:
        return {"id": self.id, "object": what, "created": self.created, "model": self.model}

    def _ids(self, delta: Delta) -> Json:
        return {} if self.prompts is None else {"token_ids": delta.ids}


class CompletionFormat(_Format):
    """``/v1/completions``."""

    __slots__ = ()

    def chunk(self, delta: Delta) -> Json:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": _finish(delta.finish),
            **self._ids(delta),
            **self._prompt(delta),
        }

    def chunk_head(self) -> Json:
        return self.whole_head()

    def _prompt(self, delta: Delta) -> Json:
        if self.prompts is None or not delta.first:
            return {}
        return {"prompt_token_ids": self.prompts[delta.index].tolist()}

    def whole(self, deltas: Sequence[Delta]) -> Json:
        return self.chunk(merged(deltas))

    def whole_head(self) -> Json:
        return self._head("text_completion")

    def _logprobs(self, tokens: Sequence[ShownToken]) -> Json | None:
        if not self.logprobs:
            return None
        text = self.tokenizer.token_text
        return {
            "tokens": [text(shown.token) for shown in tokens],
            "token_logprobs": [
                None if shown.logprob is None else finite(shown.logprob.chosen) for shown in tokens
            ],
            "top_logprobs": [self._top(shown) for shown in tokens],
            "text_offset": [shown.offset for shown in tokens],
        }

    def _top(self, shown: ShownToken) -> Json | None:
        if shown.logprob is None:
            return None
        text = self.tokenizer.token_text
        return {
            **{text(token): finite(value) for token, value in shown.logprob.top},
            text(shown.token): finite(shown.logprob.chosen),
        }


class ChatFormat(_Format):
    """``/v1/chat/completions``."""

    __slots__ = ()

    def chunk(self, delta: Delta) -> Json:
        message: Json = {"role": "assistant"} if delta.first else {}
        if delta.text or delta.first:
            message["content"] = delta.text if delta.text or not delta.called else None
        if delta.calls:
            message["tool_calls"] = [_call_chunk(call) for call in delta.calls]
        return {
            "index": delta.index,
            "delta": message,
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": _chat_finish(delta),
            **self._ids(delta),
        }

    def chunk_head(self) -> Json:
        return self._head("chat.completion.chunk")

    def whole(self, deltas: Sequence[Delta]) -> Json:
        delta = merged(deltas)
        content = delta.text if delta.text or not delta.called else None
        calls = {"tool_calls": _whole_calls(delta.calls)} if delta.called else {}
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": content, "refusal": None, **calls},
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": _chat_finish(delta),
            **self._ids(delta),
        }

    def whole_head(self) -> Json:
        prompt = {} if self.prompts is None else {"prompt_token_ids": self.prompts[0].tolist()}
        return {**self._head("chat.completion"), **prompt}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> Json | None:
        if not self.logprobs:
            return None
        return {
            "content": [
                {
                    **self._token(shown.token, shown.logprob.chosen),
                    "top_logprobs": [self._token(*pair) for pair in shown.logprob.top],
                }
                for shown in tokens
                if shown.logprob is not None  # a chat shows nothing of its prompt
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> Json:
        return {
            "token": self.tokenizer.token_text(token),
            "logprob": finite(logprob),
            "bytes": self.tokenizer.token_bytes(token),
        }


Format = CompletionFormat | ChatFormat


def size_of(delta: Delta) -> int:
    """What a choice's gain costs to spell, in bytes of ``Lanes``."""
    reports = [shown.logprob for shown in delta.tokens]
    alternatives = sum(1 + len(one.top) for one in reports if one is not None)
    text = len(delta.text) + sum(len(call.arguments) for call in delta.calls)
    return text + ALTERNATIVE_BYTES * (alternatives + len(delta.ids))


def merged(deltas: Sequence[Delta]) -> Delta:
    """All deltas of one choice as one."""
    last = deltas[-1]
    return Delta(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        tokens=tuple(shown for delta in deltas for shown in delta.tokens),
        finish=last.finish,
        first=True,
        ids=tuple(token for delta in deltas for token in delta.ids),
        calls=tuple(call for delta in deltas for call in delta.calls),
        called=last.called,
    )


def usage(
    prompt_tokens: int, choices: Sequence[Choice], n: int, groups: Mapping[GroupId, str]
) -> Json:
    """Token counts of one client request. ``choices`` of one prompt stand together, n of each; a
    prompt counts once, with the cache hits of its first choice (the others may hit the first)."""
    completion = sum(choice.generated for choice in choices)
    found = [choice.cached for choice in choices[::n] if choice.cached is not None]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": cached_details(found, groups),
    }


def cached_details(found: Sequence[CachedTokens], groups: Mapping[GroupId, str]) -> Json:
    """What prompts might do with the cache, and where they came from: by tier, and by cache group
    and tier."""
    use = reduce(and_, [cached.use for cached in found], CacheUse.ALL)
    elsewhere = [cached.prefill for cached in found if cached.prefill is not None]
    prefill = {"prefill": _by_tier(elsewhere)} if elsewhere else {}
    return {
        "cache": CACHE_WORD_OF[use],
        "cached_tokens": sum(cached.total for cached in found),
        "cached_tokens_by_tier": {
            "device": sum(cached.device for cached in found),
            "host": sum(cached.host for cached in found),
            "storage": sum(cached.storage for cached in found),
        },
        "cached_tokens_by_group": {
            group: {
                "device": sum(cached.groups_device[i] for cached in found),
                "host": sum(cached.groups_host[i] for cached in found),
                "storage": sum(cached.groups_storage[i] for cached in found),
            }
            for i, group in groups.items()
        },
        **prefill,
    }


def _by_tier(found: Sequence[TierTokens]) -> Json:
    """What a server that computed prompts for this one had of them."""
    return {
        "cached_tokens": sum(cached.total for cached in found),
        "cached_tokens_by_tier": {
            "device": sum(cached.device for cached in found),
            "host": sum(cached.host for cached in found),
            "storage": sum(cached.storage for cached in found),
        },
    }


def encoded(whole: Mapping[str, object]) -> bytes:
    """An answer as JSON, spelled in pieces: the encoder holds Python's lock from end to end, and an
    answer may have millions of log-probabilities."""
    return "".join(spelled(whole, CHOICE_DEPTH)).encode()


def spelled(value: object, depth: int) -> Iterator[str]:
    """A value in JSON, piece by piece. ``depth``: of containers that are spelled part by part."""
    spell = WHOLE_ENCODER.encode
    comma = ""
    match value:
        case dict() if depth:
            yield "{"
            for name, part in cast("Json", value).items():
                yield f"{comma}{spell(name)}:"
                yield from spelled(part, depth - 1)
                comma = ","
            yield "}"
        case list() if depth:
            yield "["
            for part in cast("list[object]", value):
                yield comma
                yield from spelled(part, depth - 1)
                comma = ","
            yield "]"
        case list():
            parts = cast("list[object]", value)
            yield "["
            for at in range(0, len(parts), PIECE):
                yield comma + spell(parts[at : at + PIECE])[1:-1]
                comma = ","
            yield "]"
        case _:
            yield spell(value)


def event(data: Json) -> bytes:
    """One server-sent event. ASCII, since some clients split lines at U+2028 too."""
    return b"data: " + ENCODER.encode(data).encode() + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """An error after the status line went out."""
    return event(error.body)


def finite(logprob: float) -> float:
    return max(LOWEST_LOGPROB, logprob)


def _finish(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value


def _chat_finish(delta: Delta) -> str | None:
    called = delta.called and delta.finish is FinishReason.STOP
    return "tool_calls" if called else _finish(delta.finish)


def _call_chunk(call: CallDelta) -> Json:
    """The first of a call has its name and id."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _whole_calls(calls: Sequence[CallDelta]) -> list[Json]:
    texts: dict[int, list[str]] = {}
    for call in calls:
        texts.setdefault(call.index, []).append(call.arguments)
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": "".join(texts[call.index])},
        }
        for call in calls
        if call.name is not None
    ]
