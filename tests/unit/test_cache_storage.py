"""What of a prompt came from which tier, and what was lost, with a store below the host."""

import logging

import numpy as np
import pytest

from stratakv.core.config import EngineConfig
from stratakv.spec.retention import KeepBoundary, KeepWindow, needed
from tests.engines import (
    cached,
    drain,
    evict_device,
    expected_tokens,
    greedy,
    run,
    token_engine,
    token_spec,
    tokens_of,
)
from tests.storage_cases import PATIENT, Shelf, attach_backend, evict_all, format_of

PAGE = 4
TOKENS = [(n * 5 + 1) % 97 for n in range(41)]
CACHED = 40
SPECS = {
    "anchor": token_spec(PAGE),
    "window": token_spec(PAGE, KeepWindow(10)),
    "state": token_spec(PAGE, KeepBoundary()),
}
CONFIG = EngineConfig(
    page_tokens=PAGE, max_running=3, max_model_len=100, chunk_tokens=20, step_tokens=80,
    snapshot_tokens=PAGE, load_back_threshold=1, **PATIENT,
)  # fmt: skip


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="stratakv")


class Tiers:
    """An engine over a store that has all of the prompt, and nothing of it anywhere else."""

    def __init__(self, parts, spec):
        self.parts, self.spec = parts, spec
        attach_backend(parts, Shelf(format_of(spec)))
        self.ask(TOKENS)
        self.forget()

    def forget(self):
        self.parts.cache.progress.settle()
        evict_all(self)

    def ask(self, tokens):
        out = run(self.parts, greedy("r", tokens, 1))["r"]
        assert tokens_of(out) == expected_tokens(tokens, 1)
        self.parts.cache.progress.settle()
        self.parts.engine.check()
        return out[0].cached

    def span(self, group, end):
        """Pages of a group that are needed at ``end`` pages."""
        return set(needed(self.spec.groups[group].retention, end * PAGE, PAGE))


def tiers(spec):
    return token_engine(spec, CONFIG, [40] * len(spec.groups), [40] * len(spec.groups))


@pytest.mark.parametrize(("on_host", "on_device"), [(0, 0), (3, 0), (5, 2), (4, 4), (9, 1)])
def test_each_part_of_a_prefix_is_counted_where_it_came_from(on_host, on_device):
    """Of an anchor alone: from the store, then from the host, then as it lay on the device."""
    spec = SPECS["anchor"]
    with tiers(spec) as parts:
        this = Tiers(parts, spec)
        if on_host:
            this.ask(TOKENS[: on_host * PAGE + 1])
            evict_device(parts)
        if on_device:
            this.ask(TOKENS[: on_device * PAGE + 1])
        found = this.ask(TOKENS)
        device, host = on_device * PAGE, (on_host - on_device) * PAGE
        rest = CACHED - device - host
        assert found == cached((device,), (host,), (rest,), device=device, host=host, storage=rest)
        assert found.total == CACHED


@pytest.mark.parametrize("name", SPECS)
def test_of_each_group_what_it_needed_is_counted(name):
    spec = SPECS[name]
    with tiers(spec) as parts:
        this = Tiers(parts, spec)
        found = this.ask(TOKENS)
        spans = tuple(len(this.span(group.id, 10)) * PAGE for group in spec.groups)
        nothing = (0,) * len(spans)
        assert (found.device, found.host, found.storage) == (0, 0, CACHED)
        assert (found.groups_device, found.groups_host) == (nothing, nothing)
        assert found.groups_storage == spans
        evict_device(parts)
        found = this.ask(TOKENS)
        assert (found.device, found.host, found.storage) == (0, CACHED, 0)
        assert (found.groups_host, found.groups_storage) == (spans, nothing)
        found = this.ask(TOKENS)
        assert (found.device, found.host, found.storage) == (CACHED, 0, 0)
        assert (found.groups_device, found.groups_host) == (spans, nothing)


def test_of_a_window_some_pages_may_come_from_the_host_and_some_from_the_store():
    """The shorter prompt's window is on the host, and overlaps the longer one's."""
    spec = SPECS["window"]
    with tiers(spec) as parts:
        this = Tiers(parts, spec)
        this.ask(TOKENS[: 8 * PAGE + 1])
        evict_device(parts)
        found = this.ask(TOKENS)
        shared = len(this.span(1, 8) & this.span(1, 10)) * PAGE
        assert shared == PAGE
        assert (found.device, found.host, found.storage) == (0, 8 * PAGE, 2 * PAGE)
        assert found.groups_host == (8 * PAGE, shared)
        assert found.groups_storage == (2 * PAGE, len(this.span(1, 10)) * PAGE - shared)


def test_what_was_found_and_not_used_is_lost_for_a_reason():
    with tiers(SPECS["anchor"]) as parts:
        this = Tiers(parts, SPECS["anchor"])
        before = parts.engine.stats()
        parts.engine.submit(greedy("gone", TOKENS, 1))
        parts.engine.abort("gone")
        drain(parts)
        after = parts.engine.stats()
        lost = {
            reason: count - before.lost_tokens[reason]
            for reason, count in after.lost_tokens.items()
            if count != before.lost_tokens[reason]
        }
        assert sum(lost.values()) == after.known_tokens - before.known_tokens
        assert after.storage.abandoned["aborted"] == before.storage.abandoned["aborted"] + 1
        assert this.ask(TOKENS).total == CACHED


def test_hits_and_losses_are_all_that_was_known():
    with tiers(SPECS["window"]) as parts:
        this = Tiers(parts, SPECS["window"])
        start = parts.engine.stats()
        assert start.known_tokens == 0
        found = [this.ask(TOKENS), this.ask(TOKENS)]
        stats = parts.engine.stats()
        assert stats.known_tokens == sum(one.total for one in found) == 2 * CACHED
        assert not any(stats.lost_tokens.values())
        assert stats.cached_storage_tokens == stats.cached_device_tokens == CACHED
        assert stats.storage.tokens == {"found": CACHED, "hits": CACHED}
        assert parts.cache.admission.losses.hits == 2 * CACHED


def test_what_a_request_leaves_is_stored_and_no_page_of_another():
    spec = SPECS["window"]
    with tiers(spec) as parts:
        shelf = Shelf(format_of(spec))
        attach_backend(parts, shelf)
        run(parts, greedy("r", TOKENS, 1))
        parts.cache.progress.settle()
        groups = np.bincount([key.group for key in shelf.snapshot()])
        assert groups[0] == 10
        assert groups[1] >= 3
