"""What each write policy promises to find on the host again, and what it gives up, by count."""

import numpy as np
import pytest

from stratakv.core.choices import WRITE_POLICIES
from stratakv.core.config import EngineConfig
from stratakv.core.ids import GroupId
from stratakv.policy.write import safe_wanted
from stratakv.spec.retention import KeepWindow
from stratakv.tree.nodes import Tier
from tests.engines import (
    drain,
    evict,
    evict_device,
    expected_tokens,
    greedy,
    token_engine,
    token_spec,
    tokens_of,
)

SPEC = token_spec(4, KeepWindow(10))
PROMPTS = [[(n * 5 + k) % 97 for n in range(41)] for k in range(24)]
CACHED = 40  # of 41 tokens: one is always computed


def engine(policy, device=(60, 40), host=(240, 160), **settings):
    config = EngineConfig(
        page_tokens=4,
        max_running=3,
        max_model_len=100,
        chunk_tokens=20,
        step_tokens=80,
        write_policy=policy,
        **settings,
    )
    return token_engine(SPEC, config, device, host)


def serve(parts, *prompts, count=2):
    """One after the other, every invariant checked after each step; what was cached of each."""
    cached = []
    for prompt in prompts:
        out = []
        parts.engine.submit(greedy("r", prompt, count))
        while parts.engine.has_work():
            out += parts.engine.step()
            parts.engine.check()
        assert tokens_of(out) == expected_tokens(prompt, count)
        cached.append(out[0].cached)
        parts.cache.progress.settle()
        parts.engine.check()
    return cached


def on_host(parts, group=0):
    return (
        parts.cache.tiers.pools.tiers[Tier.HOST][group].capacity
        - parts.cache.tiers.pools.tiers[Tier.HOST][group].available()
    )


def hits_by_key(parts):
    nodes = parts.cache.tiers.tree.internals.nodes
    return {key: nodes.hits.item(row) for key, row in nodes.index.items()}


# -- counted alike -------------------------------------------------------------------------------


def test_uses_are_counted_alike_under_all_policies():
    seen = []
    for policy in WRITE_POLICIES:
        with engine(policy, device=(300, 200), host=(300, 200)) as parts:
            serve(parts, *PROMPTS[:3], PROMPTS[0], PROMPTS[0][:21] + PROMPTS[1], PROMPTS[0])
            seen.append(hits_by_key(parts))
    assert seen[0] == seen[1] == seen[2]
    assert max(seen[0].values()) == 3


# -- write-through-selective ---------------------------------------------------------------------


def test_selective_saves_nothing_that_was_used_once():
    with engine("write-through-selective") as parts:
        serve(parts, PROMPTS[0])
        assert on_host(parts) == on_host(parts, 1) == 0
        evict_device(parts)
        assert parts.cache.tiers.pools.counters.dropped_dirty_pages > 0
        assert serve(parts, PROMPTS[0])[0].total == 0


def test_selective_saves_a_page_that_is_used_again():
    with engine("write-through-selective") as parts:
        serve(parts, PROMPTS[0], PROMPTS[0])
        assert on_host(parts) == 10
        assert on_host(parts, 1) == 10  # windows at the checkpoint and at milestones: they overlap
        evict_device(parts)
        found = serve(parts, PROMPTS[0])[0]
        assert (found.device, found.host) == (0, CACHED)


def test_selective_saves_what_two_prompts_share():
    with engine("write-through-selective") as parts:
        other = [*PROMPTS[0][:24], *PROMPTS[1]]
        serve(parts, PROMPTS[0], other, other)
        evict_device(parts)
        assert serve(parts, other)[0].host >= 60
        assert serve(parts, PROMPTS[0])[0].total <= 24


def test_selective_saves_as_soon_as_a_page_is_used_again():
    with engine("write-through-selective") as parts:
        serve(parts, PROMPTS[0])
        parts.engine.submit(greedy("r", PROMPTS[0], 5))
        parts.engine.step()
        assert (on_host(parts), on_host(parts, 1)) == (10, 3)
        drain(parts)


def test_selective_saves_the_window_of_the_milestone_that_is_used():
    with engine("write-through-selective") as parts:
        serve(parts, PROMPTS[0])
        parts.engine.submit(greedy("r", [*PROMPTS[0][:24], *PROMPTS[1]], 5))
        parts.engine.step()
        assert (on_host(parts), on_host(parts, 1)) == (6, 3)
        drain(parts)


