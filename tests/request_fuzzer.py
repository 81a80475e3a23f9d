"""Requests that try every field of the schema, at, below and above each bound, alone and in pairs.

Owns the values. They are made from the schema's own tables, so that a field that is added there is
tried here too (``tests/unit/test_request_fuzzer.py``). Must not know what an answer should be, but
whether it is well-formed.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

import httpx

from stratakv.serve import decoding, schemas

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
FIELDS: Final = {
    COMPLETIONS: schemas.COMPLETION | schemas.HARMLESS | schemas.NEUTRAL.keys(),
    CHAT: schemas.CHAT | schemas.HARMLESS | schemas.NEUTRAL.keys(),
}
LONE: Final = "\ud800"
HONOURED: Final = schemas.COMPLETION | schemas.CHAT
WRONG: Final = (None, True, False, "", "1", LONE, [], [0], {}, {"a": {}}, 0, -1, 1.5, -0.0, 5e-324)
HUGE: Final = (
    *((1 << bits) + off for bits in (31, 32, 53, 63, 64, 128) for off in (-1, 0, 1)),
    -(1 << 31), -(1 << 31) - 1, -(1 << 63), -(1 << 63) - 1, 10**400, 1e308, -1e308,
)  # fmt: skip
"""JSON has no NaN, but ``Raw`` has."""


@dataclass(frozen=True)
class Raw:
    """A value as it is spelled in the body, whatever JSON says of it."""

    text: str


RAW: Final = tuple(map(Raw, ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "1e400")))


def values_of(field: str) -> list[object]:
    """What is tried in ``field``: around its own bounds, and what fits no field."""
    return [*_own(field), *WRONG, *HUGE, *RAW]


def own_values(field: str) -> list[object]:
    """What is tried in ``field`` alone."""
    return list(_own(field))


def _own(field: str) -> Iterator[object]:
    if (whole := decoding.WHOLE.get(field)) is not None:
        yield from _around(*whole)
    if (number := decoding.NUMBERS.get(field)) is not None:
        for bound in number:
            yield from (bound, math.nextafter(bound, -math.inf), math.nextafter(bound, math.inf))
        yield from (1e-45, 1e-38, 1e-7, 0.5)
    if (chars := decoding.TEXTS.get(field)) is not None:
        yield from ("x" * count for count in (1, chars - 1, chars, chars + 1))
    yield from schemas.NEUTRAL.get(field, ())
    match field:
        case "prompt":
            yield from _prompts()
        case "messages":
            yield from _conversations()
        case "stop":
            most, chars = decoding.MAX_STOPS, decoding.MAX_STOP_CHARS
            yield from (["a"] * count for count in (1, most, most + 1))
            yield from ("e" * count for count in (1, chars, chars + 1))
            yield from ([1], [None], ["a", ""], [[]], "\u2028", "\0")
        case "stop_token_ids":
            most = decoding.MAX_TOKEN_LIST
            yield from ([1], [399], [400], [-1], [1.0], [1, "a"], [10**400], [5] * most)
            yield [5] * (most + 1)
        case "logit_bias":
            yield from ({"5": 1}, {"5": -100.0, "6": 100}, {"5": 100.1}, {"400": 1}, {"-1": 1})
            yield from ({"05": 1, "5": 1}, {"5": None}, {"5": 10**400}, {LONE: 1}, {"5": "1"})
            yield {str(token): 1 for token in range(399)}
        case "response_format":
            schema = {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}}
            yield from ({"type": "text"}, {"type": "json_object"}, schema, {"type": "x"})
            yield from ({"type": "json_schema"}, {"type": LONE}, {"type": ["text"]})
        case "json_schema" | "guided_json":
            yield from ({"type": "boolean"}, '{"type": "null"}', "{", {"type": "x"}, {LONE: 1})
            yield from ({"enum": [1] * 300}, {"$ref": "#/a"}, {"pattern": "("}, '"a"', {"not": {}})
        case "regex" | "guided_regex":
            yield from ("a|b", "(a", "(a+)+$", "\\d{1000}", "a{0}", "(?=a)b", "x" * 5000)
        case "guided_choice":
            yield from (["a"], ["a", "b"], [1], ["a"] * 4096, ["a"] * 4097, [LONE], ['"'])
        case "ebnf" | "guided_grammar" | "grammar":
            yield from (
                'root ::= "a"',
                'start: "a"',
                "root ::= root",
                "root ::= b",
                "%llguidance {}",
            )
        case "structured_outputs":
            yield from ({"json": {}}, {"regex": "a"}, {"choice": ["a"]}, {"grammar": "start: /a/"})
            yield from (
                {"json_object": True},
                {"json": {}, "regex": "a"},
                {"a": 1},
                {"regex": LONE},
            )
        case "chat_template_kwargs":
            yield from ({"mood": "x"}, {"mood": [1] * 300}, {"tokenize": True}, {"mood": LONE})
            yield from ({LONE: 1}, {"a b": 1}, {"messages": None}, {"": 1})
        case "cache":
            yield from (*decoding.CACHE_WORDS, "no-cache")
        case "stream_options":
            yield from ({"include_usage": True}, {"include_usage": 1}, {"include_usage": None})
            yield from (
                {"include_usage": True, "continuous_usage_stats": True},
                {"x": 1},
                {LONE: 1},
            )
        case "bootstrap_host":
            yield from ("127.0.0.1", "a/b", "user@host", "h" * 513, ["a", "b"], [LONE])
        case "bootstrap_port":
            yield from (0, 1, 8998, 65535, 65536, [8998, 8999], [0])
        case "bootstrap_room":
            yield from (0, (1 << 64) - 1, 1 << 64, -1, [1, 2], [1.5], [1 << 64])
        case "kv_transfer_params":
            yield from _transfers()
        case _:
            pass


def _around(*bounds: int) -> Iterator[object]:
    for bound in bounds:
        yield from (bound - 1, bound, bound + 1)


def _prompts() -> Iterator[object]:
    yield from ("a", ["a", "b"], [1, 2], [[1], [2, 3]], ["a", [4]], [[]], [""], [1, "a"], [True])
    yield from ([399], [400], [-1], [1 << 31], [1 << 63], [1.0], [10**400], [[1], [400]], "\0")
    yield from ([5] * count for count in (511, 512, 513, 4000))
    yield "a" * 5000


def _transfers() -> Iterator[object]:
    prefill = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_request_id": "a"}
    yield from ({"do_remote_decode": True}, prefill, prefill | {"do_remote_decode": True})
    yield from ({"do_remote_decode": False}, {"do_remote_prefill": True}, {"x": 1}, {LONE: 1})
    yield from (prefill | {"remote_port": port} for port in (0, 1, 65536, "1", 10**400))
    yield from (prefill | {"remote_request_id": name} for name in ("", 7, LONE, "n" * 5000))


def _conversations() -> Iterator[object]:
    user = {"role": "user", "content": "hi"}
    yield from ([user], [user] * 3, [{}], ["hi"], [user | {"role": "tool"}], [user | {"name": 1}])
    yield from ([user | {"content": value}] for value in ("", None, 7, [], [{}], LONE, "b" * 5000))
    yield [user | {"content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]
    yield [user | {LONE: 1}]


@dataclass(frozen=True)
class Attempt:
    path: str
    fields: Mapping[str, object]

    def body(self) -> bytes:
        """JSON, but for what is raw; a lone surrogate is escaped."""
        spelled = (f"{json.dumps(name)}: {_spelled(value)}" for name, value in self.fields.items())
        return ("{" + ", ".join(spelled) + "}").encode()


def _spelled(value: object) -> str:
    return value.text if isinstance(value, Raw) else json.dumps(value)


def attempts(seed: int) -> Iterator[Attempt]:
    """Without an end: every value of every field alone, and after those, pairs. First come names
    that are none and the bounds of what is honoured; within each the order is the seed's own."""
    draw = random.Random(seed)
    parts: tuple[list[Attempt], ...] = ([], [], [])
    for path, known in FIELDS.items():
        parts[0].extend(Attempt(path, _plain(path) | {name: 1}) for name in (LONE, "a" * 9000))
        for field in sorted(known):
            own = own_values(field) if field in HONOURED else []
            rest = values_of(field) if not own else [*WRONG, *HUGE, *RAW]
            for part, values in ((1, own), (2, rest)):
                parts[part].extend(Attempt(path, _plain(path) | {field: one}) for one in values)
    for part in parts:
        draw.shuffle(part)
        yield from part
    while True:
        path = draw.choice(sorted(FIELDS))
        two = draw.sample(sorted(FIELDS[path]), 2)
        yield Attempt(path, _plain(path) | {name: draw.choice(values_of(name)) for name in two})


