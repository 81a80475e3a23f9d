"""Reads fields of a JSON object, strictly: no coercion, and every complaint names the field.

Owns type and range checks. Must not know what a field means.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from stratakv.serve.errors import ApiError, invalid

JsonObject: TypeAlias = Mapping[str, object]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class IntegerArray:
    """A JSON array of integers from a body that holds many, int64 [n], n >= 1."""

    values: NDArray[np.int64]


JSON_NAMES: Final[Mapping[type, str]] = {
    bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array",
    IntegerArray: "an array", dict: "an object", type(None): "null",
}  # fmt: skip


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def parse_object(
    body: bytes,
    constant: Callable[[str], object] = _no_constant,
    integer: Callable[[str], int] = int,
) -> JsonObject:
    """The JSON object in ``body``; 400 for anything else, NaN and infinity included. ``constant``:
    what those mean; ``integer``: what digits do."""
    try:
        data: object = json.loads(body.decode(), parse_constant=constant, parse_int=integer)
    except (ValueError, RecursionError) as error:  # ValueError: syntax, UTF-8, endless integers
        why = "an integer has thousands of digits" if _endless(error) else error
        message = f"the request body is not valid JSON: {why}"
        raise ApiError(message, code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(f"the request body must be a JSON object, not {named(data)}")
    return cast("JsonObject", data)


def _endless(error: Exception) -> bool:
    """Whether Python gave up on an integer: its words are for who wrote the program."""
    return "set_int_max_str_digits" in str(error)


def named(value: object) -> str:
    return JSON_NAMES[type(value)]


def wrong_type(param: str, wanted: str, value: object) -> ApiError:
    message = f"invalid type for '{param}': expected {wanted}, got {named(value)}"
    return ApiError(message, param=param, code="invalid_type")


def integer(data: JsonObject, name: str, default: T, *, low: int, high: int) -> int | T:
    value = data.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise wrong_type(name, "an integer", value)
    if not low <= value <= high:
        raise invalid(name, f"invalid '{name}': expected {low} to {high}, got {brief(value)}")
    return value


def number(data: JsonObject, name: str, default: T, *, low: float, high: float) -> float | T:
    value = data.get(name)
    if value is None:
        return default
    if type(value) is not float and type(value) is not int:
        raise wrong_type(name, "a number", value)
    # Compare before converting: an integer of 400 digits does not fit a float.
    if not (low <= value <= high and math.isfinite(value)):
        raise invalid(name, f"invalid '{name}': expected {low} to {high}, got {brief(value)}")
    return float(value)


def choice(data: JsonObject, name: str, default: T, allowed: Mapping[str, T]) -> T:
    """What one of a few words stands for."""
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    if value not in allowed:
        words = ", ".join(f'"{word}"' for word in allowed)
        raise invalid(name, f"invalid '{name}': expected one of {words}")
    return allowed[value]


def boolean(data: JsonObject, name: str, *, default: bool) -> bool:
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong_type(name, "a boolean", value)
    return value


def text(data: JsonObject, name: str, default: T, *, max_chars: int) -> str | T:
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    if len(value) > max_chars:
        raise invalid(
            name, f"'{name}' has {len(value)} characters, at most {max_chars} are allowed"
        )
    return well_formed(name, value)


def well_formed(param: str, value: str) -> str:
    """JSON can spell lone surrogates, which are no text and which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(param, f"'{param}' holds a lone surrogate, which is not text") from None
    return value


def child(data: JsonObject, name: str) -> JsonObject:
    """The object in field ``name``; empty when absent."""
    value = data.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    return cast("JsonObject", value)


def plain(param: str, value: JsonObject) -> JsonObject:
    """``value`` with its arrays of integers as lists and without lone surrogates, for who knows
    nothing of ours."""
    text = json.dumps(value, ensure_ascii=False, default=lambda one: one.values.tolist())
    return json.loads(well_formed(param, text))


def array(param: str, value: object, wanted: str = "an array") -> Sequence[object]:
    """``wanted``: in a refusal, what else would be taken."""
    if isinstance(value, IntegerArray):
        return value.values.tolist()
    if not isinstance(value, list):
        raise wrong_type(param, wanted, value)
    return cast("Sequence[object]", value)


def brief(value: float) -> str:
    """A number for a message; one of 400 digits is not worth repeating (and may not print)."""
    if isinstance(value, int) and value.bit_length() > 128:
        return "an integer of more than 128 bits"
    return str(value)
