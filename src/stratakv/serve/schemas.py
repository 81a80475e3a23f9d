"""What clients may ask for. A request body in, a frozen record out, or a 400 that names the field.

Owns the fields of ``/v1/completions`` and ``/v1/chat/completions``: which are honoured, which are
harmless, which are refused because ignoring them would change the answer. Must not tokenize.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar, cast

import numpy as np

from stratakv.cache.records import CacheUse
from stratakv.core.choices import MAX_NAME_CHARS
from stratakv.core.ids import TokenIds
from stratakv.serve import fields, hand_off
from stratakv.serve.errors import ApiError, invalid, too_long
from stratakv.serve.fields import JsonObject
from stratakv.serve.hand_off import HandOffRequest

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 1024
MAX_LOGPROBS: Final = 20
LARGEST: Final = (1 << 31) - 1
"""Of whole numbers: the engine keeps them in 32 bits."""
MAX_PRIORITY: Final = 100

WHOLE: Final[Mapping[str, tuple[int, int]]] = {
    "n": (1, MAX_CHOICES), "max_tokens": (1, LARGEST), "max_completion_tokens": (1, LARGEST),
    "top_k": (-1, LARGEST), "seed": (-(1 << 63), (1 << 63) - 1), "priority": (0, MAX_PRIORITY),
    "logprobs": (0, MAX_LOGPROBS), "top_logprobs": (0, MAX_LOGPROBS),
}  # fmt: skip
"""Fields that hold a whole number: the least and the most. Of a chat ``logprobs`` is a boolean."""
NUMBERS: Final[Mapping[str, tuple[float, float]]] = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0)}
"""The same of other numbers; a ``top_p`` of 0 is refused too."""
TEXTS: Final[Mapping[str, int]] = {"model": MAX_NAME_CHARS, "cache_salt": MAX_NAME_CHARS}
"""Names: the most characters."""

Message: TypeAlias = Mapping[str, str]
T = TypeVar("T")

HARMLESS: Final = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls", "prediction",
})  # fmt: skip
"""Fields that cannot change the answer."""

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "best_of": (1,), "echo": (False,), "suffix": ("",), "frequency_penalty": (0,),
    "presence_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,),
    "logit_bias": ({},), "min_p": (0,), "min_tokens": (0,), "use_beam_search": (False,),
    "skip_special_tokens": (True,), "tools": ([],), "tool_choice": ("none", "auto"),
    "functions": ([],), "function_call": ("none", "auto"), "response_format": ({"type": "text"},),
    "modalities": (["text"],), "audio": (), "reasoning_effort": (), "verbosity": ("medium",),
    "web_search_options": (), "chat_template_kwargs": ({},), "no_stop_trim": (False,),
    "return_hidden_states": (False,), "continue_final_message": (False,),
    "separate_reasoning": (True, False), "stream_reasoning": (True, False),
    "include_reasoning": (True, False),
}  # fmt: skip
"""Fields that are not supported, with the values that ask for nothing."""

DECODING: Final = frozenset({
    "model", "n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "logprobs",
    "stream", "stream_options", "ignore_eos", "cache", "cache_salt", "priority",
}) | hand_off.FIELDS  # fmt: skip
COMPLETION: Final = DECODING | {"prompt"}
CHAT: Final = DECODING | {"messages", "max_completion_tokens", "top_logprobs"}

CACHE_WORDS: Final[Mapping[str, CacheUse]] = {
    "default": CacheUse.ALL,
    "no-store": CacheUse.READ,
    "bypass": CacheUse.STORE,
    "off": CacheUse.NOTHING,
}

ROLES: Final[Mapping[str, str]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
}  # fmt: skip
"""Role -> the role a chat template knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How to continue a prompt. ``logprobs``: alternatives wanted beside each token, None: no
    report. ``max_tokens`` None: the endpoint's default. ``seed`` None: a fresh one. ``priority``:
    what evicts by priority keeps the higher ones longer; it decides nothing else. ``cache``: what
    the request may do with the cache. ``salt`` None: the body has none. ``hand_off``: between
    servers."""

    n: int
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    logprobs: int | None
    ignore_eos: bool
    cache: CacheUse
    salt: str | None
    priority: int
    stream: bool
    include_usage: bool
    hand_off: HandOffRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompletionCall:
    model: str | None
    prompts: tuple[str | TokenIds, ...]
    decoding: Decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    model: str | None
    messages: tuple[Message, ...]
    decoding: Decoding


def completion_call(data: JsonObject, vocab: int) -> CompletionCall:
    """Read a body of ``/v1/completions``; token ids must be below ``vocab``."""
    _check_fields(data, COMPLETION)
    logprobs = _whole(data, "logprobs", None)
    return CompletionCall(
        model=_name(data, "model", None),
        prompts=_prompts(data.get("prompt"), vocab),
        decoding=_decoding(data, logprobs, "max_tokens"),
    )


def chat_call(data: JsonObject) -> ChatCall:
    """Read a body of ``/v1/chat/completions``."""
    _check_fields(data, CHAT)
    wanted = fields.boolean(data, "logprobs", default=False)
    top = _whole(data, "top_logprobs", None)
    if top is not None and not wanted:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true")
    newer = data.get("max_completion_tokens") is not None
    return ChatCall(
        model=_name(data, "model", None),
        messages=messages(data.get("messages")),
        decoding=_decoding(
            data, (top or 0) if wanted else None, "max_completion_tokens" if newer else "max_tokens"
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeCall:
    """``prompt``: a text, or a conversation. ``special``: with what the tokenizer adds."""

    prompt: str | tuple[Message, ...]
    special: bool


def tokenize_call(data: JsonObject, max_chars: int) -> TokenizeCall:
    """Read a body of ``/tokenize``."""
    if data.get("messages") is not None:
        return TokenizeCall(prompt=messages(data["messages"]), special=False)
    prompt = fields.text(data, "prompt", None, max_chars=max_chars)
    if prompt is None:
        raise invalid("prompt", "'prompt' or 'messages' is required")
    special = fields.boolean(data, "add_special_tokens", default=True)
    return TokenizeCall(prompt=prompt, special=special)


def detokenize_call(data: JsonObject, vocab: int, most: int) -> TokenIds:
    """Read a body of ``/detokenize``: a token of two bytes may stand for a hundred, so that a text
    is bounded by the model's length here as well."""
    found = token_ids("tokens", data.get("tokens"), vocab)
    if len(found) > most:
        message = f"this model's maximum context length is {most} tokens, 'tokens' holds"
        raise too_long("tokens", f"{message} {len(found)}")
    return found


