"""What a step runs: never more than its budget, decoding first, oldest prefill first."""

import numpy as np
import pytest

from stratakv.core.ids import PageKey
from stratakv.engine.scheduler import StepLimits, chunk_sizes, prefill_room, worth_waiting

LIMITS = StepLimits(step_tokens=100, chunk_tokens=40)


def test_a_step_never_exceeds_its_budget():
    rng = np.random.default_rng(0)
    for _ in range(300):
        limits = StepLimits(
            step_tokens=int(rng.integers(1, 60)), chunk_tokens=int(rng.integers(1, 60))
        )
        decoding = int(rng.integers(0, 60))
        left = rng.integers(1, 80, int(rng.integers(0, 6))).tolist()
        sizes = chunk_sizes(limits, decoding, left)
        budget = max(0, limits.step_tokens - decoding)
        assert len(sizes) == len(left)
        assert all(
            0 <= n <= min(tokens, limits.chunk_tokens)
            for n, tokens in zip(sizes, left, strict=True)
        )
        # Nothing is wasted either: the budget is spent, or every chunk is as long as it may be.
        assert sum(sizes) == min(budget, sum(min(n, limits.chunk_tokens) for n in left))


def test_decoding_comes_first_and_then_the_oldest_prefill():
    assert chunk_sizes(LIMITS, 0, [200, 200, 200]) == [40, 40, 20]
    assert chunk_sizes(LIMITS, 50, [30, 200]) == [30, 20]
    assert chunk_sizes(LIMITS, 100, [30]) == [0]
    assert chunk_sizes(LIMITS, 120, [30, 1]) == [0, 0]


def test_room_is_what_nobody_running_has_a_claim_to():
    assert prefill_room(LIMITS, 10, [200, 5]) == 100 - 10 - 40 - 5
    assert prefill_room(LIMITS, 60, [200]) == 0
    assert prefill_room(LIMITS, 90, [200]) < 0


def test_a_request_waits_only_for_its_next_page():
    keys = [PageKey(bytes([n])) for n in range(4)]
    assert worth_waiting(keys, 2, 4, {keys[2]})
    assert not worth_waiting(keys, 2, 4, {keys[3]})
    assert not worth_waiting(keys, 2, 2, {keys[2]}), "the last page must be computed anyway"


@pytest.mark.parametrize("fields", [(0, 1), (1, 0)])
def test_a_step_computes_at_least_one_token(fields):
    with pytest.raises(ValueError, match="allowed is 1 token and more"):
        StepLimits(step_tokens=fields[0], chunk_tokens=fields[1])
