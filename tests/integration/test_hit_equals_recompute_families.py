"""Hit == recompute for every family that the engine accepts: a short proof for each of them, the
turns of a conversation for those that people run, every path for one family of each kind; in `make
test-long` every path for all, and for one of each kind with larger pages."""

import pytest

from scripts.family_table import exact
from tests.engines import evict_device, on_device
from tests.exact_families import KINDS as WAYS
from tests.exact_families import NAMED, every_state_kind
from tests.hit_cases import CHUNK, OUTPUT, PROMPT, lab, last_end, prompt, prove_reuse

KINDS = ("llama", "gemma3", "gpt_oss", "llama4", "deepseek_v3", "qwen3_next", "falcon_h1", "mamba")
"""Full, sliding, sliding with sinks, chunked, latent, state beside attention, both in one layer,
and a state that only goes on token by token."""
LARGE = ("gemma3", "qwen3_next")
"""Kinds for which pages of 64 go through every path in `make test`; a short proof has them all."""
LONG = (pytest.mark.long,)
CASES = [
    *((family, 16) for family in exact()),
    *((family, page) for page in (1, 64) for family in KINDS[:-1]),
]


def those(families):
    """(family, page): in `make test` for ``families``, and pages of 64 for two kinds."""
    small = (pytest.param(name, 16, marks=LONG * (name not in families)) for name in exact())
    large = (pytest.param(name, 64, marks=LONG * (name not in LARGE)) for name in KINDS)
    return pytest.mark.parametrize(("family", "page"), [*small, *large])


@pytest.mark.parametrize(("family", "page"), CASES)
def test_a_prompt_is_hit_on_the_device_and_loaded_from_the_host(family, page):
    prove_reuse(family, page)


@those(WAYS)
def test_a_prompt_of_exactly_k_pages_sent_twice_and_from_the_host(family, page):
    exactly = prompt(page, 3, PROMPT[page] // page * page)
    with lab(family, page) as this:
        this.ask(exactly)
        assert this.ask(exactly).cached.device == len(exactly) - page
        evict_device(this.parts)
        assert this.ask(exactly).cached.host == len(exactly) - page


@those(NAMED)
def test_turns_of_a_conversation_with_eviction_between_them(family, page):
    tokens = prompt(page, 6)
    with lab(family, page) as this:
        for turn in range(3):
            reply = this.ask(tokens)
            assert turn == 0 or reply.cached.host >= PROMPT[page] // page * page - page
            tokens = [*tokens, *reply.tokens, *prompt(page, 100 + turn, page + 3)]
            evict_device(this.parts)


@those(WAYS)
def test_a_ragged_batch_in_different_phases(family, page):
    known = prompt(page, 1)
    with lab(family, page) as this:
        this.ask(known)
        evict_device(this.parts)
        this.submit("short", prompt(page, 10, 5), count=12)
        this.step()
        this.submit("fresh", prompt(page, 8), count=6)
        this.submit("one", [7], count=3)
        this.step()
        this.submit("loaded", known, count=5)
        this.submit("exact", prompt(page, 11, 2 * page), count=5)
        this.drain()
        assert this.answers["loaded"].cached.host == last_end(len(known), page)
        assert this.answers["fresh"].cached == on_device(this.spec, 0)


@those(WAYS)
def test_two_prompts_that_share_a_beginning_and_run_together(family, page):
    long = prompt(page, 1)
    shared = 2 * last_end(len(long), page) // 3 + page // 2
    with lab(family, page) as this:
        this.submit("long", long)
        this.submit("short", long[:shared] + prompt(page, 12, page + 3))
        this.drain()
        again = this.ask(long[:shared] + prompt(page, 13, CHUNK[page]), OUTPUT)
        assert again.cached.device <= shared // page * page


@every_state_kind
def test_a_snapshot_of_another_place_is_seen(family):
    with lab(family, 16) as this:
        first = prompt(16, 1)
        this.ask(first)
        this.ask(prompt(16, 2))
        this.parts.cache.progress.settle()
        for group in this.spec.groups:
            for buffer in group.buffers if group.stateful else ():
                for layer in buffer.layers:
                    exchange(this.parts.pools.layer(group.id, buffer.name, layer))
        with pytest.raises(AssertionError, match="differ"):
            this.ask(first)


def exchange(pages) -> None:
    """Give every page that somebody owns the bytes of the next such page."""
    owned = (~pages.flatten(1).isnan().any(1)).nonzero()[:, 0]
    pages[owned] = pages[owned.roll(1)].clone()
