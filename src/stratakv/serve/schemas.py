"""What clients may ask for. A request body in, a frozen record out, or a 400 that names the field.

Owns the fields of ``/v1/completions`` and ``/v1/chat/completions``: which are honoured, which are
harmless, which are refused because ignoring them would change the answer. Must not tokenize.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np

from stratakv.core.ids import TokenIds
from stratakv.engine.grammars import Grammar
from stratakv.serve import fields, tools
from stratakv.serve.decoding import DECODING, Decoding, decoding, name_of, whole
from stratakv.serve.errors import ApiError, invalid, too_long
from stratakv.serve.fields import JsonObject
from stratakv.serve.messages import Message, messages
from stratakv.serve.structured_outputs import grammar_of
from stratakv.serve.tools import ToolUse

HARMLESS: Final = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prediction", "session_id", "custom_labels",
})  # fmt: skip
"""Fields that cannot change the answer."""

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "best_of": (1,), "echo": (False,), "suffix": ("",), "length_penalty": (1,),
    "use_beam_search": (False,), "tools": ([],), "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False), "functions": ([],), "function_call": ("none", "auto"),
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
    # vLLM's
    "watermarking": (False,), "logprob_token_ids": (), "media_io_kwargs": ({},),
    "routed_experts_prompt_start": (0,), "return_token_offsets": (False,),
    "return_prompt_text": (False,), "return_mm_kwargs": (True, False), "ec_transfer_params": ({},),
    "repetition_detection": (), "stream_interval": (1,),
    # SGLang's
    "return_routed_experts": (False,), "routed_experts_start_len": (0,),
    "return_cached_tokens_details": (False,), "return_prompt_token_ids": (False,),
    "return_meta_info": (False,), "reasoning": (), "task": (), "input_ids": (), "extra_key": (),
    "ngram_corpus_id": (), "images_config": (), "max_dynamic_patch": (), "min_dynamic_patch": (),
    "use_audio_in_video": (False,), "routed_dp_rank": (0,), "disagg_prefill_dp_rank": (0,),
    "data_parallel_rank": (0,), "return_spec_tokens_details": (False,), "watermark": (),
    "thinking": (), "video_config": (), "sampling_logprobs_mode": (),
    "return_sampling_mask": (False,), "return_input_ids_in_sglext": (False,),
    "return_output_ids_in_sglext": (False,), "return_flat_raw_output_top_logprobs": (False,),
    "return_flat_raw_top_logprobs_b64": (True, False),
    # of chats alone
    "add_generation_prompt": (True, False), "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    # OpenAI's
    "moderation": (), "prompt_cache_options": (),
}  # fmt: skip
"""Fields that are not supported, with the values that ask for nothing."""

PROMPT: Final = frozenset({"truncate_prompt_tokens", "add_special_tokens"})
COMPLETION: Final = DECODING | PROMPT | {"prompt", "echo"}
TEMPLATE: Final = frozenset({
    "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
})  # fmt: skip
CHAT: Final = (
    DECODING | PROMPT | TEMPLATE | tools.FIELDS
    | {"messages", "max_completion_tokens", "top_logprobs"}
)  # fmt: skip
RESERVED: Final = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs",
})  # fmt: skip
"""What a chat template, or who applies it, is given otherwise."""


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
    the assistant begins; ``goes_on``: it ends inside the last message. ``tools``: what the model is
    told that it may call."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict[str, Any])
    opens: bool = True
    goes_on: bool = False

    @property
    def chars(self) -> int:
        """About what a template writes out."""
        return sum(len(str(one)) for one in (*self.messages, *self.tools))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompletionCall:
    model: str | None
    prompts: tuple[str | TokenIds, ...]
    options: PromptOptions
    decoding: Decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """``use``: what the answer may call; None: nothing."""

    model: str | None
    use: ToolUse | None
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
        decoding=decoding(
            data, vocab, whole(data, "logprobs", None), "max_tokens", grammar_of(data)
        ),
    )


def chat_call(data: JsonObject, vocab: int) -> ChatCall:
    """Read a body of ``/v1/chat/completions``; token ids must be below ``vocab``."""
    _check_fields(data, CHAT)
    wanted = fields.boolean(data, "logprobs", default=False)
    top = whole(data, "top_logprobs", None)
    if top and not wanted:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true")
    most = "max_tokens" if data.get("max_completion_tokens") is None else "max_completion_tokens"
    use = tools.tool_use(data)
    return ChatCall(
        model=name_of(data, "model", None),
        use=use,
        conversation=conversation(data, use),
        options=_prompt_options(data, special=False),
        decoding=decoding(data, vocab, (top or 0) if wanted else None, most, _form(data, use)),
    )


def _form(data: JsonObject, use: ToolUse | None) -> tuple[str, Grammar] | None:
    """What the answer has to be, and the field that says so."""
    form = grammar_of(data)
    if use is None:
        return form
    if form is not None:
        raise invalid(
            form[0], f"'{form[0]}' and 'tools' exclude each other: a call has its own form"
        )
    forced = use.grammar
    return None if forced is None else ("tools", forced)


def conversation(data: JsonObject, use: ToolUse | None) -> Conversation:
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
        messages=found,
        tools=() if use is None else use.tools,
        template=template,
        opens=opens and not goes_on,
        goes_on=goes_on,
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
        return TokenizeCall(prompt=conversation(data, tools.tool_use(data)), special=False)
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


def token_ids(
    param: str, value: object, vocab: int, wanted: str = "an array of token ids"
) -> TokenIds:
    """A list of token ids as int32 [n], n >= 1. ``wanted``: as of ``fields.array``."""
    if isinstance(value, fields.IntegerArray):
        _check_tokens(param, int(value.values.min()), int(value.values.max()), vocab)
        return value.values.astype(np.int32)
    found = fields.array(param, value, wanted)
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
    found = fields.array("prompt", value, "a string or an array")
    if not found:
        raise invalid("prompt", "'prompt' must not be empty")
    if type(found[0]) is int:
        return (token_ids("prompt", found, vocab),)
    return tuple(
        _text_prompt(f"prompt[{i}]", one)
        if isinstance(one, str)
        else token_ids(f"prompt[{i}]", one, vocab, "a string or an array of token ids")
        for i, one in enumerate(found)
    )


def _text_prompt(param: str, value: str) -> str:
    if not value:
        raise invalid(param, f"'{param}' must not be empty")
    return fields.well_formed(param, value)