def test_selective_counts_to_its_threshold():
    with engine("write-through-selective", write_hits=3) as parts:
        serve(parts, PROMPTS[0], PROMPTS[0])
        assert on_host(parts) == 0
        serve(parts, PROMPTS[0])
        assert on_host(parts) == 10


# -- write-back ----------------------------------------------------------------------------------


def test_write_back_copies_nothing_while_there_is_room():
    with engine("write-back") as parts:
        serve(parts, *PROMPTS[:3])
        assert parts.cache.tiers.pools.counters.backup_pages == 0


@pytest.mark.parametrize("reserve", [0.1, 0.4])
def test_write_back_keeps_its_reserve_free_or_saved(reserve):
    with engine("write-back", write_back_reserve=reserve) as parts:
        cache = parts.cache
        for prompt in PROMPTS:
            serve(parts, prompt)
            cache.progress.tick()
            cache.progress.settle()
            cache.check()
            for group in parts.spec.groups:
                space = cache.tiers.pools.tiers[Tier.DEVICE][group.id]
                write_back = cache.tiers.tree.write_back
                wanted = safe_wanted(parts.plan.write, space.capacity)
                assert space.available() + write_back.saved(group.id) >= min(
                    wanted, space.available() + sum(map(len, write_back.coldest(group.id, 999)))
                )
        assert cache.tiers.pools.counters.backup_pages > 0


def test_write_back_finds_what_was_evicted_on_the_host():
    with engine("write-back", write_back_reserve=0.5) as parts:
        serve(parts, *PROMPTS[:12])
        assert parts.cache.tiers.pools.counters.evicted_device_pages > 0
        assert parts.cache.tiers.pools.counters.dropped_dirty_pages == 0
        found = serve(parts, PROMPTS[0])[0]
        assert (found.device, found.host) == (0, CACHED)


def test_write_back_evicts_what_is_saved_before_what_is_colder():
    with engine("write-back") as parts:
        serve(parts, *PROMPTS[:3])
        copies, nodes = parts.cache.tiers.copies, parts.cache.tiers.tree.internals.nodes
        for row in list(nodes.index.values()):
            if nodes.rank[0].item(row) == nodes.rank[0].max():  # of the prompt that came last
                assert copies.backups.save(GroupId(0), np.array([row], np.intp)) == 1
        assert on_host(parts) == 10
        evict(parts, Tier.DEVICE, 0, keep=20)
        parts.cache.check()
        assert parts.cache.tiers.pools.counters.dropped_dirty_pages == 0
        assert serve(parts, PROMPTS[0])[0].device == CACHED


def test_write_back_counts_what_it_drops_where_the_host_is_full():
    with engine("write-back", host=(1, 1)) as parts:
        serve(parts, *PROMPTS[:12])
        counters = parts.cache.tiers.pools.counters
        assert counters.dropped_dirty_pages > 0
        assert serve(parts, PROMPTS[0])[0].total == 0


def test_write_back_comes_to_rest_where_the_host_holds_less_than_its_reserve():
    """A copy that pushes another one off the host would be made and lost for ever."""
    with engine("write-back", host=(6, 6), write_back_reserve=1.0) as parts:
        for k in range(4):
            parts.engine.submit(greedy(f"r{k}", PROMPTS[k], 2))
        for _ in range(2000):
            if not parts.engine.has_work():
                break
            parts.engine.step()
        assert not parts.engine.has_work()
        assert parts.cache.tiers.pools.counters.backup_pages < 200


def test_write_back_saves_less_than_write_through():
    """It saves what leaves, write-through what comes."""
    saved = {}
    for policy in ("write-through", "write-back"):
        with engine(policy) as parts:
            serve(parts, *PROMPTS[:8])
            saved[policy] = parts.cache.tiers.pools.counters.backup_pages
    assert 0 < saved["write-back"] < saved["write-through"]


def test_pages_that_nothing_needs_are_dropped_under_their_own_count():
    """Milestones of so long a prompt leave pages of the window between them."""
    with engine("write-back", device=(90, 16), write_back_reserve=0.5) as parts:
        serve(parts, *([(n * 5 + k) % 97 for n in range(97)] for k in range(3)))
        assert parts.cache.tiers.pools.counters.dropped_cold_pages > 0