def alone() -> int:
    """How many of ``attempts`` try one field."""
    return sum(len(values_of(field)) for known in FIELDS.values() for field in known) + 4


def mixed(seed: int, count: int) -> list[Attempt]:
    """Two thirds of them alone, the others pairs."""
    draw = random.Random(seed)
    pairs = islice(attempts(seed), alone(), None)
    single = attempts(seed)
    return [next(pairs if draw.random() < 1 / 3 else single) for _ in range(count)]


def _plain(path: str) -> dict[str, object]:
    if path == COMPLETIONS:
        return {"prompt": [7, 8, 9], "max_tokens": 2}
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def judge(attempt: Attempt, answer: httpx.Response) -> None:
    """AssertionError unless the answer is well-formed and no fault of the server's."""
    description = (
        f"{attempt.path} {attempt.body()[:300]!r} -> {answer.status_code} {answer.text[:300]!r}"
    )
    assert answer.status_code in {200, 400, 404, 413}, description
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}, description
        assert error["message"], description
        return
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
        assert events[-1] == "[DONE]", description
        chunks = [json.loads(event, parse_constant=_never) for event in events[:-1]]
        assert not any("error" in chunk for chunk in chunks), description
        return
    whole = json.loads(answer.text, parse_constant=_never)
    assert all(choice["finish_reason"] in {"stop", "length"} for choice in whole["choices"]), (
        description
    )
    assert whole["usage"]["completion_tokens"] >= len(whole["choices"]), description


def _never(name: str) -> None:
    raise AssertionError(f"{name} in an answer")