def messages(value: object) -> tuple[Message, ...]:
    """A conversation as a chat template takes it: role and plain text."""
    if value is None:
        raise ApiError(
            "'messages' is required", param="messages", code="missing_required_parameter"
        )
    found = fields.array("messages", value)
    if not found:
        raise invalid("messages", "'messages' must hold at least one message")
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(found))


def token_ids(param: str, value: object, vocab: int) -> TokenIds:
    """A list of token ids as int32 [n], n >= 1."""
    if isinstance(value, fields.IntegerArray):
        _check_tokens(param, int(value.values.min()), int(value.values.max()), vocab)
        return value.values.astype(np.int32)
    found = fields.array(param, value)
    if not found:
        raise invalid(param, f"'{param}' must hold at least one token")
    for kind in set(map(type, found)) - {int}:
        raise wrong_element(param, next(x for x in found if type(x) is kind))
    tokens = cast("list[int]", found)
    _check_tokens(param, min(tokens), max(tokens), vocab)
    return np.array(tokens, np.int32)


def _check_tokens(param: str, low: int, high: int, vocab: int) -> None:
    if low < 0 or high >= vocab:
        worst = fields.brief(low if low < 0 else high)
        raise invalid(param, f"'{param}' holds token {worst}; the vocabulary is 0 to {vocab - 1}")


def wrong_element(param: str, value: object) -> ApiError:
    return fields.wrong_type(param, "token ids", value)


def _check_fields(data: JsonObject, known: frozenset[str]) -> None:
    for name in data.keys() - known - HARMLESS:
        value = data[name]
        allowed = NEUTRAL.get(name)
        if name == "min_tokens" and data.get("kv_transfer_params"):
            allowed = (0, 1)  # vllm-router's way to ask for one token, where none is shown
        if allowed is None:
            message = f"unrecognized request argument: '{name}'"
            raise ApiError(message, param=name, code="unknown_parameter")
        same_as_n = name == "best_of" and value == data.get("n")
        if value is not None and value not in allowed and not same_as_n:
            message = f"'{name}' is not supported here"
            raise ApiError(message, param=name, code="unsupported_parameter")


