"""What form a body wants its answer to have: OpenAI's, vLLM's and SGLang's fields for it.

Owns these fields and how each is a grammar. Must not compile any (``grammars``).
"""

import json
from collections.abc import Mapping
from typing import Final, cast

from llguidance import LLMatcher, grammar_from

from stratakv.engine.grammars import Grammar
from stratakv.serve import fields
from stratakv.serve.errors import ApiError, invalid
from stratakv.serve.fields import JsonObject
from stratakv.serve.json_body import ValueBudget

FIELDS: Final = frozenset({
    "response_format", "structured_outputs", "regex", "json_schema", "ebnf", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "grammar",
})  # fmt: skip
_IN_STRUCTURED_OUTPUTS: Final[Mapping[str, str]] = {
    "json": "guided_json", "regex": "guided_regex", "choice": "guided_choice",
    "grammar": "guided_grammar",
}  # fmt: skip
_HARMLESS: Final = frozenset({
    "disable_fallback", "disable_any_whitespace", "disable_additional_properties",
    "whitespace_pattern", "structural_tag",
})  # fmt: skip
MAX_CHOICES: Final = 4096
ANY_OBJECT: Final = {"type": "object"}


def grammar_of(data: JsonObject) -> tuple[str, Grammar] | None:
    """The one form that a body asks for, and the field that does; or None. ApiError where it asks
    for two, or for one that is none."""
    found = {name: one for name in sorted(FIELDS) if (one := _grammar(name, data)) is not None}
    if len(found) > 1:
        names = "' and '".join(found)
        raise invalid(next(iter(found)), f"'{names}' exclude each other: an answer has one form")
    return next(iter(found.items()), None)


def _grammar(name: str, data: JsonObject) -> Grammar | None:
    value = data.get(name)
    if value is None:
        return None
    match name:
        case "response_format":
            return _response_format(fields.child(data, name))
        case "structured_outputs":
            return _structured_outputs(fields.child(data, name))
        case "json_schema" | "guided_json":
            text = _schema(name, value)
        case "regex" | "guided_regex":
            text = LLMatcher.grammar_from_regex(_text(name, value))
        case "guided_choice":
            text = _choice(name, fields.array(name, value))
        case _:
            text = _lark(name, _text(name, value))
    return Grammar(text)


def _response_format(found: JsonObject) -> Grammar | None:
    match found.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar(LLMatcher.grammar_from_json_schema(ANY_OBJECT))
        case "json_schema":
            inner = fields.child(found, "json_schema")
            if inner.get("schema") is None:
                message = "'response_format.json_schema.schema' is required"
                raise ApiError(message, param="response_format", code="missing_required_parameter")
            return Grammar(_schema("response_format", inner["schema"]))
        case _:
            message = "'response_format.type' is one of text, json_object, json_schema"
            raise invalid("response_format", message)


def _structured_outputs(found: JsonObject) -> Grammar | None:
    """vLLM's newer name for the guided ones."""
    name = "structured_outputs"
    asked: dict[str, object] = {}
    for key, value in found.items():
        if value is None or (key in _HARMLESS and not value):
            continue
        if key == "json_object" and isinstance(value, bool):
            asked |= {"guided_json": ANY_OBJECT} if value else {}
        elif key in _IN_STRUCTURED_OUTPUTS:
            asked[_IN_STRUCTURED_OUTPUTS[key]] = value
        else:
            allowed = ", ".join((*_IN_STRUCTURED_OUTPUTS, "json_object"))
            raise invalid(name, f"'{name}' holds {key[:64]!a}; allowed are {allowed}")
    if len(asked) > 1:
        raise invalid(name, f"'{name}' asks for {len(asked)} forms; one is allowed")
    return next((_grammar(key, asked) for key in asked), None)


def _schema(name: str, value: object) -> str:
    """Of a schema, or of its text (SGLang's clients send that)."""
    if isinstance(value, str):
        ValueBudget().spend(name, value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise invalid(name, f"'{name}' is not valid JSON: {error}") from None
    if isinstance(value, bool):
        value = {} if value else {"not": {}}
    if not isinstance(value, dict):
        raise fields.wrong_type(name, "a JSON schema", value)
    schema = fields.plain(name, cast("JsonObject", value))
    try:
        return LLMatcher.grammar_from_json_schema(dict(schema))
    except ValueError as error:
        raise invalid(name, f"'{name}' is no schema: {error}") from None


def _choice(name: str, found: object) -> str:
    choices = cast("list[object]", found)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise invalid(name, f"'{name}' holds 1 to {MAX_CHOICES} strings")
    texts = [_text(name, one) for one in choices]
    lines = " | ".join(json.dumps(one, ensure_ascii=False) for one in texts)
    return LLMatcher.grammar_from_lark(f"start: {lines}")


def _lark(name: str, text: str) -> str:
    """A grammar in Lark's syntax, or in GBNF."""
    try:
        return grammar_from("grammar", text)
    except ValueError as error:
        raise invalid(name, f"'{name}' is no grammar: {error}") from None


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise fields.wrong_type(name, "a string", value)
    if not value:
        raise invalid(name, f"'{name}' must not be empty")
    return fields.well_formed(name, value)
