"""Copies to the host that fail while spilled requests need them: the answer is late, or one request
fails alone, and nobody waits for ever."""

from collections import Counter

import pytest

from stratakv.core.ids import RequestId
from stratakv.engine.request import Failure, FinishReason
from stratakv.testing.transfer_ends import HookedCopier
from stratakv.transfer.copy_plan import Direction
from stratakv.transfer.cpu import DEFAULT_COPIER
from tests.engines import all_free, drain, greedy, tokens_of
from tests.offloading import ANSWER, PROMPTS, SMALL, by_name, rows_of, submit


def failing(tries):
    """A copier of which the copies to the host fail that ``tries`` says, by number."""
    seen = Counter()

    def before_copy(direction, group, layers):
        del group, layers
        if direction is Direction.BACKUP:
            seen["tries"] += 1
            if tries(seen["tries"]):
                seen["failed"] += 1
                raise OSError("no copy today")

    return HookedCopier(DEFAULT_COPIER, before_copy), seen


@pytest.mark.parametrize("count", [1, 5])
def test_copies_that_never_succeed_fail_the_requests_that_need_them(count):
    copier, seen = failing(lambda _: True)
    with SMALL.engine(24, copier=copier) as parts:
        submit(parts, PROMPTS[:count])
        found = by_name(drain(parts), count)
        for at, prompt in enumerate(PROMPTS[:count]):
            last = found[at][-1]
            if last.finish is FinishReason.ERROR:
                assert last.failure is Failure.COPY
            else:
                assert tokens_of(found[at]) == SMALL.right(tuple(prompt))[0]
        failed = parts.engine.stats().failures[Failure.COPY.value]
        assert failed == sum(out[-1].finish is FinishReason.ERROR for out in found) > 0
        assert seen["failed"] < 60 * count, "asked again and again"
        parts.engine.check()
        parts.engine.submit(greedy("short", PROMPTS[0][:9], 4))
        assert tokens_of(drain(parts)) == SMALL.right(tuple(PROMPTS[0][:9]), answer=4)[0]
        assert parts.cache.progress.flush()
        assert all_free(parts)


@pytest.mark.parametrize("every", [2, 3])
def test_copies_that_fail_now_and_then_cost_nobody_his_answer(every):
    some = rows_of(PROMPTS[:5])
    copier, seen = failing(lambda at: at % every)
    with SMALL.engine(24, selected=2 * SMALL.least(24), copier=copier) as parts:
        submit(parts, some)
        found = by_name(drain(parts), 5)
        assert list(map(tokens_of, found)) == SMALL.right(*some)
        assert seen["failed"]
        assert parts.cache.progress.flush()
        assert all_free(parts)


def test_copies_that_succeed_again_are_asked_for_again():
    """After so many failures in a row that nobody asks any more."""
    copier, seen = failing(lambda at: at <= 14)
    with SMALL.engine(24, selected=40, copier=copier) as parts:
        parts.engine.submit(greedy("0", PROMPTS[0], ANSWER))
        for _ in range(8):
            parts.engine.step()
        parts.engine.abort(RequestId("0"))
        submit_again = [greedy(str(at), prompt, ANSWER) for at, prompt in enumerate(PROMPTS[1:5])]
        for prompt in submit_again:
            parts.engine.submit(prompt)
        found = by_name(drain(parts), 4)
        assert list(map(tokens_of, found)) == SMALL.right(*rows_of(PROMPTS[1:5]))
        assert seen["failed"] == 14
