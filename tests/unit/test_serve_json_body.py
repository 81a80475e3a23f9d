"""A body that is read in pieces is what ``json`` reads at once."""

import json
import random

import numpy as np
import pytest

from stratakv.serve import fields, json_body
from stratakv.serve.errors import ApiError
from stratakv.serve.fields import IntegerArray
from stratakv.serve.json_body import (
    BEYOND,
    MOST_DEPTH,
    MOST_VALUES,
    SMALL_BYTES,
    outside_strings,
    read_object,
)

MANY = list(range(MOST_VALUES + 5))


def plain(value):
    match value:
        case IntegerArray():
            return value.values.tolist()
        case dict():
            return {key: plain(one) for key, one in value.items()}
        case list():
            return [plain(one) for one in value]
        case _:
            return value


@pytest.mark.parametrize("spaces", ["", " ", "\n "])
def test_long_arrays_of_integers_are_what_json_reads(spaces):
    data = {
        "prompt": MANY, "others": [[1, 2], MANY, "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]"],
        'a "quoted\\" [1': "\\", "negative": [-1 - i for i in range(40)], "c": 1.5,
    }  # fmt: skip
    body = json.dumps(data, separators=(f"{spaces},{spaces}", f":{spaces}")).encode()
    found = read_object(body)
    assert isinstance(found["prompt"], IntegerArray)
    assert plain(found) == data


@pytest.mark.parametrize(
    "wrong",
    [
        "[1,,2]", "[1,2,]", "[,1]", "[01,2]", "[1 2]", "[1,-]", "[--1]", "[1-2]", "-Infinity",
        "[-Infinity]", "NaN", "[" + "1" * 5000 + "]", "[1}", "{1]",
    ],
)  # fmt: skip
def test_what_is_no_json_is_refused(wrong):
    filled = wrong.replace("1", "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1", 1)
    for one in (wrong, filled):
        body = f'{{"a": {MANY}, "b": {one}, "c": {MANY}}}'.encode()
        with pytest.raises(ApiError) as error:
            read_object(body)
        assert error.value.code == "invalid_json", one


def test_a_comma_too_many_where_a_piece_is_cut_is_refused(monkeypatch):
    monkeypatch.setattr(json_body, "PIECE_BYTES", 1)
    for wrong in ("1,,2", "1,2,", ",1,2"):
        with pytest.raises(ApiError):
            read_object(f'{{"a": {MANY[:MOST_VALUES]}, "b": [{wrong}{" " * 40}]}}'.encode())


def test_integers_that_no_array_holds_are_some_that_no_vocabulary_has():
    body = f'{{"a": {MANY}, "b": [{10**30}, {-(10**30)}, 7]}}'.encode()
    found = read_object(body)["b"]
    assert isinstance(found, IntegerArray)
    assert found.values.tolist() == [1 << 62, -(1 << 62), 7]


@pytest.mark.parametrize(
    "values",
    [
        b"[1]," * (1 << 17) + b"[1]", b"{}," * (1 << 17) + b"{}", b'"",' * (1 << 17) + b'""',
        b'{"role":"user","content":""},' * (1 << 16) + b"{}",
    ],
)  # fmt: skip
def test_too_many_values_are_counted_before_any_is_made(monkeypatch, values):
    monkeypatch.setattr(json_body.json, "loads", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(ApiError) as error:
        read_object(b'{"prompt": [' + values + b"]}")
    assert error.value.code == "too_many_values"


@pytest.mark.parametrize(("open_", "close"), [("[", "]"), ('{"a": ', "}")])
@pytest.mark.parametrize("spaces", [0, SMALL_BYTES])
def test_a_body_is_nested_no_deeper_than_what_walks_it_can_bear(open_, close, spaces):
    def body(depth):
        nested = open_ * (depth - 1) + "0" + close * (depth - 1)
        return f'{{"b": "{"[" * 500}", "a": {nested}{" " * spaces}}}'.encode()

    assert "a" in read_object(body(MOST_DEPTH))
    with pytest.raises(ApiError, match=f"{MOST_DEPTH + 1} deep; at most {MOST_DEPTH}") as error:
        read_object(body(MOST_DEPTH + 1))
    assert error.value.code == "too_deep"


def test_what_stands_in_strings_is_not_counted():
    text = '[{",' * (1 << 17) + "\\"
    assert read_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_where_strings_begin_and_end():
    draw = random.Random(1)
    for _ in range(300):
        texts = ["".join(draw.choices('a"\\,[{', k=draw.randrange(9))) for _ in range(5)]
        body = json.dumps(texts)
        marks, inside = [], False
        at = 0
        while at < len(body):
            if inside and body[at] == "\\":
                marks += [False, False]
                at += 2
                continue
            inside ^= body[at] == '"'
            marks.append(not inside)
            at += 1
        found = outside_strings(np.frombuffer(body.encode(), np.uint8))
        assert found.tolist() == marks, body


def test_a_small_body_is_read_as_ever():
    assert read_object(b'{"a": [1, 2]}') == {"a": [1, 2]}
    assert SMALL_BYTES < 1 << 16


@pytest.mark.parametrize("filling", ["", "1" + ",1" * MOST_VALUES])
def test_integers_of_many_digits_are_not_read_to_their_end(filling):
    """One of 4,200 digits takes as long as a thousand small ones, and Python's lock meanwhile."""
    long = "1" * 5000
    body = f'{{"a": {long}, "b": -{long}, "c": [{filling}], "d": -{10**38}}}'.encode()
    found = read_object(body + b" " * SMALL_BYTES)
    assert found["a"] == BEYOND
    assert found["b"] == -BEYOND
    assert found["d"] == -(10**38)
    assert fields.brief(BEYOND) == fields.brief(10**41)
