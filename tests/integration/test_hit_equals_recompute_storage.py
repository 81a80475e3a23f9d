"""Hit == recompute through storage: what one engine has stored another one continues exactly, and
exactly the tokens that storage, the host and the device could give were not computed.
"""

import pytest

from stratakv.spec.retention import needed
from stratakv.tree.nodes import Tier
from tests.engines import cached, evict, on_device, on_host, on_storage, span_tokens
from tests.exact_families import every_long_family
from tests.hit_cases import CASES, OUTPUT, last_end, prompt
from tests.storage_cases import (
    KINDS,
    QUICK,
    check_sums,
    evict_all,
    file_url,
    lost,
    prove_storage,
    shelf_for,
    shelf_lab,
    storage_lab,
    stored_pages,
    usable_end,
)

STATES = ("qwen3_next", "falcon_h1", "mamba2")
LONG = (pytest.mark.long,)
families_and_pages = pytest.mark.parametrize(
    ("family", "page"),
    [
        *CASES,
        *((family, 16) for family in STATES),
        *(pytest.param(family, 64, marks=LONG) for family in STATES),
    ],
)
kinds = pytest.mark.parametrize(
    ("family", "page"),
    [
        *(pytest.param(family, 16, marks=LONG * (family not in QUICK)) for family in KINDS),
        *(pytest.param(family, 64, marks=LONG) for family in ("llama", "gemma3", "falcon_h1")),
    ],
)


@families_and_pages
def test_after_a_restart_the_whole_prefix_comes_from_storage(family, page, tmp_path):
    tokens = prompt(page, 1)
    end = last_end(len(tokens), page)
    url = file_url(tmp_path)
    with storage_lab(family, page, url) as this:
        assert this.ask(tokens).cached == on_device(this.spec, 0)
    with storage_lab(family, page, url) as this:
        assert this.ask(tokens).cached == on_storage(this.spec, end)
        assert this.ask(tokens).cached == on_device(this.spec, end)
        check_sums(this)


@kinds
def test_every_turn_of_a_conversation_goes_on_from_storage(family, page):
    """Each turn in an engine of its own: a hit, a computed tail, and what they store together."""
    shelf = shelf_for(family, page)
    tokens, known = prompt(page, 1), 1
    for turn in range(3):
        with shelf_lab(family, page, shelf) as this:
            reply = this.ask(tokens)
            assert reply.cached == on_storage(this.spec, last_end(known, page))
            assert lost(this) == {}
        known = len(tokens) + OUTPUT
        tokens = [*tokens, *reply.tokens, *prompt(page, 100 + turn, page + 1)]


@kinds
def test_a_prompt_that_diverges_gets_what_is_usable_before_that(family, page):
    shelf = shelf_for(family, page)
    tokens = prompt(page, 1)
    shared = 2 * last_end(len(tokens), page) // 3 + page // 2
    other = tokens[:shared] + prompt(page, 2)[shared:]
    with shelf_lab(family, page, shelf) as this:
        this.ask(tokens)
    with shelf_lab(family, page, shelf) as this:
        best = usable_end(this, stored_pages(this, shelf, other), len(other))
        assert best == shared // page * page or family not in ("llama", "deepseek_v3")
        assert this.ask(other).cached == on_storage(this.spec, best)
        # A page of a window beyond the last common one is another page, and its state another.
        rest = shared // page * page - best
        missing = "state_missing" if family in STATES else "window_incomplete"
        byteless = not this.spec.groups[0].page_bytes  # then nothing says how far it would go
        assert lost(this) == ({missing: rest} if rest and not byteless else {})
        assert this.ask(tokens).cached.total == last_end(len(tokens), page)


@kinds
def test_a_prefix_on_the_device_on_the_host_and_in_storage(family, page):
    shelf = shelf_for(family, page)
    tokens = prompt(page, 1)
    end = last_end(len(tokens), page)
    middle = end - (2 * page if page == 16 else page)
    with shelf_lab(family, page, shelf) as this:
        this.ask(tokens)
    with shelf_lab(family, page, shelf) as this:
        short = this.ask(tokens[: middle + 1])
        before = lost(this)  # of it no window and no state is stored
        evict(this.parts, Tier.DEVICE, 0, keep=1)
        # At one page there is no state, and no page of a chunk that was behind the hit.
        usable = family not in STATES and (len(this.spec.groups) == 1 or not short.cached.total)
        device, host, storage = [page], [middle - page], [end - middle]
        for group in this.spec.groups[1:]:
            wanted = needed(group.retention, end, page)
            here = [at for at in wanted if at * page < middle]
            device.append(len(here) * page)
            host.append(0)
            storage.append((len(wanted) - len(here)) * page)
        assert this.ask(tokens).cached == cached(
            device,
            host,
            storage,
            device=page if usable else 0,
            host=middle - page if usable else middle,
            storage=end - middle,
        )
        assert lost(this) == before


@kinds
def test_what_was_fetched_and_evicted_is_fetched_again(family, page):
    shelf = shelf_for(family, page)
    tokens = prompt(page, 1)
    end = last_end(len(tokens), page)
    with shelf_lab(family, page, shelf) as this:
        this.ask(tokens)
        objects = len(shelf.snapshot())
        for _ in range(2):
            evict_all(this)
            assert this.ask(tokens).cached == on_storage(this.spec, end)
        evict(this.parts, Tier.DEVICE, 0)
        assert this.ask(tokens).cached.total == end
        assert lost(this) == {}
    assert len(shelf.snapshot()) == objects, "a page was stored that nobody could use"


@kinds
def test_a_prompt_of_exactly_k_pages(family, page):
    shelf = shelf_for(family, page)
    tokens = prompt(page, 3, 4 * page)
    for known in (0, 3 * page):
        with shelf_lab(family, page, shelf) as this:
            assert this.ask(tokens).cached == on_storage(this.spec, known)


@kinds
def test_a_fetched_prefix_goes_to_the_host_and_stays_there(family, page):
    shelf = shelf_for(family, page)
    tokens = prompt(page, 1)
    end = last_end(len(tokens), page)
    with shelf_lab(family, page, shelf) as this:
        this.ask(tokens)
    with shelf_lab(family, page, shelf) as this:
        this.ask(tokens)
        for group in reversed(this.spec.groups):
            evict(this.parts, Tier.DEVICE, group.id)
        assert this.ask(tokens).cached == on_host(this.spec, end)
        assert sum(span_tokens(this.spec, end)) > 0


@every_long_family
def test_every_family_through_a_restart(family):
    prove_storage(family, shelf_for(family, 16))
