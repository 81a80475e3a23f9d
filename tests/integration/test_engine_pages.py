"""Pages under pressure: windows give theirs back while a prompt is computed, and what admission has
promised is there in pools of any size.
"""

import numpy as np
import pytest

from stratakv.core.config import EngineConfig
from stratakv.core.errors import RequestError
from stratakv.policy.admission import demand
from stratakv.spec.retention import KeepChunk, KeepWindow
from stratakv.tree.nodes import Tier
from tests.engines import (
    VOCABULARY,
    all_free,
    allocator,
    drain,
    evict_device,
    expected_tokens,
    greedy,
    on_host,
    run,
    token_engine,
    token_spec,
    tokens_of,
)
from tests.fixtures.models import random_prompt
from tests.hit_cases import lab

PAGE = 4


def config(**settings):
    plain = {"page_tokens": PAGE, "max_running": 4, "max_model_len": 400, "chunk_tokens": 9}
    return EngineConfig(**{**plain, "step_tokens": 14, **settings})


def in_use(parts, group):
    """Device pages of a group that a request or a copy holds: neither free nor evictable."""
    return [
        pool.total - pool.free - pool.evictable
        for pool in parts.cache.tiers.pools.stats()
        if pool.tier == "device"
    ][group]


def watch(parts, group):
    """The most pages in use at any forward, as a list of one number."""
    forward, most = parts.runner.forward, [0]

    def watching(batch):
        most[0] = max(most[0], in_use(parts, group))
        return forward(batch)

    parts.runner.forward = watching
    return most


@pytest.mark.parametrize("window_pages", [8, 60])
@pytest.mark.parametrize("cache", ["device", "off"])
def test_pages_behind_a_window_are_reused_while_a_long_prompt_is_computed(window_pages, cache):
    # Window 40: 3 pages; a chunk of 64: 4 pages, and one more where it begins within a page.
    pools = {"device": (130, window_pages), "host": (0, 0)}
    with lab("gemma3", 16, **pools, cache=cache, chunk_tokens=64, max_model_len=2048) as this:
        most = watch(this.parts, 1)
        this.ask(random_prompt(77, 2000))
        assert most == [7]
        assert allocator(this.parts, Tier.DEVICE, 1).peak <= window_pages


@pytest.mark.parametrize("rule", [KeepWindow(40), KeepWindow(10), KeepWindow(1), KeepChunk(24)])
def test_no_request_ever_holds_more_of_a_window_than_was_booked(rule):
    # Two prefills share the budget of a step, so that chunks begin anywhere in a page.
    spec, page = token_spec(16, rule), 16
    rng = np.random.default_rng(1)
    for chunk in (16, 33, 40):
        settings = config(page_tokens=page, chunk_tokens=chunk, step_tokens=chunk + 15)
        peak = demand(spec, 320, 320, chunk, 0).peak[1]
        with token_engine(spec, settings, (60, 2 * peak), (60, 60)) as parts:
            prompts = [rng.integers(0, VOCABULARY, 190).tolist() for _ in range(3)]
            run(parts, *(greedy(str(n), prompt, 5) for n, prompt in enumerate(prompts)))
            assert parts.runner.pages_held[1] <= peak


