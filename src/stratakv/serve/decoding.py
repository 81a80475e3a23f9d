"""How a prompt is to be continued, as a body says it: what both endpoints share.

Owns the fields that decide which token comes next and what of it is shown. Must not know endpoints
(``schemas``), nor tokenize.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar, cast

from stratakv.cache.records import CacheUse
from stratakv.core.choices import MAX_NAME_CHARS
from stratakv.engine.grammars import Grammar
from stratakv.engine.request import SamplingParams
from stratakv.serve import fields, hand_off, structured_outputs
from stratakv.serve.errors import ApiError, invalid
from stratakv.serve.fields import JsonObject
from stratakv.serve.hand_off import HandOffRequest, RemoteDecode, RemotePrefill

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 64
_STOPS: Final = "a string or an array of strings"
MAX_STOP_CHARS: Final = 1024
MAX_TOKEN_LIST: Final = 1024
"""Of token ids in ``stop_token_ids`` and ``logit_bias``."""
MAX_LOGPROBS: Final = 20
LARGEST: Final = (1 << 31) - 1
"""Of whole numbers: the engine keeps them in 32 bits."""
MAX_PRIORITY: Final = 100
LARGEST_BIAS: Final = 100.0

WHOLE: Final[Mapping[str, tuple[int, int]]] = {
    "n": (1, MAX_CHOICES), "max_tokens": (0, LARGEST), "max_completion_tokens": (1, LARGEST),
    "top_k": (-1, LARGEST), "seed": (-(1 << 63), (1 << 63) - 1), "priority": (0, MAX_PRIORITY),
    "logprobs": (0, MAX_LOGPROBS), "top_logprobs": (0, MAX_LOGPROBS), "min_tokens": (0, LARGEST),
    "truncate_prompt_tokens": (-1, LARGEST),
}  # fmt: skip
"""Fields that hold a whole number: the least and the most. Of a chat ``logprobs`` is a boolean; no
token at all is only asked for with ``echo``."""
NUMBERS: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0), "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}  # fmt: skip
"""The same of other numbers; a ``top_p`` of 0 is refused too."""
TEXTS: Final[Mapping[str, int]] = {
    "model": MAX_NAME_CHARS, "cache_salt": MAX_NAME_CHARS, "rid": 128, "request_id": 128,
}  # fmt: skip
"""Names: the most characters."""

DECODING: Final = frozenset({
    "model", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "stop_token_ids", "min_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias", "logprobs", "stream", "stream_options", "ignore_eos", "cache", "cache_salt",
    "priority", "skip_special_tokens", "include_stop_str_in_output", "no_stop_trim",
    "return_token_ids", "rid", "request_id",
}) | hand_off.FIELDS | structured_outputs.FIELDS  # fmt: skip

STREAM_OPTIONS: Final = ("include_usage", "continuous_usage_stats", "include_obfuscation")
"""The last hides the lengths of tokens from who sees the line: nothing is added here."""

CACHE_WORDS: Final[Mapping[str, CacheUse]] = {
    "default": CacheUse.ALL,
    "no-store": CacheUse.READ,
    "bypass": CacheUse.STORE,
    "off": CacheUse.NOTHING,
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What of the tokens becomes text. ``stop``: strings that end it. ``min_tokens``: before so
    many no string does. ``keep_stop``: the string or token that ended it is shown. ``special``:
    special tokens are shown. ``token_ids``: the answer has tokens beside its text. ``echo``: it
    begins with its prompt; ``prompt_only``: and ends there."""

    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    keep_stop: bool = False
    special: bool = False
    token_ids: bool = False
    echo: bool = False
    prompt_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """``sampling``: of each choice, but for its seed and its most tokens; ``stop_tokens`` are those
    of the body. ``max_tokens`` None: the endpoint's default. ``seed`` None: a fresh one.
    ``form_field``: which field has the answer's form, "" if none.
    ``priority``: what evicts by priority keeps the higher ones longer; it decides nothing else.
    ``cache``: what the request may do with the cache. ``salt`` None: the body has none. ``id``: the
    client's own name for the request. ``hand_off``: between servers."""

    n: int
    sampling: SamplingParams
    text: TextOptions
    max_tokens: int | None
    seed: int | None
    ignore_eos: bool
    form_field: str
    cache: CacheUse
    salt: str | None
    priority: int
    stream: bool
    include_usage: bool
    usage_each: bool
    id: str | None
    hand_off: HandOffRequest | None


