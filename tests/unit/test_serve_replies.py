"""Whole answers are spelled in pieces, and read as if they were not."""

import json

from stratakv.serve.replies import PIECE, encoded, spelled


def at_once(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def test_an_answer_reads_as_if_it_werespelled_at_once():
    top = [{f"töken {i}": -0.5 * i, '"\\\n': -9999.0} for i in range(2 * PIECE + 1)]
    whole = {
        "id": "cmpl-\u2028",
        "choices": [
            {"text": "\x00 東京", "logprobs": {"top_logprobs": top[:end], "none": []}, "x": None}
            for end in (0, 1, PIECE, PIECE + 1, 2 * PIECE + 1)
        ],
        "usage": {"total_tokens": 3, "details": {}, "empty": [], "by_group": {"a": {"device": 1}}},
    }
    assert encoded(whole) == at_once(whole)


def test_no_piece_of_an_answer_has_more_than_a_few_tokens():
    tokens = [{"token": "a", "top_logprobs": [{"token": "b"}]}] * 10_000
    pieces = list(spelled({"choices": [{"logprobs": {"content": tokens}}] * 3}, 4))
    assert max(piece.count('"b"') for piece in pieces) == PIECE
