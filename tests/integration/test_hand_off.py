"""A prompt computed in one engine is continued in another one, over a copy of bytes: what it says
is what one engine says, pages that anybody may still touch are nobody else's, and an abort or a
failure at any moment leaves nothing behind on either side.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from stratakv.assembly.build import Sockets
from stratakv.core.config import EngineConfig
from stratakv.core.errors import RequestError
from stratakv.core.ids import GroupId, RequestId
from stratakv.engine.request import Failure, FinishReason, Phase
from stratakv.policy.admission import demand
from stratakv.spec.derive import spec_of
from stratakv.spec.retention import KeepBoundary, KeepChunk, KeepLive, KeepWindow, needed
from stratakv.testing.hand_off import HandOff, Side
from stratakv.tiers import tiered_cache
from stratakv.tree.nodes import Tier
from tests.engines import (
    VOCABULARY,
    all_free,
    allocator,
    ended,
    expected_tokens,
    greedy,
    small_engine,
    token_engine,
    token_spec,
    tokens_of,
)
from tests.fixtures.models import tiny_model
from tests.hit_cases import config_for, engine_model, oracle, prompt

PAGE = 16


@pytest.fixture(autouse=True)
def nobody_sleeps(monkeypatch):
    """Engines that wait for each other give each other turns."""
    monkeypatch.setattr(tiered_cache, "POLL_S", 0.0)


class Pair:
    """Two engines, a step of each after the other; both are checked after each of theirs."""

    def __init__(self, link, prefill, decode):
        self.link = link
        self.sides = {Side.PREFILL: prefill, Side.DECODE: decode}
        self.out = {side: {} for side in Side}
        link.connect(prefill.spec, prefill.pools, decode.pools)

    @property
    def decode(self):
        return self.sides[Side.DECODE]

    def submit(self, asked):
        for side, parts in self.sides.items():
            self.out[side][asked.id] = []
            parts.engine.submit(asked)

    def step(self):
        for side, parts in self.sides.items():
            for output in parts.engine.step():
                self.out[side][output.request].append(output)
            parts.engine.check()

    def drain(self):
        while any(parts.engine.has_work() for parts in self.sides.values()):
            self.step()

    def run(self, *asked):
        for one in asked:
            self.submit(one)
        self.drain()
        return [tokens_of(self.said(one.id)) for one in asked]

    def said(self, name, side=Side.DECODE):
        return self.out[side][name]

    def phase(self, side, name):
        found = self.sides[side].engine._requests.get(RequestId(name))
        return None if found is None else found.phase

    def assert_nothing_left(self):
        self.drain()
        assert not len(self.link)
        for parts in self.sides.values():
            stats = parts.engine.stats()
            assert (stats.waiting, stats.running) == (0, 0)
            assert parts.engine.flush()
            parts.engine.check()
            assert all_free(parts)


# -- real models ---------------------------------------------------------------------------------


@contextmanager
def model_pair(family, decode_pages=None, **settings):
    torch.set_num_threads(1)
    model = engine_model(family)
    spec = spec_of(model.config, page_tokens=PAGE, dtype=model.dtype)
    plenty = (64,) * len(spec.groups)
    link, config = HandOff(), config_for(PAGE, snapshot_tokens=PAGE, **settings)
    with ExitStack() as undo:
        sides = [
            undo.enter_context(small_engine(model, config, pages, plenty, role=link.roles[side]))
            for side, pages in ((Side.PREFILL, plenty), (Side.DECODE, decode_pages or plenty))
        ]
        yield Pair(link, *sides)


def right(family, tokens, count):
    return oracle(tiny_model(family), tuple(tokens), count)[0]


FAMILIES = pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "deepseek_v4"])


@FAMILIES
def test_another_engine_goes_on_exactly(family):
    """Prompts of one token, of less than a page, at its end and beyond, with a window behind; then
    each goes on as a conversation does, from what both sides have cached by then."""
    with model_pair(family) as pair:
        prompts = {f"{n}": prompt(PAGE, n, n) for n in (1, 7, 48, 80, 101)}
        said = pair.run(*(greedy(name, tokens, 14) for name, tokens in prompts.items()))
        for tokens, answer in zip(prompts.values(), said, strict=True):
            assert answer == right(family, tokens, 14)
        first = {name: pair.said(name)[0] for name in prompts}
        assert all(output.cached.total == 0 for output in first.values())
        longer = {
            f"{name}+": [*tokens, *answer, 5, 9]
            for (name, tokens), answer in zip(prompts.items(), said, strict=True)
        }
        again = pair.run(*(greedy(name, tokens, 4) for name, tokens in longer.items()))
        for tokens, answer in zip(longer.values(), again, strict=True):
            assert answer == right(family, tokens, 4)
        assert pair.said("101+")[0].cached.total > 0
        pair.assert_nothing_left()


@FAMILIES
def test_it_is_retracted_where_it_decodes_and_goes_on(family):
    spec = spec_of(engine_model(family).config, page_tokens=PAGE, dtype="float32")
    longest = 51 + 40
    anchor, *others = demand(spec, longest, longest, 40, 0).peak
    tight = (anchor + 4, *(3 * pages for pages in others))
    with model_pair(family, tight, reserve_tokens=1) as pair:
        prompts = [prompt(PAGE, at, tokens) for at, tokens in enumerate((44, 51, 39))]
        said = pair.run(*(greedy(f"{at}", tokens, 40) for at, tokens in enumerate(prompts)))
        assert said == [right(family, tokens, 40) for tokens in prompts]
        assert pair.decode.cache.counters.retracted > 0
        pair.assert_nothing_left()


@FAMILIES
@pytest.mark.parametrize("side", Side)
def test_an_abort_at_any_moment_leaves_nothing_and_harms_nobody(family, side):
    with model_pair(family) as pair:
        pair.link.slow(Random(1), most=2)
        tokens, other = prompt(PAGE, 3, 70), prompt(PAGE, 4, 70)
        seen = set()
        for steps in range(10):
            pair.submit(greedy(f"r{steps}", [steps, *tokens], 5))
            for _ in range(steps):
                pair.step()
            seen.add(pair.phase(side, f"r{steps}"))
            pair.sides[side].engine.abort(RequestId(f"r{steps}"))
            pair.sides[side].engine.check()
            assert pair.run(greedy(f"s{steps}", [steps, *other], 3)) == [
                right(family, [steps, *other], 3)
            ]
        assert {Phase.WAITING, Phase.TRANSFERRING} <= seen
        pair.assert_nothing_left()


# -- pages ---------------------------------------------------------------------------------------

RULES = {
    "full": (),
    "window": (KeepWindow(10),),
    "short window": (KeepWindow(3),),
    "chunk": (KeepChunk(12),),
    "state": (KeepBoundary(),),
    "all": (KeepWindow(10), KeepBoundary(), KeepLive()),
}
CONFIG = EngineConfig(
    page_tokens=4,
    max_running=4,
    max_model_len=200,
    chunk_tokens=9,
    step_tokens=20,
    snapshot_tokens=8,
    load_back_threshold=1,
)
PROMPT = [n * 7 % VOCABULARY for n in range(60)]


@contextmanager
def token_pair(*rules, device=60, host=100, page=4, **settings):
    spec, config = token_spec(page, *rules), replace(CONFIG, page_tokens=page, **settings)
    link = HandOff()
    groups = len(spec.groups)
    with ExitStack() as undo:
        sides = [
            undo.enter_context(
                token_engine(
                    spec, config, (pages,) * groups, (host,) * groups,
                    sockets=Sockets(role=lambda side=side: link.roles[side]),
                )
            )
            for side, pages in ((Side.PREFILL, 60), (Side.DECODE, device))
        ]  # fmt: skip
        yield Pair(link, *sides)


every_rule = pytest.mark.parametrize("rules", RULES.values(), ids=RULES)


@every_rule
@pytest.mark.parametrize("tokens", [1, 4, 5, 11, 12, 13, 40, 41])
def test_what_is_taken_and_sent_is_what_each_group_needs_at_the_end(rules, tokens):
    with token_pair(*rules) as pair:
        pair.submit(greedy("r", PROMPT[:tokens], 3))
        pair.decode.engine.step()
        groups = pair.decode.spec.groups
        for group in groups:
            wanted = len(needed(group.retention, tokens, 4))
            space = allocator(pair.decode, Tier.DEVICE, group.id)
            assert space.capacity - space.available() == wanted, group.name
        pair.drain()
        assert tokens_of(pair.said("r")) == expected_tokens(PROMPT[:tokens], 3)
        moved = [pair.link.moved.get(group.id, 0) for group in groups]
        assert moved == [len(needed(group.retention, tokens, 4)) for group in groups]
        pair.assert_nothing_left()


@every_rule
@pytest.mark.parametrize("more", [1, 2, 3, 4, 11])
def test_what_decode_has_cached_is_not_sent_again(rules, more):
    with token_pair(*rules) as pair:
        pair.run(greedy("first", PROMPT[:20], 9))
        before = dict(pair.link.moved)
        asked = PROMPT[:20] + expected_tokens(PROMPT[:20], 9) + PROMPT[:more]
        assert pair.run(greedy("next", asked, 3)) == [expected_tokens(asked, 3)]
        held = pair.said("next")[0].cached.total
        assert held % 4 == 0
        assert held or KeepBoundary() in rules or KeepLive() in rules
        for group in pair.decode.spec.groups:
            span = needed(group.retention, len(asked), 4)
            fresh = len(span) if group.stateful else span.stop - max(span.start, held // 4)
            assert pair.link.moved.get(group.id, 0) - before.get(group.id, 0) == fresh
        pair.assert_nothing_left()


def test_a_page_of_one_token():
    with token_pair(KeepWindow(5), page=1, snapshot_tokens=2) as pair:
        assert pair.run(greedy("r", PROMPT[:30], 5)) == [expected_tokens(PROMPT[:30], 5)]
        pair.assert_nothing_left()


def test_what_the_host_holds_of_a_prefix_is_loaded_and_not_sent():
    with token_pair() as pair:
        pair.run(greedy("first", PROMPT[:40], 2))
        pair.decode.cache.push_out(Tier.DEVICE)
        before = pair.link.moved[GroupId(0)]
        assert pair.run(greedy("again", PROMPT[:40], 4)) == [expected_tokens(PROMPT[:40], 4)]
        cached = pair.said("again")[0].cached
        assert (cached.device, cached.host) == (0, 36)
        assert pair.link.moved[GroupId(0)] - before == 1
        pair.assert_nothing_left()


@every_rule
def test_requests_come_and_go_while_pages_run_short(rules):
    """Both sides retract, the copies are slow, and every token is right."""
    rng = Random(5)
    with token_pair(*rules, device=40, reserve_tokens=1) as pair:
        pair.link.slow(rng, most=4)
        asked = [
            greedy(f"{n}", PROMPT[: rng.randrange(1, 60)], rng.randrange(1, 40)) for n in range(16)
        ]
        said = pair.run(*asked)
        for one, answer in zip(asked, said, strict=True):
            assert answer == expected_tokens(one.tokens, one.sampling.max_tokens)
        pair.assert_nothing_left()


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [RULES["window"], RULES["all"]], ids=["window", "all"])
@pytest.mark.parametrize("side", Side)
def test_an_abort_in_every_phase_leaves_nothing(rules, side):
    """The pages are asked for by somebody else at once, while the copy may still write them."""
    seen, rng = set(), Random(2)
    with token_pair(*rules, device=24) as pair:
        pair.link.slow(rng, most=4)
        for steps in range(20):
            name = f"r{steps}"
            asked = [steps, *PROMPT[: 30 + steps % 5]]
            pair.submit(greedy(name, asked, 4))
            for _ in range(steps):
                pair.step()
            seen.add(pair.phase(side, name))
            pair.sides[side].engine.abort(RequestId(name))
            pair.sides[side].engine.check()
            other = [steps + 1, *PROMPT[7:40]]
            assert pair.run(greedy(f"s{steps}", other, 3)) == [expected_tokens(other, 3)]
            told = pair.said(name, side)
            if told and told[-1].finish is FinishReason.ABORT:
                across = Side.DECODE if side is Side.PREFILL else Side.PREFILL
                assert ended(pair.said(name, across)) is not None
        computes = Phase.PREFILLING if side is Side.PREFILL else Phase.DECODING
        assert {Phase.WAITING, Phase.TRANSFERRING, computes} <= seen
        pair.assert_nothing_left()


def test_pages_that_a_copy_may_still_write_are_nobody_elses():
    """Both have given the request up; what was begun is still on its way."""
    with token_pair(KeepWindow(10)) as pair:
        pair.link.stop()
        pair.submit(greedy("r", PROMPT[:30], 4))
        while pair.phase(Side.PREFILL, "r") is not Phase.TRANSFERRING:
            pair.step()
        free = [pool.free for pool in pair.decode.cache.stats()]
        held = [pool.free for pool in pair.sides[Side.PREFILL].cache.stats()]
        for parts in pair.sides.values():
            parts.engine.abort(RequestId("r"))
        for _ in range(5):
            pair.step()
        assert [pool.free for pool in pair.decode.cache.stats()] == free
        assert [pool.free for pool in pair.sides[Side.PREFILL].cache.stats()] == held
        assert not any(parts.engine.flush() for parts in pair.sides.values())
        pair.link.go()
        pair.assert_nothing_left()


def test_a_request_whose_prompt_fails_fails_where_it_was_to_decode():
    with token_pair() as pair:
        pair.link.stop()
        pair.submit(greedy("r", PROMPT[:30], 4))
        pair.step()
        pair.sides[Side.PREFILL].engine.abort(RequestId("r"))
        pair.drain()
        last = pair.said("r")[-1]
        assert (last.finish, last.failure) == (FinishReason.ERROR, Failure.TRANSFER)
        assert pair.decode.engine.stats().failures["transfer"] == 1
        pair.assert_nothing_left()


def test_the_side_that_computed_says_that_another_goes_on():
    with token_pair() as pair:
        pair.run(greedy("r", PROMPT[:30], 4))
        told = pair.said("r", Side.PREFILL)
        assert tokens_of(told) == expected_tokens(PROMPT[:30], 1)
        assert ended(told) is FinishReason.HANDED_OFF


@pytest.mark.parametrize("count", [1, 2])
def test_an_answer_may_end_with_the_first_token(count):
    with token_pair() as pair:
        assert pair.run(greedy("r", PROMPT[:30], count)) == [expected_tokens(PROMPT[:30], count)]
        assert ended(pair.said("r")) is FinishReason.LENGTH
        pair.assert_nothing_left()


def test_a_name_is_taken_as_long_as_its_pages_are():
    with token_pair() as pair:
        pair.link.stop()
        pair.submit(greedy("r", PROMPT[:30], 4))
        pair.step()
        pair.decode.engine.abort(RequestId("r"))
        pair.sides[Side.PREFILL].engine.abort(RequestId("r"))
        np.testing.assert_equal(pair.phase(Side.DECODE, "r"), None)
        with pytest.raises(RequestError, match="exists already"):
            pair.decode.engine.submit(greedy("r", PROMPT[:30], 4))
        pair.link.go()
        pair.assert_nothing_left()


def test_a_closed_engine_frees_what_was_being_transferred():
    with token_pair() as pair:
        pair.link.stop()
        pair.submit(greedy("r", PROMPT[:30], 4))
        for _ in range(6):
            pair.step()
        for parts in pair.sides.values():
            parts.engine.close()
            parts.engine.check()