def decoding(
    data: JsonObject,
    vocab: int,
    logprobs: int | None,
    max_tokens: str,
    form: tuple[str, Grammar] | None,
) -> Decoding:
    """Token ids must be below ``vocab``; ``max_tokens``: the field that holds the most tokens;
    ``form``: what the answer has to be, and the field that says so."""
    stream = fields.boolean(data, "stream", default=False)
    options = _stream_options(data, stream=stream)
    transfer = hand_off.asked_for(data)
    sampling = _sampling(data, vocab, logprobs, transfer)
    if form is not None:
        sampling = replace(sampling, grammar=form[1])
    ignore_eos = fields.boolean(data, "ignore_eos", default=False)
    for field, given in (("min_tokens", sampling.min_tokens), ("ignore_eos", ignore_eos)):
        if given and sampling.grammar is not None:
            raise invalid(field, f"'{field}' has no meaning where an answer ends with its form")
    echo = fields.boolean(data, "echo", default=False)
    most = _most_tokens(data, max_tokens, echo=echo)
    cache = fields.choice(data, "cache", CacheUse.ALL, CACHE_WORDS)
    if echo and logprobs is not None:
        if stream or transfer is not None:
            message = "'echo' with 'logprobs' is not supported "
            message += "where the answer is streamed" if stream else "between servers"
            raise invalid("echo", message)
        # A token whose keys and values are cached has no logits: all are computed.
        sampling, cache = replace(sampling, prompt_logprobs=logprobs), cache & ~CacheUse.READ
    if most is not None and sampling.min_tokens > most:
        message = f"'min_tokens' is {sampling.min_tokens}, at most '{max_tokens}' ({most})"
        raise invalid("min_tokens", f"{message} is allowed")
    return Decoding(
        n=whole(data, "n", 1),
        sampling=sampling,
        text=_text_options(data, sampling.min_tokens, echo=echo, prompt_only=most == 0),
        max_tokens=most,
        seed=whole(data, "seed", None),
        ignore_eos=ignore_eos,
        form_field="" if form is None else form[0],
        cache=cache,
        salt=name_of(data, "cache_salt", "" if "cache_salt" in data else None),
        priority=whole(data, "priority", 0),
        stream=stream,
        include_usage=options["include_usage"],
        usage_each=options["include_usage"] and options["continuous_usage_stats"],
        id=_id(data),
        hand_off=transfer,
    )


def whole(data: JsonObject, name: str, default: T) -> int | T:
    low, high = WHOLE[name]
    return fields.integer(data, name, default, low=low, high=high)


def _stream_options(data: JsonObject, *, stream: bool) -> Mapping[str, bool]:
    if data.get("stream_options") is not None and not stream:
        raise invalid("stream_options", "'stream_options' needs 'stream': true")
    found = fields.child(data, "stream_options")
    for name in found.keys() - STREAM_OPTIONS:
        message = f"unrecognized request argument: 'stream_options.{name}'"
        raise ApiError(message, param=f"stream_options.{name}", code="unknown_parameter")
    return {name: fields.boolean(found, name, default=False) for name in STREAM_OPTIONS}


def _most_tokens(data: JsonObject, name: str, *, echo: bool) -> int | None:
    found = whole(data, name, None)
    if found == 0 and not echo:
        message = f"expected 1 to {LARGEST}, got 0, which 'echo' allows in a completion"
        raise invalid(name, f"invalid '{name}': {message}")
    return found


def name_of(data: JsonObject, name: str, default: T) -> str | T:
    return fields.text(data, name, default, max_chars=TEXTS[name])


def _number(data: JsonObject, name: str, default: float) -> float:
    low, high = NUMBERS[name]
    return fields.number(data, name, default, low=low, high=high)


