"""Wherever pages run short, at admission, growth, snapshot, backup, fetch, retraction and return,
in any group: what was taken is given back, every token is right, and nothing stays behind. In `make
test` at the first and the last chance of each kind and some between, in `make test-long` at all.
"""

from types import SimpleNamespace

import pytest

from stratakv.core.config import EngineConfig
from stratakv.memory.block_table import BlockTable
from stratakv.policy.admission import demand
from stratakv.spec.derive import spec_of
from stratakv.spec.retention import KeepBoundary, KeepLive, KeepWindow
from tests.allocation_faults import Faults
from tests.engines import (
    VOCABULARY,
    all_free,
    evict_device,
    expected_tokens,
    greedy,
    token_spec,
    tokens_of,
)
from tests.fixtures.deepseek_v4 import SHORT, config_of
from tests.pattern_engine import PatternRunner, pattern_engine, verify_pages
from tests.storage_cases import PATIENT, Shelf, attach_backend, evict_all, format_of

V4 = spec_of(config_of(SHORT).to_dict(), page_tokens=16, dtype="float32")
SPECS = {"deepseek_v4": V4, "window and state": token_spec(4, KeepWindow(10), KeepBoundary())}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def prompt_of(number, count):
    return [(number * 31 + n * 7 + n * n) % VOCABULARY for n in range(count)]


def serve(parts, asked, count, after_step):
    """All of ``asked`` at once, every page accounted for at every step. They end one by one, so
    that who has left comes back while others run."""
    out = {name: [] for name in asked}
    counts = {name: count + 3 * at for at, name in enumerate(asked)}
    for name, tokens in asked.items():
        parts.engine.submit(greedy(name, tokens, counts[name]))
    while parts.engine.has_work():
        for output in parts.engine.step():
            out[output.request].append(output)
        after_step(parts.cache)
        parts.engine.check()
    for name, tokens in asked.items():
        assert tokens_of(out[name]) == expected_tokens(tokens, counts[name]), name


def settled(cache):
    cache.progress.settle()


def converse(spec, kind="", nth=0, after_step=settled):
    """Three at once, of whom one has to leave; then from the host, then from storage. Returns the
    faults and the engine's figures."""
    page = spec.page_tokens
    longest = 6 * page
    config = EngineConfig(
        page_tokens=page, max_running=3, max_model_len=longest, chunk_tokens=2 * page + 1,
        step_tokens=5 * page, reserve_tokens=1, snapshot_tokens=page, load_back_threshold=1,
        **PATIENT,
    )  # fmt: skip
    peak = demand(spec, longest, longest, config.chunk_tokens, 0).peak
    device = [9, *(3 * pages for pages in peak[1:])]
    made: list[BlockTable] = []

    def runner(spec, pools, tables):
        made.append(tables)
        return PatternRunner(spec, pools, tables)

    host = [20] * len(device)
    with pattern_engine(spec, config, device, host, make_runner=runner) as parts:
        shelf, tables = Shelf(format_of(spec)), made[0]
        attach_backend(parts, shelf)
        faults = Faults(parts, tables, kind, nth)
        first = {name: prompt_of(at, 3 * page - at) for at, name in enumerate("abc", start=1)}
        serve(parts, first, 5, after_step)
        evict_device(parts)
        second = {name: tokens[: 2 * page] + prompt_of(5, page) for name, tokens in first.items()}
        serve(parts, second, 3, after_step)
        evict_all(SimpleNamespace(parts=parts, spec=spec))
        serve(parts, second, 2, after_step)
        verify_pages(parts, shelf)
        stats = parts.engine.stats()
        assert parts.engine.flush()
        parts.engine.check()
        assert all_free(parts)
        assert not tables.taken
    return faults, stats


def kinds(spec):
    """Everything that asks for pages of some group."""
    every = {f"{what} {group.id}" for group in spec.groups for what in ("alloc DEVICE", "retract")}
    kept = [group.id for group in spec.groups if not isinstance(group.retention, KeepLive)]
    every |= {f"{what} {group}" for group in kept for what in ("backup", "fetch", "alloc HOST")}
    every |= {
        f"snapshot {group.id}" for group in spec.groups if group.stateful and group.id in kept
    }
    return every | {"admit", "row", "growth"}


@each_spec
def test_every_kind_of_chance_comes_up(spec):
    faults, stats = converse(spec)
    assert faults.seen.keys() >= kinds(spec)
    assert stats.counters["retracted"] > stats.counters["retracted_unsaved"] == 0
    assert min(stats.cached_host_tokens, stats.cached_storage_tokens) > 0


@each_spec
@pytest.mark.parametrize("stride", [101, pytest.param(1, marks=pytest.mark.long)])
def test_short_of_pages_at_every_chance(spec, stride):
    """Copies and storage have ended before the next step, so that every run meets the same."""
    for kind, count in converse(spec)[0].seen.items():
        for nth in {*range(0, count, stride), count - 1}:
            faults, _ = converse(spec, kind, nth)
            assert faults.hit, f"{kind}, {nth} of {count}: it was never asked"


@pytest.mark.long
@each_spec
def test_short_of_pages_while_copies_are_under_way(spec):
    for kind, count in converse(spec)[0].seen.items():
        for nth in range(count):
            converse(spec, kind, nth, lambda cache: None)
