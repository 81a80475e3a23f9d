"""What the tree has decided and nobody carries out is found by the next look at the cache, which an
engine's own check takes after the step. Each kind of effect is dropped once, wherever it arises.
"""

import pytest

from stratakv.tiers.pools import Pools
from stratakv.tiers.tiered_cache import TieredCache
from stratakv.tree.effects import FreeDevice, FreeHost, Remap
from stratakv.tree.nodes import Tier
from tests.engines import evict, evict_device, greedy, run
from tests.unit.test_cache_copies import PROMPTS, engine


def dropping(monkeypatch, kind):
    """From now on one list of effects loses those of ``kind``; returns what was dropped."""
    dropped, execute = [], Pools.execute

    def without(effects):
        if not dropped:
            dropped.extend(effect for effect in effects if isinstance(effect, kind))
            return [effect for effect in effects if effect not in dropped]
        return effects

    insert = TieredCache.insert
    monkeypatch.setattr(Pools, "execute", lambda pools, effects: execute(pools, without(effects)))
    monkeypatch.setattr(TieredCache, "insert", lambda *of: without(insert(*of)))
    return dropped


def evict_host(parts):
    for group in range(len(parts.spec.groups)):
        evict(parts, Tier.HOST, group)


@pytest.mark.parametrize(
    ("kind", "leave", "tier"),
    [(FreeDevice, evict_device, "DEVICE"), (FreeHost, evict_host, "HOST")],
    ids=["device", "host"],
)
def test_a_page_that_was_evicted_and_not_freed_is_found_at_once(kind, leave, tier, monkeypatch):
    with engine() as parts:
        run(parts, greedy("a", PROMPTS[0], 3))
        dropped = dropping(monkeypatch, kind)
        leave(parts)
        assert dropped
        with pytest.raises(AssertionError, match=f"{tier} pages of group .* accounted for"):
            parts.engine.check()


WHOLE_PAGES = PROMPTS[0][:40]


def served_again(parts):
    """The last page of a prompt of whole pages is computed twice: the second one is a duplicate."""
    parts.engine.submit(greedy("again", WHOLE_PAGES, 3))
    while parts.engine.has_work():
        parts.engine.step()
        parts.engine.check()


@pytest.mark.parametrize("kind", [FreeDevice, Remap], ids=["not freed", "still in its table"])
def test_a_duplicate_that_was_left_where_it_was_is_found_at_once(kind, monkeypatch):
    with engine() as parts:
        run(parts, greedy("a", WHOLE_PAGES, 3))
        dropped = dropping(monkeypatch, kind)
        with pytest.raises(AssertionError):
            served_again(parts)
        assert dropped


def test_effects_that_were_all_carried_out_are_no_finding():
    with engine() as parts:
        run(parts, greedy("a", WHOLE_PAGES, 3))
        served_again(parts)
        assert parts.cache.tiers.pools.counters.duplicate_pages
        evict_device(parts)
        evict_host(parts)
        parts.engine.check()
