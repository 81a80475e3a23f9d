"""What the server's paths take and answer, as an OpenAPI 3.1 document.

Owns its words. Fields and their bounds come from the tables that requests are checked with, so that
a field without a description here ends the import. Must not read a request.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from stratakv.serve import decoding, schemas, tools
from stratakv.serve.decoding import CACHE_WORDS, MAX_STOP_CHARS, MAX_STOPS, MAX_TOKEN_LIST

Json = dict[str, object]

TITLE: Final = "StrataKV"
BOOLEANS: Final = frozenset({
    "add_generation_prompt", "add_special_tokens", "continue_final_message", "echo", "ignore_eos",
    "include_stop_str_in_output", "no_stop_trim", "parallel_tool_calls", "return_token_ids",
    "skip_special_tokens", "stream",
})  # fmt: skip
_TOKENS: Final[Json] = {
    "type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1,
}  # fmt: skip
_TEXT: Final[Json] = {"type": "string", "minLength": 1}
_STOP: Final[Json] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_OBJECT: Final[Json] = {"type": ["object", "null"]}
_PATTERN: Final[Json] = {"type": ["string", "null"]}
_SCHEMA: Final[Json] = {"type": ["object", "string", "boolean", "null"]}
_MESSAGE: Final[Json] = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"type": "string"}, "content": {"type": ["string", "array", "null"]}},
}
_SHAPES: Final[Mapping[str, Json]] = {
    "prompt": {
        "anyOf": [
            _TEXT,
            _TOKENS,
            {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}, "minItems": 1},
        ]
    },
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "stop": {
        "anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, {"type": "null"}]
    },
    "stop_token_ids": {
        "type": ["array", "null"],
        "items": {"type": "integer", "minimum": 0},
        "maxItems": MAX_TOKEN_LIST,
    },
    "logit_bias": {
        "type": ["object", "null"],
        "maxProperties": MAX_TOKEN_LIST,
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": {
            "type": "number",
            "minimum": -decoding.LARGEST_BIAS,
            "maximum": decoding.LARGEST_BIAS,
        },
    },
    "stream_options": {
        "type": ["object", "null"],
        "properties": {name: {"type": ["boolean", "null"]} for name in decoding.STREAM_OPTIONS},
        "additionalProperties": False,
    },
    "cache": {"enum": [*CACHE_WORDS, None]},
    "tools": {"type": ["array", "null"], "items": _OBJECT, "maxItems": tools.MAX_TOOLS},
    "tool_choice": {"anyOf": [{"enum": [*tools.WORDS, None]}, {"type": "object"}]},
    "chat_template_kwargs": _OBJECT,
    "kv_transfer_params": _OBJECT,
    "bootstrap_host": {"type": ["string", "array", "null"]},
    "bootstrap_port": {"type": ["integer", "array", "null"]},
    "bootstrap_room": {"type": ["integer", "array", "null"]},
    "response_format": _OBJECT,
    "structured_outputs": _OBJECT,
    "json_schema": _SCHEMA,
    "guided_json": _SCHEMA,
    "regex": _PATTERN,
    "guided_regex": _PATTERN,
    "ebnf": _PATTERN,
    "guided_grammar": _PATTERN,
    "grammar": _PATTERN,
    "guided_choice": {"type": ["array", "null"]},
}
_ABOUT: Final[Mapping[str, str]] = {
    "prompt": "text, token ids, or several of either",
    "messages": "the conversation, for the model's chat template",
    "max_tokens": "the most tokens of an answer",
    "stop": "strings that end the answer",
    "stream": "the answer as server-sent events",
    "cache": "what this request may do with the cache: read and store (`default`), only read "
    "(`no-store`), only store (`bypass`), neither (`off`)",
    "cache_salt": "requests share cached pages only with those of the same salt",
    "priority": "pages of higher ones are kept longer, under the policy `priority`",
    "return_token_ids": "token ids beside the text",
    "echo": "the answer begins with its prompt",
    "truncate_prompt_tokens": "only the last tokens of the prompt, so many; -1: as fit",
    "kv_transfer_params": "of a hand-off between servers, as vllm-router sends them",
    "bootstrap_room": "of a hand-off between servers, as sglang-router sends it",
    "rid": "your own name of the request",
    "request_id": "your own name of the request",
}
_ERROR: Final[Json] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_USAGE: Final[Json] = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {"type": "integer"},
        "total_tokens": {"type": "integer"},
        "prompt_tokens_details": {"type": "object"},
    },
}
_REASONS: Final[Mapping[int, str]] = {
    400: "what cannot be answered; `param` names the field",
    401: "a key is needed, and none or another was sent",
    403: "this server was started without a key of its operator",
    404: "there is no such thing",
    408: "the request has not come in time",
    409: "not now; the message says why",
    413: "the body is too large",
    500: "the server failed",
    502: "the store cannot be reached",
    503: "too much is asked, or the server does not answer yet or any more; try again",
}


def openapi_document(version: str, paths: Iterable[str]) -> Json:
    """Of a server with these ``paths``. KeyError for one that is not described here."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": TITLE,
            "version": version,
            "description": "OpenAI's API, with fields of vLLM's and SGLang's clients.",
        },
        "paths": {path.replace(":path", ""): _PATHS[path] for path in paths},
        "components": {
            "schemas": {
                "Error": _ERROR,
                "CompletionRequest": COMPLETION_BODY,
                "ChatCompletionRequest": CHAT_BODY,
                "Completion": _answer("text_completion"),
                "ChatCompletion": _answer("chat.completion"),
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _property(name: str) -> Json:
    about: Json = {"description": _ABOUT[name]} if name in _ABOUT else {}
    return _shape(name) | about


def _shape(name: str) -> Json:
    if name in decoding.WHOLE:
        low, high = decoding.WHOLE[name]
        return {"type": ["integer", "null"], "minimum": low, "maximum": high}
    if name in decoding.NUMBERS:
        least, most = decoding.NUMBERS[name]
        edge = "exclusiveMinimum" if name == "top_p" else "minimum"
        return {"type": ["number", "null"], edge: least, "maximum": most}
    if name in decoding.TEXTS:
        return {"type": ["string", "null"], "maxLength": decoding.TEXTS[name]}
    if name in BOOLEANS:
        return {"type": ["boolean", "null"]}
    return _SHAPES[name]


def _body(names: frozenset[str], needed: str, own: dict[str, Json]) -> Json:
    neutral = {
        name: {"enum": [None, *values], "description": "not supported: values that ask for nothing"}
        for name, values in schemas.NEUTRAL.items()
        if name not in names and name != "best_of"
    }
    harmless = {name: {"description": "changes nothing"} for name in schemas.HARMLESS}
    honoured = {name: _property(name) for name in sorted(names)} | own
    return {
        "type": "object",
        "required": [needed],
        "properties": honoured | dict(sorted((neutral | harmless).items())) | _BEST_OF,
        "additionalProperties": False,
    }


_BEST_OF: Final[Json] = {"best_of": {"type": ["integer", "null"], "description": "1, or as `n`"}}
COMPLETION_BODY: Final = _body(schemas.COMPLETION, "prompt", {})
CHAT_BODY: Final = _body(schemas.CHAT, "messages", {"logprobs": {"type": ["boolean", "null"]}})


def _answer(what: str) -> Json:
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": what},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["index", "finish_reason", "logprobs"],
                    "properties": {
                        "index": {"type": "integer"},
                        "finish_reason": {"type": ["string", "null"]},
                        "logprobs": {"type": ["object", "null"]},
                    },
                },
            },
            "usage": _USAGE,
        },
    }


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(**properties: object) -> Json:
    return {"type": "object", "required": list(properties), "properties": properties}


