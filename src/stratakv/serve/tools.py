"""Which functions a chat may call, and whether it has to: ``tools``, ``tool_choice`` and what goes
with them, as OpenAI's and vLLM's clients say it.

Owns these fields, and the form of an answer that has to be a call. Must not read an answer
(``tool_parsers``).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, assert_never, cast

from llguidance import LLMatcher

from stratakv.engine.grammars import Grammar
from stratakv.serve import fields
from stratakv.serve.errors import ApiError, invalid
from stratakv.serve.fields import JsonObject
from stratakv.serve.json_body import ValueBudget

FIELDS: Final = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
MAX_TOOLS: Final = 128
MAX_TOOL_NAME_CHARS: Final = 256
WORDS: Final = ("none", "auto", "required")
NO_PARAMETERS: Final[Mapping[str, object]] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class AutoCall:
    """The model decides whether it calls; its answer is read in the form in which it was trained to
    write calls."""


@dataclass(frozen=True, slots=True)
class RequiredCall:
    """The answer is a JSON array of calls, whichever the model chooses."""


@dataclass(frozen=True, slots=True)
class NamedCall:
    """The answer is the arguments of a call of ``name``."""

    name: str


ToolChoice: TypeAlias = AutoCall | RequiredCall | NamedCall


@dataclass(frozen=True, slots=True, eq=False)
class ToolUse:
    """``tools``: as a chat template takes them. ``parallel``: an answer may have several calls."""

    tools: tuple[Mapping[str, Any], ...]
    choice: ToolChoice
    parallel: bool

    @property
    def grammar(self) -> Grammar | None:
        """What the answer has to be; None: it may be anything. ApiError for parameters that are no
        schema."""
        match self.choice:
            case AutoCall():
                return None
            case NamedCall(name):
                (schema,) = (_schema(tool) for tool in self.tools if _name(tool) == name)
            case RequiredCall():
                schema = _array_of_calls(self.tools, parallel=self.parallel)
            case _:
                assert_never(self.choice)
        try:
            return Grammar(LLMatcher.grammar_from_json_schema(schema))
        except ValueError as error:
            raise invalid("tools", f"the parameters in 'tools' are no schema: {error}") from None


def tool_use(data: JsonObject) -> ToolUse | None:
    """What a body allows; None where it offers no tool, or none may be called: then the model is
    not told of any."""
    given = data.get("tools")
    tools = tuple(
        _tool(f"tools[{at}]", one)
        for at, one in enumerate(() if given is None else fields.array("tools", given))
    )
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"'tools' holds {len(tools)}, at most {MAX_TOOLS} are allowed")
    names = [_name(tool) for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", "'tools' holds two functions of one name")
    parallel = fields.boolean(data, "parallel_tool_calls", default=True)
    choice = _choice(data.get("tool_choice"), names)
    return None if choice is None else ToolUse(tools, choice, parallel)


def _choice(value: object, names: Sequence[str]) -> ToolChoice | None:
    if isinstance(value, dict):
        name = fields.child(cast("JsonObject", value), "function").get("name")
        if cast("JsonObject", value).get("type") != "function" or name not in names:
            message = "'tool_choice' names none of the functions in 'tools'"
            raise invalid("tool_choice", message)
        return NamedCall(str(name))
    if value is not None and value not in WORDS:
        message = f"'tool_choice' is one of {', '.join(WORDS)}, or names a function"
        raise invalid("tool_choice", message)
    if value == "required":
        if not names:
            raise invalid("tool_choice", "'tool_choice': \"required\" needs 'tools'")
        return RequiredCall()
    return None if value == "none" or not names else AutoCall()


def _tool(param: str, value: object) -> Mapping[str, Any]:
    """``{"type": "function", "function": {name, description, parameters, strict}}``."""
    if not isinstance(value, dict):
        raise fields.wrong_type(param, "an object", value)
    data = fields.plain("tools", cast("JsonObject", value))
    if data.get("type") != "function":
        raise invalid(f"{param}.type", f"'{param}.type' must be 'function'")
    function = fields.child(data, "function")
    name = fields.text(function, "name", None, max_chars=MAX_TOOL_NAME_CHARS)
    if not name:
        field = f"{param}.function.name"
        raise ApiError(f"'{field}' is required", param=field, code="missing_required_parameter")
    if not isinstance(function.get("parameters", {}), dict | None):
        raise fields.wrong_type(f"{param}.function.parameters", "an object", function["parameters"])
    return data


def _name(tool: Mapping[str, Any]) -> str:
    return tool["function"]["name"]


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    return dict(tool["function"].get("parameters") or NO_PARAMETERS)


def _array_of_calls(tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """vLLM's form: an array of ``{"name": ..., "parameters": {...}}``."""
    schemas = {f"tool{at}": _below(_schema(tool), f"tool{at}") for at, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": _name(tool)},
                "parameters": {"$ref": f"#/$defs/{place}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool, place in zip(tools, schemas, strict=True)
    ]
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": schemas}


def _below(value: object, place: str) -> object:
    """A schema whose references to its own parts still hold where it is a part of another one."""
    match value:
        case dict():
            return {
                key: f"#/$defs/{place}{one[1:]}"
                if key == "$ref" and isinstance(one, str) and one.startswith("#")
                else _below(one, place)
                for key, one in cast("dict[str, Any]", value).items()
            }
        case list():
            return [_below(one, place) for one in cast("list[Any]", value)]
        case _:
            return value


def arguments_of(param: str, text: object, budget: ValueBudget) -> JsonObject:
    """The arguments of a call in a message, which clients send as text: an object, as templates
    take it. ``budget``: of all such texts in the body."""
    if not isinstance(text, str):
        raise fields.wrong_type(param, "a string", text)
    budget.spend(param, text)
    try:
        found: object = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise invalid(param, f"'{param}' is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise invalid(param, f"'{param}' must be the JSON of an object")
    return fields.plain(param, cast("JsonObject", found))