def _decoding(data: JsonObject, logprobs: int | None, max_tokens: str) -> Decoding:
    stream = fields.boolean(data, "stream", default=False)
    if data.get("stream_options") is not None and not stream:
        raise invalid("stream_options", "'stream_options' needs 'stream': true")
    options = fields.child(data, "stream_options")
    # -1 is vLLM's word for "off"; ours is 0.
    top_k = _whole(data, "top_k", 0)
    top_p = _number(data, "top_p", 1.0)
    if top_p == 0:
        raise invalid("top_p", "invalid 'top_p': it must be above 0; for greedy, temperature is 0")
    return Decoding(
        n=_whole(data, "n", 1),
        max_tokens=_whole(data, max_tokens, None),
        temperature=_number(data, "temperature", 1.0),
        top_p=top_p,
        top_k=max(top_k, 0),
        seed=_whole(data, "seed", None),
        stop=_stops(data.get("stop")),
        logprobs=logprobs,
        ignore_eos=fields.boolean(data, "ignore_eos", default=False),
        cache=fields.choice(data, "cache", CacheUse.ALL, CACHE_WORDS),
        salt=_name(data, "cache_salt", "" if "cache_salt" in data else None),
        priority=_whole(data, "priority", 0),
        stream=stream,
        include_usage=fields.boolean(options, "include_usage", default=False),
        hand_off=hand_off.asked_for(data),
    )


def _whole(data: JsonObject, name: str, default: T) -> int | T:
    low, high = WHOLE[name]
    return fields.integer(data, name, default, low=low, high=high)


def _number(data: JsonObject, name: str, default: T) -> float | T:
    low, high = NUMBERS[name]
    return fields.number(data, name, default, low=low, high=high)


def _name(data: JsonObject, name: str, default: T) -> str | T:
    return fields.text(data, name, default, max_chars=TEXTS[name])


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else fields.array("stop", value)
    if len(found) > MAX_STOPS:
        raise invalid("stop", f"'stop' holds {len(found)} strings, at most {MAX_STOPS} are allowed")
    stops: list[str] = []
    for stop in found:
        if not isinstance(stop, str):
            raise fields.wrong_type("stop", "a string or an array of strings", stop)
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise invalid("stop", f"a 'stop' string has 1 to {MAX_STOP_CHARS} characters")
        stops.append(fields.well_formed("stop", stop))
    return tuple(stops)


def _prompts(value: object, vocab: int) -> tuple[str | TokenIds, ...]:
    if value is None:
        raise ApiError("'prompt' is required", param="prompt", code="missing_required_parameter")
    if isinstance(value, str):
        return (_text_prompt("prompt", value),)
    if isinstance(value, fields.IntegerArray):
        return (token_ids("prompt", value, vocab),)
    found = fields.array("prompt", value)
    if not found:
        raise invalid("prompt", "'prompt' must not be empty")
    if type(found[0]) is int:
        return (token_ids("prompt", found, vocab),)
    return tuple(
        _text_prompt(f"prompt[{i}]", one)
        if isinstance(one, str)
        else token_ids(f"prompt[{i}]", one, vocab)
        for i, one in enumerate(found)
    )


def _text_prompt(param: str, value: str) -> str:
    if not value:
        raise invalid(param, f"'{param}' must not be empty")
    return fields.well_formed(param, value)


def _message(param: str, value: object) -> Message:
    if not isinstance(value, dict):
        raise fields.wrong_type(param, "an object", value)
    data = cast("JsonObject", value)
    role = data.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{param}.role", f"'{param}.role' must be one of {', '.join(ROLES)}")
    # Clients echo what they were sent: empty or null extras of an answer say nothing.
    for name in data.keys() - {"role", "content", "name"}:
        if data[name]:
            message = f"'{param}.{name}' is not supported here"
            raise ApiError(message, param=f"{param}.{name}", code="unsupported_parameter")
    content = _content(f"{param}.content", data.get("content"))
    name = data.get("name")
    if name is None:
        return {"role": ROLES[role], "content": content}
    if not isinstance(name, str):
        raise fields.wrong_type(f"{param}.name", "a string", name)
    return {"role": ROLES[role], "content": content, "name": fields.well_formed("name", name)}


def _content(param: str, value: object) -> str:
    """A string, or the lines of a list of text parts."""
    if isinstance(value, str):
        return fields.well_formed(param, value)
    if value is None:
        raise ApiError(f"'{param}' is required", param=param, code="missing_required_parameter")
    return "\n".join(
        _part(f"{param}[{i}]", part) for i, part in enumerate(fields.array(param, value))
    )


def _part(param: str, value: object) -> str:
    if not isinstance(value, dict):
        raise fields.wrong_type(param, "an object", value)
    data = cast("JsonObject", value)
    if data.get("type") != "text":
        raise invalid(f"{param}.type", f"'{param}.type' must be 'text': this model reads text only")
    found = data.get("text")
    if not isinstance(found, str):
        raise fields.wrong_type(f"{param}.text", "a string", found)
    return fields.well_formed(f"{param}.text", found)