def _operation(
    summary: str,
    content: Json,
    *errors: int,
    body: Json | None = None,
    status: int = 200,
    parameters: tuple[Json, ...] = (),
    key: bool = True,
) -> Json:
    """``key``: guarded, where the server has keys."""
    found = {status: {"description": "done", "content": content}}
    for code in sorted({*errors, 401, 500, 503} if key else {*errors, 500, 503}):
        found[code] = {"description": _REASONS[code], "content": _json(_ref("Error"))}
    asks: Json = {} if body is None else {"requestBody": {"required": True, "content": _json(body)}}
    return {
        "summary": summary,
        "responses": {str(code): found[code] for code in found},
        **({"parameters": list(parameters)} if parameters else {}),
        **({"security": [{"key": []}, {}]} if key else {}),
        **asks,
    }


_STREAM: Final[Json] = {"text/event-stream": {"schema": {"type": "string"}}}
_STRING: Final[Json] = {"type": "string"}
_WHOLE: Final[Json] = {"type": "integer"}
_MODEL: Final = _object(id=_STRING, object={"const": "model"}, created=_WHOLE, owned_by=_STRING)
_PARAM_MODEL: Final[Json] = {"name": "model", "in": "path", "required": True, "schema": _TEXT}
_TOKENIZE: Final[Json] = {
    "type": "object",
    "anyOf": [
        {
            "required": ["messages"],
            "properties": {
                name: _property(name)
                for name in ("messages", *sorted(schemas.TEMPLATE | tools.FIELDS))
            },
        },
        {
            "required": ["prompt"],
            "properties": {
                "messages": {"type": "null"},
                "prompt": _STRING,
                "add_special_tokens": _property("add_special_tokens"),
            },
        },
    ],
}
"""Beside a text, what is for a conversation is not looked at."""
_HEALTH: Final = _operation("Whether requests are taken", _json(_object(status=_STRING)), key=False)
_PAGE: Final[Json] = {"text/html": {"schema": _STRING}}
_STORAGE_ERRORS: Final = (400, 403, 404, 408, 409, 413, 502)
_PATHS: Final[Mapping[str, Json]] = {
    "/v1/completions": {
        "post": _operation(
            "Go on with a text", _json(_ref("Completion")) | _STREAM, 400, 404, 408, 413,
            body=_ref("CompletionRequest"),
        )
    },
    "/v1/chat/completions": {
        "post": _operation(
            "Answer a conversation", _json(_ref("ChatCompletion")) | _STREAM, 400, 404, 408, 413,
            body=_ref("ChatCompletionRequest"),
        )
    },
    "/v1/models": {
        "get": _operation(
            "The model and its adapters",
            _json(_object(object={"const": "list"}, data={"type": "array", "items": _MODEL})),
        )
    },
    "/v1/models/{model:path}": {
        "get": _operation("One of them", _json(_MODEL), 404, parameters=(_PARAM_MODEL,))
    },
    "/tokenize": {
        "post": _operation(
            "Token ids of a text or a conversation",
            _json(_object(tokens={"type": "array"}, count=_WHOLE, max_model_len=_WHOLE)),
            400, 408, 413, body=_TOKENIZE,
        )
    },
    "/detokenize": {
        "post": _operation(
            "The text of token ids", _json(_object(prompt=_STRING)), 400, 408, 413,
            body={"type": "object", "required": ["tokens"], "properties": {"tokens": _TOKENS}},
        )
    },
    "/flush_cache": {
        "post": _operation(
            "Empty the cache, while nothing runs", _json(_object(flushed={"const": True})), 409
        )
    },
    "/cache/storage": {
        "get": _operation("The store", _json({"type": "object"}), *_STORAGE_ERRORS),
        "put": _operation(
            "Attach a store", _json(_object(attached={"const": True}, url=_STRING)),
            *_STORAGE_ERRORS, body=_object(url=_STRING) | {"additionalProperties": False},
        ),
        "delete": _operation(
            "Detach the store", _json(_object(attached={"const": False}, url=_STRING)),
            *_STORAGE_ERRORS,
            parameters=(
                {"name": "wait_s", "in": "query", "schema": {"type": "number", "minimum": 0}},
                {"name": "force", "in": "query", "schema": {"enum": ["true", "false"]}},
            ),
        ),
    },
    "/cache/storage/clear": {
        "post": _operation(
            "Delete what the store has of this model",
            _json(_object(clearing={"const": True}, url=_STRING)), *_STORAGE_ERRORS, status=202,
        )
    },
    "/cache/why_miss": {
        "post": _operation(
            "Why a request's prompt was computed, or would be",
            _json(_object(requests={"type": "array", "items": {"type": "object"}})),
            400, 403, 404, 408, 413,
            body={
                "type": "object",
                "properties": {
                    "request": {
                        "type": ["string", "null"],
                        "description": "the id of an answer, or the client's own",
                    },
                    "prompts": {
                        "type": ["array", "null"], "minItems": 2, "maxItems": 2,
                        "items": {"anyOf": [
                            _ref("CompletionRequest"), _ref("ChatCompletionRequest"),
                        ]},
                        "description": "in its place, an earlier and a later request",
                    },
                },
                "additionalProperties": False,
            },
        )
    },
    "/": {"get": _operation("The dashboard", _PAGE, key=False)},
    "/docs": {"get": _operation("This document as a page", _PAGE, key=False)},
    "/openapi.json": {
        "get": _operation("This document", _json({"type": "object"}), key=False)
    },
    "/health": {"get": _HEALTH},
    "/ping": {"get": _HEALTH},
    "/metrics": {
        "get": _operation(
            "Figures for Prometheus", {"text/plain": {"schema": _STRING}}, key=False
        )
    },
    "/server_info": {
        "get": _operation("How the server was started", _json({"type": "object"}))
    },
    "/version": {"get": _operation("The version", _json(_object(version=_STRING)), key=False)},
}  # fmt: skip
