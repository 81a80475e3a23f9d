"""What the tree has decided and nobody carries out is found by the next look at the cache, which an
engine's own check takes after the step. Each kind of effect is dropped once, wherever it arises.
Of a copy to a lower tier nobody is sure, since a policy may thin them: dropped, it costs that copy.
"""

import pytest

from stratakv.storage.memory import MemoryBackend
from stratakv.tiers.pools import Pools
from stratakv.tiers.tiered_cache import TieredCache
from stratakv.tree.effects import Backup, FreeDevice, FreeHost, Persist, Remap
from stratakv.tree.nodes import Tier
from tests.engines import evict, evict_device, greedy, run, tokens_of
from tests.storage_cases import attach_backend, format_of
from tests.unit.test_cache_copies import PROMPTS, SPEC, engine


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


PROMPTS_BY_NAME = {"a": PROMPTS[0], "b": PROMPTS[1]}


def ask(parts, name):
    out = run(parts, greedy(name, PROMPTS_BY_NAME[name], 3))[name]
    parts.cache.progress.settle()
    parts.engine.check()
    return out


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


@pytest.mark.parametrize("kind", [Backup, Persist], ids=["backup", "persist"])
def test_a_copy_that_was_never_begun_costs_that_copy_and_nothing_else(kind, monkeypatch):
    """The first of two prompts loses some of its copies, which may be caught up with or computed
    again: the second loses none."""
    with engine(prefetch_policy="wait-complete", prefetch_threshold=1) as parts:
        attach_backend(parts, MemoryBackend(format_of(SPEC)))
        dropped = dropping(monkeypatch, kind)
        before = [ask(parts, name) for name in PROMPTS_BY_NAME]
        assert dropped
        evict_device(parts)
        if kind is Persist:
            evict_host(parts)
        after = [ask(parts, name) for name in PROMPTS_BY_NAME]
        assert [tokens_of(out) for out in after] == [tokens_of(out) for out in before]
        assert after[1][0].cached.total == 40


def test_effects_that_were_all_carried_out_are_no_finding():
    with engine() as parts:
        run(parts, greedy("a", WHOLE_PAGES, 3))
        served_again(parts)
        assert parts.cache.tiers.pools.counters.duplicate_pages
        evict_device(parts)
        evict_host(parts)
        parts.engine.check()
