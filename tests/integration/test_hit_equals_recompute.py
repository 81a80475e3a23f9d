"""Hit == recompute: whatever path a prefix came by, tokens and logits are those of a run without a
cache, and exactly the tokens that could be reused were.

The reference is Hugging Face's own cache and attention at batch 1. Models have teeth
(``test_model_fixtures``), pages that nobody owns are NaN, and
``test_hit_equals_recompute_sabotage`` shows that the comparison fails when a page is lost.
"""

import pytest

from stratakv.tree.nodes import Tier
from tests.engines import cached, evict, evict_device, on_device, on_host, span_tokens
from tests.hit_cases import (
    CASES,
    CHUNK,
    OUTPUT,
    PROMPT,
    WINDOWED,
    lab,
    last_end,
    prompt,
    spec_for,
)

families_and_pages = pytest.mark.parametrize(("family", "page"), CASES)
windowed = pytest.mark.parametrize(
    ("family", "page"), [case for case in CASES if case[0] in WINDOWED]
)


@families_and_pages
def test_device_hit(family, page):
    first = prompt(page, 1)
    end = last_end(len(first), page)
    with lab(family, page) as this:
        assert this.ask(first).cached == on_device(this.spec, 0)
        assert this.ask(first).cached == on_device(this.spec, end)
        shared = end // 2 + page // 2
        other = first[:shared] + prompt(page, 2)[shared:]
        # Nothing has been evicted, so a window's pages are all there as well.
        assert this.ask(other).cached == on_device(this.spec, shared // page * page)


@families_and_pages
def test_a_prompt_of_exactly_k_pages_sent_twice(family, page):
    exact = prompt(page, 3, PROMPT[page] // page * page)
    with lab(family, page) as this:
        this.ask(exact)
        assert this.ask(exact).cached == on_device(this.spec, len(exact) - page)
        # The last page was computed twice, and the request went on with the first copy of it. At
        # page 1 each token of the answer that has KV is such a page too.
        twice = 1 + (OUTPUT - 1 if page == 1 else 0)
        assert this.parts.cache.tiers.pools.counters.duplicate_pages == twice * len(
            this.spec.groups
        )


@families_and_pages
def test_a_prompt_of_exactly_k_pages_comes_back_from_the_host(family, page):
    """Only what a checkpoint needs is there: it must be the one at floorP(n - 1)."""
    exact = prompt(page, 3, PROMPT[page] // page * page)
    with lab(family, page) as this:
        this.ask(exact)
        evict_device(this.parts)
        assert this.ask(exact).cached == on_host(this.spec, len(exact) - page)


@families_and_pages
def test_host_load_back(family, page):
    first = prompt(page, 1)
    end = last_end(len(first), page)
    with lab(family, page) as this:
        this.ask(first)
        evict_device(this.parts)
        assert this.ask(first).cached == on_host(this.spec, end)
        assert this.ask(first).cached == on_device(this.spec, end)
        loaded = sum(span_tokens(this.spec, end)) // page
        assert this.parts.cache.tiers.pools.counters.load_pages == loaded


@families_and_pages
def test_a_prefix_partly_on_the_device_and_partly_on_the_host(family, page):
    first = prompt(page, 1)
    end = last_end(len(first), page)
    with lab(family, page) as this:
        this.ask(first)
        evict(this.parts, Tier.DEVICE, 0, keep=2)
        spans = span_tokens(this.spec, end)
        # The window group has lost nothing, so it follows the anchor's two pages as well.
        assert this.ask(first).cached == cached(
            (2 * page, *spans[1:]),
            (end - 2 * page, *[0] * len(spans[1:])),
            device=2 * page,
            host=end - 2 * page,
        )


@windowed
def test_a_prefix_whose_window_alone_is_on_the_host(family, page):
    first = prompt(page, 1)
    end = last_end(len(first), page)
    with lab(family, page) as this:
        this.ask(first)
        evict(this.parts, Tier.DEVICE, 1)
        whole, window = span_tokens(this.spec, end)
        assert this.ask(first).cached == cached((whole, 0), (0, window), host=end)


@windowed
def test_a_partial_hit_inside_a_window_and_the_branching_point_it_leaves(family, page):
    first = prompt(page, 1)
    end = last_end(len(first), page)
    shared = end - (page if page > 1 else 4)
    kept = span_tokens(spec_for(family, page), end)[1] // page
    with lab(family, page) as this:
        this.ask(first)
        # Only what the prompt's checkpoint needs is left of the window: not enough at ``shared``,
        # and milestones, which are the first to go, have gone.
        evict(this.parts, Tier.DEVICE, 1, keep=kept)
        evict(this.parts, Tier.HOST, 1, keep=kept)
        second = first[:shared] + prompt(page, 2)[: len(first) - shared]
        assert this.ask(second).cached == on_device(this.spec, 0)
        third = first[:shared] + prompt(page, 4)[: len(first) - shared]
        assert this.ask(third).cached == on_device(this.spec, shared)
        evict_device(this.parts)
        fourth = first[:shared] + prompt(page, 5)[: len(first) - shared]
        assert this.ask(fourth).cached == on_host(this.spec, shared)


TURN = {1: (60, 12), 16: (100, 30), 64: (140, 70)}
"""Tokens of the first prompt, and what each later turn adds to the answer before it."""


def conversation(page, seed):
    """Prompts are made of the answers: yields the tokens so far, takes the answer."""
    first, more = TURN[page]
    tokens = prompt(page, seed, first)
    for turn in range(3):
        answer = yield tokens
        tokens = [*tokens, *answer, *prompt(page, 100 * seed + turn, more)]


def tight_pool(page, groups):
    """Device pages of one whole conversation; of a window group what one request holds at most."""
    first, more = TURN[page]
    whole = -(-(first + 2 * more + 3 * OUTPUT) // page)
    window = -(-40 // page) + -(-(CHUNK[page] + page - 1) // page)
    return (whole, min(whole, window))[:groups]


@families_and_pages
def test_eviction_between_turns_with_a_host(family, page):
    groups = len(spec_for(family, page).groups)
    device = tight_pool(page, groups)
    filler = prompt(page, 9, device[0] * page - OUTPUT)
    with lab(family, page, device=device) as this:
        talk, answer, known = conversation(page, 6), None, 0
        for turn in range(3):
            tokens = talk.send(answer)
            reply = this.ask(tokens)
            end = last_end(known, page) if turn else 0
            assert (reply.cached.device, reply.cached.host) == (0, end)
            spans = span_tokens(this.spec, end)
            assert reply.cached.groups_device[0] == 0
            assert reply.cached.groups_host[0] == spans[0]
            # Of a window, pages that the filler did not reach may have stayed on the device.
            both = zip(reply.cached.groups_device, reply.cached.groups_host, strict=True)
            assert tuple(map(sum, both)) == spans
            answer, known = reply.tokens, len(tokens) + OUTPUT
            this.ask(filler)
            evict(this.parts, Tier.DEVICE, 0)  # where the filler's last token has left one page
        assert this.parts.cache.tiers.pools.counters.load_pages > 0


@families_and_pages
def test_eviction_between_turns_without_a_host(family, page):
    groups = len(spec_for(family, page).groups)
    device = tight_pool(page, groups)
    settings = {"device": device, "host": (0,) * groups, "cache": "device"}
    with lab(family, page, **settings) as this:
        talk = conversation(page, 7)
        tokens = next(talk)
        reply = this.ask(tokens)
        this.ask(prompt(page, 9, device[0] * page - OUTPUT))
        evict(this.parts, Tier.DEVICE, 0)  # where the filler's last token has left one page
        tokens = talk.send(reply.tokens)
        reply = this.ask(tokens)
        assert reply.cached == on_device(this.spec, 0)
        known = len(tokens) + OUTPUT
        assert this.ask(talk.send(reply.tokens)).cached == on_device(
            this.spec, last_end(known, page)
        )
        assert this.parts.cache.tiers.pools.counters.load_pages == 0


@families_and_pages
def test_a_ragged_batch_of_requests_in_different_phases(family, page):
    known, fresh = prompt(page, 1), prompt(page, 8)
    end = last_end(len(known), page)
    with lab(family, page) as this:
        this.ask(known)
        evict_device(this.parts)
        this.recorder.batches.clear()
        this.submit("short", prompt(page, 10, 5), count=12)
        this.step()
        this.submit("fresh", fresh, count=6)
        this.submit("one", [7], count=3)
        this.step()
        this.submit("loaded", known, count=5)
        this.submit("exact", prompt(page, 11, 2 * page), count=5)
        this.drain()
        assert this.answers["loaded"].cached == on_host(this.spec, end)
        assert this.answers["fresh"].cached == on_device(this.spec, 0)
        mixed = [
            batch
            for batch in this.recorder.batches
            if 1 in batch.counts and batch.counts.max() > 1 and len(batch.rows) >= 3
        ]
        assert mixed, "no step both prefilled and decoded"


@families_and_pages
@pytest.mark.parametrize("shorter_first", [False, True])
def test_two_prompts_that_share_and_diverge_submitted_together(family, page, shorter_first):
    long = prompt(page, 1)
    shared = 2 * last_end(len(long), page) // 3 + page // 2
    short = long[:shared] + prompt(page, 12, page + 3)
    pair = (short, long) if shorter_first else (long, short)
    with lab(family, page) as this:
        this.submit("first", pair[0])
        this.submit("second", pair[1])
        this.drain()
        common = shared // page * page
        assert this.answers["first"].cached == on_device(this.spec, 0)
        assert this.answers["second"].cached == on_device(this.spec, common)
        # Each shared page was computed once. Of the last output token there is no KV.
        answers = 2 * (OUTPUT - 1)
        assert this.recorder.computed_tokens == len(long) + len(short) - common + answers


@pytest.mark.parametrize(("family", "page"), [case for case in CASES if case[1] == 16])
def test_another_salt_hits_nothing(family, page):
    tokens = prompt(page, 1)
    with lab(family, page) as this:
        this.ask(tokens, salt="a")
        assert this.ask(tokens, salt="b").cached == on_device(this.spec, 0)
        assert this.ask(tokens).cached == on_device(this.spec, 0)
        assert this.ask(tokens, salt="a").cached == on_device(
            this.spec, last_end(len(tokens), page)
        )
