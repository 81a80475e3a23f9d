"""The messages of a conversation as clients send them, and as chat templates take them.

Owns the roles and parts that are known. Must not know a template.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from stratakv.serve import fields
from stratakv.serve.errors import ApiError, invalid
from stratakv.serve.fields import JsonObject
from stratakv.serve.json_body import ValueBudget
from stratakv.serve.tools import arguments_of

Message: TypeAlias = Mapping[str, Any]
"""As a chat template takes it: role, text, and what an assistant has called."""

ROLES: Final[Mapping[str, str]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool",
}  # fmt: skip
"""Role -> the role a chat template knows."""
OF_ROLE: Final = {"assistant": frozenset({"tool_calls"}), "tool": frozenset({"tool_call_id"})}
"""What a message of a role has beside its text."""


def messages(value: object) -> tuple[Message, ...]:
    """A conversation as a chat template takes it: role and plain text."""
    if value is None:
        raise ApiError(
            "'messages' is required", param="messages", code="missing_required_parameter"
        )
    found = fields.array("messages", value)
    if not found:
        raise invalid("messages", "'messages' must hold at least one message")
    budget = ValueBudget()
    return tuple(_message(f"messages[{i}]", message, budget) for i, message in enumerate(found))


def _message(param: str, value: object, budget: ValueBudget) -> Message:
    if not isinstance(value, dict):
        raise fields.wrong_type(param, "an object", value)
    data = cast("JsonObject", value)
    role = data.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{param}.role", f"'{param}.role' must be one of {', '.join(ROLES)}")
    # Clients echo what they were sent: empty or null extras of an answer say nothing.
    for name in data.keys() - {"role", "content", "name"} - OF_ROLE.get(role, frozenset()):
        if _is_something(data[name]):
            message = f"'{param}.{name}' is not supported here"
            raise ApiError(message, param=f"{param}.{name}", code="unsupported_parameter")
    found: dict[str, Any] = {"role": ROLES[role]}
    given = data.get("tool_calls") if role == "assistant" else None
    calls = _calls(f"{param}.tool_calls", given, budget)
    content = data.get("content")
    found["content"] = "" if calls and content is None else _content(f"{param}.content", content)
    if calls:
        found["tool_calls"] = calls
    names = ("name", "tool_call_id") if role == "tool" else ("name",)
    return found | {name: _name(f"{param}.{name}", data[name]) for name in names if data.get(name)}


def _is_something(value: object) -> bool:
    """LiteLLM echoes ``{"provider_specific_fields": {"refusal": null}}``."""
    if isinstance(value, dict):
        return any(map(_is_something, cast("JsonObject", value).values()))
    return bool(value)


def with_text_arguments(found: Sequence[Message]) -> list[Message]:
    """The same, with the arguments of calls as JSON text."""
    return [
        {**one, "tool_calls": [_as_text(call) for call in one["tool_calls"]]}
        if "tool_calls" in one
        else one
        for one in found
    ]


def _as_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _name(param: str, value: object) -> str:
    if not isinstance(value, str):
        raise fields.wrong_type(param, "a string", value)
    return fields.well_formed(param, value)


def _calls(param: str, value: object, budget: ValueBudget) -> list[Mapping[str, Any]]:
    """What an assistant has called, with arguments as objects."""
    if value is None:
        return []
    calls = enumerate(fields.array(param, value))
    return [_call(f"{param}[{at}]", one, budget) for at, one in calls]


def _call(param: str, value: object, budget: ValueBudget) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise fields.wrong_type(param, "an object", value)
    data = cast("JsonObject", value)
    if data.get("type", "function") != "function":
        raise invalid(f"{param}.type", f"'{param}.type' must be 'function'")
    function = fields.child(data, "function")
    name, id_ = function.get("name"), data.get("id")
    called = {
        "name": _name(f"{param}.function.name", name),
        "arguments": arguments_of(f"{param}.function.arguments", function.get("arguments"), budget),
    }
    with_id = {} if id_ is None else {"id": _name(f"{param}.id", id_)}
    return {**with_id, "type": "function", "function": called}


def _content(param: str, value: object) -> str:
    """A string, or the lines of a list of text parts."""
    if isinstance(value, str):
        return fields.well_formed(param, value)
    if value is None:
        raise ApiError(f"'{param}' is required", param=param, code="missing_required_parameter")
    return "\n".join(
        _part(f"{param}[{i}]", part)
        for i, part in enumerate(fields.array(param, value, "a string or an array of parts"))
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