def _sampling(
    data: JsonObject, vocab: int, logprobs: int | None, transfer: HandOffRequest | None
) -> SamplingParams:
    top_p = _number(data, "top_p", 1.0)
    if top_p == 0:
        raise invalid("top_p", "invalid 'top_p': it must be above 0; for greedy, temperature is 0")
    min_tokens = whole(data, "min_tokens", 0)
    if isinstance(transfer, RemoteDecode):
        min_tokens = 0  # vllm-router's own, over the client's
    if isinstance(transfer, RemotePrefill) and min_tokens:
        message = "'min_tokens' is not supported where 'kv_transfer_params' names another server:"
        raise invalid("min_tokens", f"{message} it does not reach that server")
    return SamplingParams(
        max_tokens=LARGEST,
        temperature=_number(data, "temperature", 1.0),
        top_p=top_p,
        top_k=max(whole(data, "top_k", 0), 0),  # -1 is vLLM's word for "off"; ours is 0
        min_p=_number(data, "min_p", 0.0),
        stop_tokens=_stop_tokens(data, vocab),
        logprobs=logprobs,
        min_tokens=min_tokens,
        frequency_penalty=_number(data, "frequency_penalty", 0.0),
        presence_penalty=_number(data, "presence_penalty", 0.0),
        repetition_penalty=_number(data, "repetition_penalty", 1.0),
        logit_bias=_logit_bias(data, vocab),
    )


def _text_options(
    data: JsonObject, min_tokens: int, *, echo: bool, prompt_only: bool
) -> TextOptions:
    keep = fields.boolean(data, "include_stop_str_in_output", default=False)
    return TextOptions(
        stop=_stops(data.get("stop")),
        min_tokens=min_tokens,
        keep_stop=keep or fields.boolean(data, "no_stop_trim", default=False),  # SGLang's name
        special=not fields.boolean(data, "skip_special_tokens", default=True),
        token_ids=fields.boolean(data, "return_token_ids", default=False),
        echo=echo,
        prompt_only=prompt_only,
    )


def _id(data: JsonObject) -> str | None:
    """SGLang's name for it, or vLLM's."""
    found = name_of(data, "rid", None) or name_of(data, "request_id", None)
    if found is not None and not (found.isascii() and found.isprintable()):
        field = "rid" if data.get("rid") else "request_id"
        raise invalid(field, f"invalid '{field}': printable ASCII characters are allowed")
    return found


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else fields.array("stop", value, _STOPS)
    if len(found) > MAX_STOPS:
        raise invalid("stop", f"'stop' holds {len(found)} strings, at most {MAX_STOPS} are allowed")
    stops: list[str] = []
    for stop in found:
        if not isinstance(stop, str):
            raise fields.wrong_type("stop", _STOPS, stop)
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise invalid("stop", f"a 'stop' string has 1 to {MAX_STOP_CHARS} characters")
        stops.append(fields.well_formed("stop", stop))
    return tuple(stops)


def _stop_tokens(data: JsonObject, vocab: int) -> tuple[int, ...]:
    field = "stop_token_ids"
    if data.get(field) is None:
        return ()
    found = fields.array(field, data[field])
    _check_count(field, len(found))
    for token in found:
        if type(token) is not int:
            raise fields.wrong_type(field, "token ids", token)
        _check_token(field, token, vocab)
    return tuple(dict.fromkeys(cast("list[int]", found)))


def _logit_bias(data: JsonObject, vocab: int) -> tuple[tuple[int, float], ...]:
    """OpenAI's form: token ids as text, and what is added to the logits of each."""
    field = "logit_bias"
    found = fields.child(data, field)
    _check_count(field, len(found))
    biases: dict[int, float] = {}
    for key, value in found.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= len(str(vocab))):
            raise invalid(field, f"'{field}' has token ids as its keys, 0 to {vocab - 1}")
        token = int(key)
        _check_token(field, token, vocab)
        if token in biases:
            raise invalid(field, f"'{field}' holds token {token} twice")
        if type(value) is not int and type(value) is not float:
            raise fields.wrong_type(field, "numbers", value)
        if not -LARGEST_BIAS <= value <= LARGEST_BIAS:
            message = f"expected {-LARGEST_BIAS} to {LARGEST_BIAS}, got {fields.brief(value)}"
            raise invalid(field, f"invalid '{field}' of token {token}: {message}")
        biases[token] = float(value)
    return tuple((token, value) for token, value in biases.items() if value)


def _check_count(field: str, count: int) -> None:
    if count > MAX_TOKEN_LIST:
        message = f"'{field}' holds {count} tokens, at most {MAX_TOKEN_LIST} are allowed"
        raise invalid(field, message)


def _check_token(field: str, token: int, vocab: int) -> None:
    if not 0 <= token < vocab:
        held = f"'{field}' holds token {fields.brief(token)}"
        raise invalid(field, f"{held}; the vocabulary is 0 to {vocab - 1}")
