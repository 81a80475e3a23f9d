"""A spilled request is resident again when nobody waits and the device has room for all of it."""

import pytest

from stratakv.engine.steps import RETRY_STEPS
from stratakv.tree.nodes import Tier
from tests.engines import drain, greedy, tokens_of
from tests.fixtures.deepseek_v32 import random_tokens
from tests.offloading import CASES, CountedRows, rows_of, spilled

BUFFER = {"small": 24, "v4": 8}
LENGTH = {"small": 120, "v4": 190}
SELECTED = {"small": 24, "v4": 28}


@pytest.mark.parametrize(
    ("name", "settings"), [("small", {}), ("v4", {}), ("small", {"host": 120})]
)
def test_who_was_spilled_for_others_is_resident_again_when_they_have_ended(name, settings):
    """Also where the host is full of pages that are cached, as it is after a while."""
    case = CASES[name]
    some = rows_of(random_tokens(seed, LENGTH[name]) for seed in range(3))
    with case.engine(BUFFER[name], SELECTED[name], reserve_tokens=1, **settings) as parts:
        engine = parts.engine
        for at in range(12 if settings else 0):
            engine.submit(greedy(f"cached {at}", rows_of([random_tokens(100 + at, 100)])[0], 2))
            drain(parts)
        free = [space.available() for space in parts.cache.tiers.pools.tiers[Tier.HOST]]
        assert not settings or min(free) == 0
        engine.submit(greedy("0", some[0], 30))
        outputs = []
        while len(outputs) < 2:
            outputs += engine.step()
        for at in (1, 2):
            engine.submit(greedy(f"{at}", some[at], 2))
        while not spilled(parts) or engine.stats().running < 2:
            outputs += engine.step()
        while engine.stats().waiting + engine.stats().running > 1:
            outputs += engine.step()
            engine.check()
        for _ in range(RETRY_STEPS + 3):
            outputs += engine.step()
            engine.check()
        counted = CountedRows.rows
        outputs += drain(parts)
        found = [tokens_of([one for one in outputs if one.request == f"{at}"]) for at in range(3)]
        assert found[0] == case.right(some[0], answer=30)[0]
        assert found[1:] == [case.right(one, answer=2)[0] for one in some[1:]]
        assert CountedRows.rows == counted, "it still reads on the host"