@pytest.mark.parametrize("host", [(0, 0), (9, 5), (80, 40)])
@pytest.mark.parametrize("fill", range(8))
def test_tight_pools_serve_every_request_to_its_end(host, fill):
    """From "one request fits" up: all finish, with the tokens of a run that has no cache."""
    longest = 60
    spec = token_spec(PAGE, KeepWindow(10))
    whole, peak = demand(spec, longest, longest, 9, 0).peak
    device = (whole + 4 * fill, peak + (fill // 2) * 3)
    rng = np.random.default_rng(fill)
    trunk = rng.integers(0, VOCABULARY, 40).tolist()
    prompts: dict[str, tuple[list[int], int]] = {}
    for n in range(10):
        shared = int(rng.integers(0, 41))
        count = int(rng.integers(1, 16))
        own = int(rng.integers(1, longest - count - shared + 1))
        tail = rng.integers(0, VOCABULARY, own).tolist()
        prompts[str(n)] = (trunk[:shared] + tail, count)
    settings = config(cache="host" if host[0] else "device", load_back_threshold=5)
    with token_engine(spec, settings, device, host) as parts:
        for name, (prompt, count) in prompts.items():
            parts.engine.submit(greedy(name, prompt, count))
        got = {name: [] for name in prompts}
        while parts.engine.has_work():
            for output in parts.engine.step():
                got[output.request].append(output.token)
            parts.engine.check()
        for name, (prompt, count) in prompts.items():
            assert got[name] == expected_tokens(prompt, count)
        assert parts.engine.flush()
        assert all_free(parts)


def test_tight_pools_of_a_real_model():
    chunk = 40
    with lab("gemma3", 16, (10, 7), (12, 6), chunk_tokens=chunk, step_tokens=chunk + 13) as this:
        trunk = random_prompt(21, 90)
        for n in range(6):
            this.submit(str(n), trunk[: 30 * (n % 3 + 1)] + random_prompt(30 + n, 20 + 7 * n), 6)
        this.drain()
        assert this.parts.engine.flush()
        assert all_free(this.parts)


def test_a_request_that_computes_what_another_one_loads_keeps_no_second_page():
    """B parts from A right below a milestone, at 32 pages, and hits the one at 16. Of what
    it computes from there on, a load for A's beginning is just landing the same pages. There are
    two pages for one place until the load ends, and no longer: admission has booked one."""
    spec = token_spec(PAGE, KeepWindow(56))
    peak = demand(spec, 320, 320, 8, 0).peak[1]
    rng = np.random.default_rng(5)
    known = rng.integers(0, VOCABULARY, 64 * PAGE + 1).tolist()
    beginning = known[: 32 * PAGE + 1]
    branch = known[: 31 * PAGE] + rng.integers(0, VOCABULARY, 100).tolist()
    other = rng.integers(0, VOCABULARY, 140).tolist()
    settings = config(chunk_tokens=8, step_tokens=15)
    with token_engine(spec, settings, (200, 2 * peak), (300, 300)) as parts:
        run(parts, greedy("A", known, 1))
        evict_device(parts)
        duplicates = parts.cache.tiers.pools.counters.duplicate_pages
        parts.engine.submit(greedy("B", branch, 5))
        got = parts.engine.step() + parts.engine.step()
        parts.engine.submit(greedy("A again", beginning, 1))
        parts.engine.submit(greedy("C", other, 5))
        while parts.engine.has_work():
            got += parts.engine.step()
            parts.engine.check()
            assert in_use(parts, 1) <= 2 * peak
        cached = {output.request: output.cached for output in got if output.cached is not None}
        assert cached["B"] == on_host(spec, 16 * PAGE)
        assert cached["A again"].total == 32 * PAGE
        assert parts.cache.tiers.pools.counters.load_pages > 0
        assert parts.cache.tiers.pools.counters.duplicate_pages > duplicates
        for name, prompt, count in (("B", branch, 5), ("A again", beginning, 1), ("C", other, 5)):
            generated = tokens_of([output for output in got if output.request == name])
            assert generated == expected_tokens(prompt, count)


@pytest.mark.parametrize(
    ("tokens", "count", "why"),
    [
        (0, 4, "empty"),
        (400, 4, "at most 399"),
        (5, 0, "1 to"),
        (300, 99, "pages of group g0, which has 50"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(tokens, count, why):
    with token_engine(token_spec(PAGE, KeepWindow(10)), config(), (50, 20), (0, 0)) as parts:
        with pytest.raises(RequestError, match=why):
            parts.engine.submit(greedy("r", [1] * tokens, count))
        assert not parts.engine.has_work()


def test_a_window_pool_too_small_for_one_request_is_named():
    with token_engine(token_spec(PAGE, KeepWindow(10)), config(), (50, 5), (0, 0)) as parts:
        with pytest.raises(RequestError, match="group g1, which has 5"):
            parts.engine.submit(greedy("r", [1] * 100, 4))
        run(parts, greedy("short", [1] * 10, 4))  # what fits is served


def test_a_name_in_use_is_refused_and_free_again_after_the_end():
    with token_engine(token_spec(PAGE), config(), (50,), (0,)) as parts:
        parts.engine.submit(greedy("r", [1, 2], 2))
        with pytest.raises(RequestError, match="exists already"):
            parts.engine.submit(greedy("r", [3], 2))
        drain(parts)
        run(parts, greedy("r", [3], 2))


def test_output_stops_where_the_model_does():
    with token_engine(token_spec(PAGE), config(max_model_len=20), (50,), (0,)) as parts:
        out = run(parts, greedy("r", [1] * 17, 100))["r"]
        assert tokens_of(out) == expected_tokens([1] * 17, 3)
