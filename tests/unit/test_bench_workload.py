import json

import numpy as np
import pytest

from stratakv.bench.workload import Chat, TraceScale, scaled_trace
from stratakv.core.errors import ConfigError

SCALE = TraceScale(max_tokens=1000, vocabulary=100, requests=3, play_s=2.0, min_shrink=64)


def write(path, *records):
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(keys, record, strict=True))) for record in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_equal_hash_ids_become_equal_tokens_and_others_do_not(tmp_path):
    path = write(
        tmp_path / "trace",
        (0, 1024, 64, [0, 1]),
        (2000, 1500, 640, [0, 2, 3]),
        (4000, 1024, 64, [4, 5]),
        (9000, 512, 64, [0]),
    )
    trace = scaled_trace(path, SCALE)
    first, second, third = trace.opening()
    assert [len(ask.tokens) for ask in trace.asks] == [16, 23, 16]
    assert [ask.new_tokens for ask in trace.asks] == [1, 10, 1]
    assert [ask.at_s for ask in trace.asks] == [0.0, 1.0, 2.0]
    assert (first.tokens[:8] == second.tokens[:8]).all()
    assert not (first.tokens[8:] == second.tokens[8:16]).all()
    assert not (first.tokens[:8] == third.tokens[:8]).all()
    assert "first 3 requests, tokens / 64, time / 2" in trace.name
    assert trace.longest == 33


def test_a_trace_shrinks_until_its_longest_request_fits(tmp_path):
    path = write(tmp_path / "trace", (0, 100_000, 100, list(range(196))))
    trace = scaled_trace(path, SCALE)
    assert trace.shrink == 128
    assert trace.longest <= 1000
    tight = TraceScale(max_tokens=100, vocabulary=100)
    with pytest.raises(ConfigError, match="allowed are 51200 and less"):
        scaled_trace(path, tight)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 1: is not JSON"),
        ('{"timestamp": 0}', "line 1: allowed is an object with timestamp"),
        ("[]", "line 1: allowed is an object with timestamp"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "allowed is one for each 512",
        ),
        ("", "holds no request"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, line, message):
    path = tmp_path / "trace"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message):
        scaled_trace(path, SCALE)


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        scaled_trace(tmp_path / "none", SCALE)


def test_a_conversation_grows_by_the_answer_and_the_next_message():
    chat = Chat(users=2, turns=2, system_tokens=8, message_tokens=3, answer_tokens=2)
    first, other = chat.opening()
    assert (first.tokens[:8] == other.tokens[:8]).all()
    assert not (first.tokens[8:] == other.tokens[8:]).all()
    answer = np.array([5, 6], np.int32)
    second = chat.next_turn(first, answer, 1.5)
    assert second is not None
    assert second.at_s == 1.5
    assert second.tokens[:11].tolist() == first.tokens.tolist()
    assert second.tokens[11:13].tolist() == [5, 6]
    assert len(second.tokens) + second.new_tokens == chat.longest
    assert chat.next_turn(second, answer, 2.0) is None


def test_a_chat_shrinks_to_a_short_model():
    short = Chat.within(500, 100)
    assert 450 < short.longest <= 500
    assert Chat.within(5000, 100) == Chat(vocabulary=100)
