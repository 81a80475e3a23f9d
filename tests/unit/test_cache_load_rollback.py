"""A load takes device pages of every group, or of none: wherever the last one is missing."""

import pytest

from stratakv.core.config import EngineConfig
from stratakv.spec.retention import KeepBoundary, KeepWindow
from stratakv.tree.nodes import Tier
from tests.engines import (
    allocator,
    evict_device,
    expected_tokens,
    greedy,
    run,
    token_engine,
    token_spec,
    tokens_of,
)

SPEC = token_spec(4, KeepWindow(10), KeepBoundary())
PROMPT = [(7 * n) % 97 for n in range(41)]


@pytest.mark.parametrize("short", range(3))
def test_a_group_without_a_page_gives_back_those_of_the_others(short, monkeypatch):
    config = EngineConfig(
        page_tokens=4, max_running=2, max_model_len=80, chunk_tokens=20, step_tokens=40,
        load_back_threshold=1,
    )  # fmt: skip
    with token_engine(SPEC, config, (40, 40, 40), (40, 40, 40)) as parts:
        run(parts, greedy("first", PROMPT, 2))
        evict_device(parts)
        spaces = [allocator(parts, Tier.DEVICE, group) for group in range(3)]
        before = [space.available() for space in spaces]
        seen = []
        takes, fails = spaces[short].alloc, [True]

        def alloc(count):
            if fails and count:
                fails.clear()
                seen.append([space.available() for space in spaces[:short]])
                return None
            return takes(count)

        monkeypatch.setattr(spaces[short], "alloc", alloc)
        frees = parts.cache.tiers.copies.load

        def load(lease, saved):
            loaded = frees(lease, saved)
            if not loaded:
                assert [space.available() for space in spaces] == before
            return loaded

        monkeypatch.setattr(parts.cache.tiers.copies, "load", load)
        out = run(parts, greedy("again", PROMPT, 2))["again"]
        assert tokens_of(out) == expected_tokens(PROMPT, 2)
        assert parts.engine.stats().lost_tokens["host", "device_capacity"] == 40
        assert all(taken < total for taken, total in zip(seen[0], before, strict=False))
        assert run(parts, greedy("later", PROMPT, 2))["later"][0].cached.total == 40
