"""A large JSON body to an object, in pieces: ``json`` holds Python's lock while it reads, so that a
body of millions of values would stop every other thread for seconds.

Owns how many values a body may hold, how deep they may be nested, and how arrays of token ids are
read. What is taken and what it means is ``json``'s.
"""

import json
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stratakv.serve import fields
from stratakv.serve.errors import ApiError, invalid
from stratakv.serve.fields import IntegerArray, JsonObject

SMALL_BYTES: Final = 1 << 15
"""A body of that size is read at once, wherever that is."""
MOST_VALUES: Final = 1 << 16
"""Of a body, beside arrays of integers: about as many as take 10 ms."""
MOST_DEPTH: Final = 128
"""Arrays and objects within each other. Schemas and messages are walked by functions that call
themselves, some twice a level; Python takes 1000 calls."""
MOST_DIGITS: Final = 40
"""Of an integer that is read, with its sign."""
BEYOND: Final = 1 << 140
"""In place of what has more, which is of more than 128 bits too."""
LEAST_RUN: Final = 32
"""Bytes of an array of integers that is worth being read by itself."""
PIECE_BYTES: Final = 1 << 15

Marks: TypeAlias = NDArray[np.bool_]
PLACE: Final = b"-Infinity"
"""What stands for an array that was taken out: ``json`` asks what it means, and it is not JSON."""


def _table(chars: bytes) -> Marks:
    found = np.zeros(256, np.bool_)
    found[list(chars)] = True
    return found


OPENS_OR_PARTS: Final = _table(b",[{")
IN_INTEGERS: Final = _table(b"0123456789-, \t\r\n")
BRACKETS: Final = _table(b"[]{}")
OPENS: Final = _table(b"[{")


def read_object(body: bytes) -> JsonObject:
    """The JSON object in ``body``, as ``fields.parse_object`` reads it; where it holds many values,
    arrays of integers are IntegerArrays. ApiError (400) for too many others, or too deep ones,
    before any is made."""
    if len(body) <= SMALL_BYTES:
        if body.count(b"{") + body.count(b"[") > MOST_DEPTH:
            small = np.frombuffer(body, np.uint8)
            _check_depth(small, outside_strings(small))
        return fields.parse_object(body)
    text = np.frombuffer(body, np.uint8)
    outside = outside_strings(text)
    _check_depth(text, outside)
    values = int(np.count_nonzero(OPENS_OR_PARTS[text] & outside))
    if values <= MOST_VALUES:
        return fields.parse_object(body, integer=_integer)
    runs = list(_integer_runs(text, IN_INTEGERS[text] & outside))
    del text, outside
    rest = values - sum(body.count(b",", start, end) for start, end in runs)
    if rest > MOST_VALUES:
        message = f"the request body holds {rest} values; at most {MOST_VALUES} are allowed beside "
        raise ApiError(f"{message}arrays of token ids", code="too_many_values")
    return fields.parse_object(_without(body, runs), _arrays(body, runs), _integer)


class ValueBudget:
    """How many values the JSON texts inside of one body may still hold, all of them together: in
    the body each is a string, one value."""

    def __init__(self) -> None:
        self._left = MOST_VALUES

    def spend(self, param: str, text: str) -> None:
        """Count the values of ``text``, that of field ``param``, before any is made. ApiError (400)
        for too many, or too deep ones."""
        chars = np.frombuffer(text.encode(errors="replace"), np.uint8)
        outside = outside_strings(chars)
        self._left -= int(np.count_nonzero(OPENS_OR_PARTS[chars] & outside))
        if self._left < 0:
            message = f"the JSON texts up to '{param}' hold {MOST_VALUES - self._left} values; at "
            message += f"most {MOST_VALUES} are allowed in a body"
            raise ApiError(message, param=param, code="too_many_values")
        if (depth := _depth(chars, outside)) > MOST_DEPTH:
            raise invalid(
                param, f"'{param}' is nested {depth} deep; at most {MOST_DEPTH} are allowed"
            )


def _check_depth(text: NDArray[np.uint8], outside: Marks) -> None:
    if (depth := _depth(text, outside)) > MOST_DEPTH:
        message = f"the request body is nested {depth} deep; at most {MOST_DEPTH} are allowed"
        raise ApiError(message, code="too_deep")


def _depth(text: NDArray[np.uint8], outside: Marks) -> int:
    """How many arrays and objects are open at once."""
    opens = OPENS[text[BRACKETS[text] & outside]]
    open_ones = np.cumsum(np.where(opens, 1, -1), dtype=np.int32)
    return int(open_ones.max(initial=0))


def _integer(digits: str) -> int:
    """Many digits take long to read, and no field takes them: that they are many is enough."""
    if len(digits) <= MOST_DIGITS:
        return int(digits)
    return -BEYOND if digits.startswith("-") else BEYOND


def outside_strings(text: NDArray[np.uint8]) -> Marks:
    """bool [n]: whether a byte is in no string."""
    quotes = text == ord('"')
    at = np.flatnonzero(quotes[1:]) + 1
    behind = at[text[at - 1] == ord("\\")]
    if len(behind):  # a quote behind an odd number of backslashes ends no string
        other = np.where(text != ord("\\"), np.arange(len(text), dtype=np.int32), np.int32(-1))
        last = np.maximum.accumulate(other)
        quotes[behind[(behind - 1 - last[behind - 1]) % 2 == 1]] = False
    return np.cumsum(quotes, dtype=np.uint8) % 2 == 0


def _integer_runs(text: NDArray[np.uint8], plain: Marks) -> Iterator[tuple[int, int]]:
    """[start, end) of what is between ``[`` and ``]`` and may be integers."""
    edges = np.flatnonzero(plain[1:] != plain[:-1]) + 1
    if plain[0]:
        edges = edges[1:]  # no array begins there
    pairs = edges[: len(edges) // 2 * 2].reshape(-1, 2)
    pairs = pairs[pairs[:, 1] - pairs[:, 0] >= LEAST_RUN]
    arrays = (text[pairs[:, 0] - 1] == ord("[")) & (text[pairs[:, 1]] == ord("]"))
    yield from pairs[arrays].tolist()


def _without(body: bytes, runs: list[tuple[int, int]]) -> bytes:
    pieces: list[bytes] = []
    at = 0
    for start, end in runs:
        pieces += (body[at : start - 1], PLACE)
        at = end + 1
    return b"".join([*pieces, body[at:]])


def _arrays(body: bytes, runs: list[tuple[int, int]]) -> Callable[[str], IntegerArray]:
    """Answers ``json``'s questions, in the body's order. One question too many is one that the
    client has put there."""
    left = iter(runs)

    def next_array(name: str) -> IntegerArray:
        found = next(left, None) if name == PLACE.decode() else None
        if found is None:
            raise ValueError(f"{name} is not JSON")
        return IntegerArray(np.concatenate([_integers(one) for one in _cut(body, *found)]))

    return next_array


def _cut(body: bytes, start: int, end: int) -> Iterator[bytes]:
    """The array's text, cut at commas."""
    while (comma := body.find(b",", start + PIECE_BYTES, end)) >= 0:
        yield body[start:comma]
        start = comma + 1
    yield body[start:end]


def _integers(piece: bytes) -> NDArray[np.int64]:
    found: list[int] = json.loads(b"[" + piece + b"]")
    if not found:
        raise ValueError("Expecting value in an array of integers")
    try:
        return np.array(found, np.int64)
    except OverflowError:  # no token, however the error spells it
        return np.array([max(min(one, 1 << 62), -1 << 62) for one in found], np.int64)
