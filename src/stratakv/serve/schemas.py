"""What clients may ask for. A request body in, a frozen record out, or a 400 that names the field.

Owns the fields of ``/v1/completions`` and ``/v1/chat/completions``: which are honoured, which are
harmless, which are refused because ignoring them would change the answer. Must not tokenize.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

import numpy as np

from stratakv.core.ids import TokenIds
from stratakv.serve import fields
from stratakv.serve.decoding import DECODING, Decoding, decoding, name_of, whole
from stratakv.serve.errors import ApiError, invalid, too_long
from stratakv.serve.fields import JsonObject

Message: TypeAlias = Mapping[str, str]

HARMLESS: Final = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls", "prediction",
})  # fmt: skip
"""Fields that cannot change the answer."""

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "best_of": (1,), "echo": (False,), "suffix": ("",), "length_penalty": (1,),
    "use_beam_search": (False,), "tools": ([],), "tool_choice": ("none", "auto"),
    "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "audio": (), "reasoning_effort": (), "verbosity": ("medium",),
    "web_search_options": (), "return_hidden_states": (False,), "documents": ([],),
    "separate_reasoning": (True, False), "stream_reasoning": (True, False),
    "include_reasoning": (True, False), "thinking_token_budget": (), "chat_template": (),
    "structural_tag": (),
    "guided_decoding_backend": (), "guided_whitespace_pattern": (), "stop_regex": (),
    "bad_words": ([],), "allowed_token_ids": (), "logits_processors": ([],),
    "custom_logit_processor": (), "custom_params": (), "vllm_xargs": ({},),
    "prompt_logprobs": (), "return_tokens_as_token_ids": (False,), "detokenize": (True,),
    "spaces_between_special_tokens": (True,), "truncation_side": ("left",), "lora_path": (),
    "session_params": (), "mm_processor_kwargs": ({},), "prompt_embeds": (),
}  # fmt: skip
"""Fields that are not supported, with the values that ask for nothing."""

PROMPT: Final = frozenset({"truncate_prompt_tokens", "add_special_tokens"})
COMPLETION: Final = DECODING | PROMPT | {"prompt", "echo"}
TEMPLATE: Final = frozenset({
    "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
})  # fmt: skip
CHAT: Final = DECODING | PROMPT | TEMPLATE | {"messages", "max_completion_tokens", "top_logprobs"}
RESERVED: Final = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs",
})  # fmt: skip
"""What a chat template, or who applies it, is given otherwise."""

ROLES: Final[Mapping[str, str]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
}  # fmt: skip
"""Role -> the role a chat template knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """``special``: with what the tokenizer adds to a text. ``most``: of its tokens the last ones
    are kept, so many; ``WHAT_FITS``: as many as leave room for the answer; None: all."""

    special: bool
    most: int | None = None


WHAT_FITS: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """``template``: what the chat template is given beside the messages. ``opens``: it ends where
    the assistant begins; ``goes_on``: it ends inside the last message."""

    messages: tuple[Message, ...]
    template: Mapping[str, Any] = field(default_factory=dict[str, Any])
    opens: bool = True
    goes_on: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompletionCall:
    model: str | None
    prompts: tuple[str | TokenIds, ...]
    options: PromptOptions
    decoding: Decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    model: str | None
    conversation: Conversation
    options: PromptOptions
    decoding: Decoding


def completion_call(data: JsonObject, vocab: int) -> CompletionCall:
    """Read a body of ``/v1/completions``; token ids must be below ``vocab``."""
    _check_fields(data, COMPLETION)
    return CompletionCall(
        model=name_of(data, "model", None),
        prompts=_prompts(data.get("prompt"), vocab),
        options=_prompt_options(data, special=True),
        decoding=decoding(data, vocab, whole(data, "logprobs", None), "max_tokens"),
    )


def chat_call(data: JsonObject, vocab: int) -> ChatCall:
    """Read a body of ``/v1/chat/completions``; token ids must be below ``vocab``."""
    _check_fields(data, CHAT)
    wanted = fields.boolean(data, "logprobs", default=False)
    top = whole(data, "top_logprobs", None)
    if top is not None and not wanted:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true")
    most = "max_tokens" if data.get("max_completion_tokens") is None else "max_completion_tokens"
    return ChatCall(
        model=name_of(data, "model", None),
        conversation=conversation(data),
        options=_prompt_options(data, special=False),
        decoding=decoding(data, vocab, (top or 0) if wanted else None, most),
    )


def conversation(data: JsonObject) -> Conversation:
    """The messages of a body, and how the chat template is to be applied."""
    opens = fields.boolean(data, "add_generation_prompt", default=True)
    goes_on = fields.boolean(data, "continue_final_message", default=False)
    if goes_on and opens and data.get("add_generation_prompt") is not None:
        message = "'continue_final_message' needs 'add_generation_prompt': false"
        raise invalid("continue_final_message", message)
    template = fields.plain("chat_template_kwargs", fields.child(data, "chat_template_kwargs"))
    for key in template:
        if key in RESERVED or not key.isidentifier():
            message = f"'chat_template_kwargs' must not hold {key[:64]!a}"
            raise invalid("chat_template_kwargs", message)
    found = messages(data.get("messages"))
    return Conversation(
        messages=found, template=template, opens=opens and not goes_on, goes_on=goes_on
    )


def _prompt_options(data: JsonObject, *, special: bool) -> PromptOptions:
    most = whole(data, "truncate_prompt_tokens", None)
    if most == 0:
        field = "truncate_prompt_tokens"
        raise invalid(field, f"invalid '{field}': expected -1, or 1 and more")
    special = fields.boolean(data, "add_special_tokens", default=special)
    return PromptOptions(special=special, most=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeCall:
    """``special``: with what the tokenizer adds to a text."""

    prompt: str | Conversation
    special: bool


def tokenize_call(data: JsonObject, max_chars: int) -> TokenizeCall:
    """Read a body of ``/tokenize``."""
    if data.get("messages") is not None:
        return TokenizeCall(prompt=conversation(data), special=False)
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
        if allowed is None:
            message = f"unrecognized request argument: '{name}'"
            raise ApiError(message, param=name, code="unknown_parameter")
        same_as_n = name == "best_of" and value == data.get("n")
        if value is not None and value not in allowed and not same_as_n:
            message = f"'{name}' is not supported here"
            raise ApiError(message, param=name, code="unsupported_parameter")


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
