"""How a batch is split into calls: every token once, logits' places kept, states never mixed."""

import dataclasses

import numpy as np
import pytest

from stratakv.engine.batch import StepBatch
from stratakv.engine.huggingface.step_calls import packed, side_by_side, token_by_token

# (start, count) per request, decoding ones first.
MIXED = [(30, 1), (0, 1), (15, 1), (0, 9), (13, 4), (0, 9), (32, 9), (7, 4)]


def batch(spans):
    starts, counts = (np.array(column, np.int32) for column in zip(*spans, strict=True))
    return StepBatch(
        rows=np.arange(10, 10 + len(starts), dtype=np.int32),
        starts=starts,
        counts=counts,
        tokens=np.arange(counts.sum(), dtype=np.int32),
        sampled=np.arange(len(starts)) % 3 != 1,
        gate=None,
    )


def tokens_of(spans):
    """{(row, position): token}, as the batch packs them."""
    found, at = {}, 0
    for row, (start, count) in enumerate(spans):
        for position in range(start, start + count):
            found[row + 10, position] = at
            at += 1
    return found


def computed(calls):
    found = {}
    for call in calls:
        part, at = call.batch, 0
        for row, start, count in zip(part.rows, part.starts, part.counts, strict=True):
            for position in range(start, start + count):
                assert (row, position) not in found
                found[row, position] = part.tokens[at]
                at += 1
    return found


@pytest.mark.parametrize("split", [packed, side_by_side, token_by_token])
@pytest.mark.parametrize("spans", [MIXED, [(4, 1), (9, 1)], [(0, 5)], [(8, 3), (0, 3)]], ids=str)
def test_every_token_is_computed_once_and_sampled_where_it_was(split, spans):
    whole = batch(spans)
    calls = split(whole)
    assert computed(calls) == tokens_of(spans)
    places = np.concatenate([call.places[call.batch.sampled] for call in calls])
    assert sorted(places) == np.flatnonzero(whole.sampled).tolist()
    for call in calls:
        assert (whole.rows[call.places] == call.batch.rows).all()


@pytest.mark.parametrize("split", [side_by_side, token_by_token])
def test_a_call_has_equal_chunks_and_all_states_or_none(split):
    for call in split(batch(MIXED)):
        assert call.height == len(call.batch.rows)
        assert len({*call.batch.counts}) == 1
        assert len({*(call.batch.starts == 0)}) == 1


def test_decoding_rows_are_one_call():
    (call,) = side_by_side(batch([(4, 1), (9, 1), (1, 1)]))
    assert (call.height, call.again) == (3, False)


def test_equal_chunks_are_one_call():
    calls = side_by_side(batch(MIXED))
    shapes = sorted((c.height, int(c.batch.counts[0]), bool(c.batch.starts[0])) for c in calls)
    wanted = [(1, 1, False), (1, 9, True), (2, 1, True), (2, 4, True), (2, 9, False)]
    assert shapes == wanted


def test_stepped_chunks_go_together_one_token_a_call():
    calls = token_by_token(batch(MIXED))
    heights = [(call.height, call.again) for call in calls if call.batch.starts[0]]
    assert heights == [(5, False)] + [(3, True)] * 3 + [(1, True)] * 5


def test_only_the_last_step_of_a_chunk_is_sampled():
    # Of three requests the second one's logits are not wanted.
    calls = token_by_token(batch([(3, 1), (7, 3), (9, 2)]))
    wanted = [[True, False, False], [False, True], [False]]
    assert [call.batch.sampled.tolist() for call in calls] == wanted
    sampled = token_by_token(batch([(7, 3)]))
    assert [call.batch.sampled.tolist() for call in sampled] == [[False], [False], [True]]


@pytest.mark.parametrize("split", [packed, side_by_side, token_by_token])
@pytest.mark.parametrize("spans", [MIXED, [(4, 1), (9, 1)], [(0, 5)]], ids=str)
def test_every_scored_token_is_found_in_its_call(split, spans):
    whole = batch(spans)
    assert {call.scored for call in split(whole)} == {None}
    marks = np.arange(len(whole.tokens)) % 3 != 1
    calls = split(dataclasses.replace(whole, scored=marks))
    found = np.concatenate([call.scored for call in calls])
    assert sorted(found) == np.flatnonzero(marks).tolist()
    for call in calls:  # tokens are their own places
        assert call.scored.tolist() == call.batch.tokens[call.batch.scored].tolist()
