"""A milestone never costs a checkpoint: where the host or the states on the device are full of what
checkpoints need, milestones are not kept, and that is counted.
"""

import pytest

from stratakv.core.config import EngineConfig
from stratakv.spec.retention import KeepBoundary, KeepWindow
from stratakv.testing.transfer_ends import CopyHold, HookedCopier
from stratakv.transfer.cpu import DEFAULT_COPIER
from tests.engines import (
    drain,
    evict_device,
    expected_tokens,
    greedy,
    on_device,
    on_host,
    run,
    token_engine,
    token_spec,
    tokens_of,
)

PAGE = 4
WINDOW = token_spec(PAGE, KeepWindow(10))
STATE = token_spec(PAGE, KeepBoundary())
OLD = [[k, *range(8)] for k in range(4)]
"""Each ends at page 2: its windows are what this end needs, and it has one state."""
LONG = [n * 7 % 97 for n in range(61)]


def engine(spec, device, host, copier=DEFAULT_COPIER, **settings):
    config = EngineConfig(
        page_tokens=PAGE, max_running=2, max_model_len=100, chunk_tokens=64, step_tokens=80,
        load_back_threshold=1, **settings,
    )  # fmt: skip
    return token_engine(spec, config, device, host, copier)


def ask(parts, tokens):
    """What of a prompt was cached, after checking its answer; all copies have ended."""
    out = run(parts, greedy("r", tokens, 1))["r"]
    assert tokens_of(out) == expected_tokens(tokens, 1)
    parts.cache.progress.settle()
    parts.engine.check()
    return out[0].cached


def test_on_a_host_full_of_checkpoints_milestones_are_not_saved():
    """There is room for the new prompt's own end: three pages of window. Its milestones need eleven
    more."""
    with engine(WINDOW, (60, 60), (60, 2 * len(OLD) + 3)) as parts:
        counters = parts.cache.tiers.pools.counters
        for tokens in OLD:
            ask(parts, tokens)
        assert parts.cache.tiers.pools.stats()[3].free == 3
        assert counters.dropped_backup_pages == 0
        ask(parts, LONG)
        assert counters.evicted_host_pages == 0
        assert counters.dropped_backup_pages >= 11
        for tokens in OLD:
            evict_device(parts)
            assert ask(parts, tokens) == on_host(WINDOW, 8)
        evict_device(parts)
        assert ask(parts, LONG) == on_host(WINDOW, 60)


def test_on_a_device_full_of_checkpoints_no_state_of_a_milestone_is_kept():
    """There is one page more than checkpoints need: for the state that the new prompt works on. It
    finds none for its milestones, at 2, 4, 6, 10, 12 and 14 pages, and has its own end, at 15, for
    the oldest of the others."""
    with engine(STATE, (60, len(OLD) + 1), (0, 0), cache="device", snapshot_tokens=8) as parts:
        counters, nodes = parts.cache.tiers.pools.counters, parts.cache.tiers.tree.internals.nodes
        for tokens in OLD:
            ask(parts, tokens)
        assert (counters.snapshots, counters.snapshots_skipped) == (len(OLD), 0)
        parts.engine.submit(greedy("r", LONG, 1))
        for skipped in range(1, 7):
            assert not parts.engine.step()  # each ends at a milestone
            assert (counters.snapshots, counters.snapshots_skipped) == (len(OLD), skipped)
            assert nodes.checkpoint[nodes.rows()].sum() == len(OLD)
            assert counters.evicted_device_pages == 0
        assert tokens_of(drain(parts)) == expected_tokens(LONG, 1)
        assert (counters.snapshots, counters.snapshots_skipped) == (len(OLD) + 1, 6)
        for tokens in (*OLD[1:], LONG):
            end = (len(tokens) - 1) // PAGE * PAGE
            assert ask(parts, tokens) == on_device(STATE, end)


def test_a_milestone_that_is_being_saved_takes_no_page_from_the_next_checkpoint():
    """There are pages for the state that a request works on and for one that is kept."""
    hold = CopyHold()
    copier = HookedCopier(DEFAULT_COPIER, hold)
    with engine(STATE, (60, 2), (60, 60), copier, snapshot_tokens=8) as parts:
        parts.engine.submit(greedy("r", LONG, 1))
        while not parts.engine.step():
            pass
        assert parts.cache.tiers.pools.counters.snapshots == 1
        hold.allow(1_000)
        assert ask(parts, LONG) == on_device(STATE, 60)


# -- written back late ---------------------------------------------------------------------------


def late(spec, device, host, **settings):
    """All that is dirty is saved as soon as a page is short."""
    return engine(spec, device, host, write_policy="write-back", write_back_reserve=1.0, **settings)


def idle(parts):
    """Steps, until nothing is left to save."""
    for _ in range(20):
        parts.cache.progress.tick()
        parts.cache.progress.settle()
    parts.engine.check()


@pytest.mark.parametrize(("spec", "end"), [(WINDOW, 28), (STATE, 24)])
def test_a_milestone_is_written_back_too(spec, end):
    """Who parts at 34 tokens finds the last one before that on the host."""
    settings = {} if spec is WINDOW else {"snapshot_tokens": 8}
    with late(spec, (60, 60), (60, 60), **settings) as parts:
        ask(parts, LONG)
        idle(parts)
        evict_device(parts)
        assert ask(parts, [*LONG[:34], *range(20)]).host == end


def test_on_a_host_full_of_checkpoints_no_milestone_is_written_back():
    with late(WINDOW, (60, 60), (60, 2 * len(OLD) + 3)) as parts:
        for tokens in OLD:
            ask(parts, tokens)
        idle(parts)
        evict_device(parts)
        ask(parts, LONG)
        idle(parts)
        assert (
            parts.cache.tiers.pools.counters.evicted_host_pages <= 14
        )  # of milestones, for its own end
        for tokens in OLD:
            evict_device(parts)
            assert ask(parts, tokens) == on_host(WINDOW, 8)


def test_milestones_that_find_no_place_keep_no_checkpoint_from_being_saved():
    with late(WINDOW, (60, 60), (60, 3)) as parts:
        ask(parts, LONG)
        idle(parts)
        evict_device(parts)
        assert ask(parts, LONG) == on_host(WINDOW, 60)


def test_saved_milestones_make_way_for_a_checkpoint():
    """They are on both tiers, so the host's room is theirs only until a checkpoint needs it."""
    with late(WINDOW, (60, 60), (60, 9)) as parts:
        ask(parts, LONG)
        idle(parts)
        assert parts.cache.tiers.pools.stats()[3].free == 0
        ask(parts, OLD[0])
        idle(parts)
        evict_device(parts)
        assert ask(parts, OLD[0]) == on_host(WINDOW, 8)


def test_where_two_prompts_parted_a_third_one_hits_from_the_host_too():
    """12 pages are shared, and no milestone is near: the second prompt hits them because the device
    still has all of it."""
    with engine(WINDOW, (90, 90), (90, 90)) as parts:
        first = [n * 7 % 97 for n in range(96)]
        shared = first[:48]
        ask(parts, first)
        assert ask(parts, [*shared, *range(44)]) == on_device(WINDOW, 48)
        evict_device(parts)
        assert ask(parts, [*shared, *range(50, 80)]) == on_host(WINDOW, 48)
