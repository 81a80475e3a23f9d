"""A prompt computed in one engine is continued in another one, over a copy of bytes: what it says
is what one engine says, pages that anybody may still touch are nobody else's, and an abort or a
failure at any moment leaves nothing behind on either side.
"""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from stratakv.cache.records import CacheUse
from stratakv.core.errors import RequestError
from stratakv.core.ids import GroupId, RequestId
from stratakv.engine.request import Failure, FinishReason, Phase
from stratakv.engine.roles import MayStart, Start
from stratakv.policy.admission import demand
from stratakv.spec.derive import spec_of
from stratakv.spec.retention import KeepBoundary, KeepLive, KeepWindow, handed_over
from stratakv.testing.hand_off import HandOffSide, LocalDecodeRole, LocalHandOff
from stratakv.tiers import progress
from stratakv.tree.nodes import Tier
from tests.engines import (
    RecordingRunner,
    allocator,
    ended,
    evict_device,
    expected_tokens,
    greedy,
    tokens_of,
)
from tests.hit_cases import engine_model, prompt
from tests.pairs import PAGE, PROMPT, RULES, every_rule, model_pair, right, token_pair


@pytest.fixture(autouse=True)
def nobody_sleeps(monkeypatch):
    """Engines that wait for each other give each other turns."""
    monkeypatch.setattr(progress, "POLL_S", 0.0)


# -- real models ---------------------------------------------------------------------------------


OTHERS = ["llama", "gemma3", "deepseek_v4"]
FAMILIES = pytest.mark.parametrize("family", ["qwen3_next", *OTHERS])


@FAMILIES
def test_another_engine_goes_on_exactly(family):
    """Prompts of one token, of less than a page, at its end and beyond, with a window behind; then
    each goes on as a conversation does, from what both sides have cached by then."""
    with model_pair(family) as pair:
        prompts = {f"{n}": prompt(PAGE, n, n) for n in (1, 7, 48, 80, 101)}
        answers = pair.run(*(greedy(name, tokens, 14) for name, tokens in prompts.items()))
        for tokens, answer in zip(prompts.values(), answers, strict=True):
            assert answer == right(family, tokens, 14)
        first = {name: pair.outputs(name)[0] for name in prompts}
        assert all(output.cached.total == 0 for output in first.values())
        longer = {
            f"{name}+": [*tokens, *answer, 5, 9]
            for (name, tokens), answer in zip(prompts.items(), answers, strict=True)
        }
        again = pair.run(*(greedy(name, tokens, 4) for name, tokens in longer.items()))
        for tokens, answer in zip(longer.values(), again, strict=True):
            assert answer == right(family, tokens, 4)
        assert pair.outputs("101+")[0].cached.total > 0
        pair.assert_nothing_left()


@FAMILIES
def test_it_is_retracted_where_it_decodes_and_goes_on(family):
    spec = spec_of(engine_model(family).config, page_tokens=PAGE, dtype="float32")
    longest = 51 + 40
    anchor, *others = demand(spec, longest, longest, 40, 0).peak
    tight = (anchor + 4, *(3 * pages for pages in others))
    with model_pair(family, tight, reserve_tokens=1) as pair:
        prompts = [prompt(PAGE, at, tokens) for at, tokens in enumerate((44, 51, 39))]
        answers = pair.run(*(greedy(f"{at}", tokens, 40) for at, tokens in enumerate(prompts)))
        assert answers == [right(family, tokens, 40) for tokens in prompts]
        assert pair.decode.cache.tiers.pools.counters.retracted > 0
        pair.assert_nothing_left()


@pytest.mark.parametrize(
    "family", ["qwen3_next", *(pytest.param(one, marks=pytest.mark.long) for one in OTHERS)]
)
@pytest.mark.parametrize("side", HandOffSide)
def test_an_abort_at_any_moment_leaves_nothing_and_harms_nobody(family, side):
    with model_pair(family) as pair:
        tokens, other = prompt(PAGE, 3, 70), prompt(PAGE, 4, 70)
        seen = set()
        for steps in range(12):
            pair.link.slow(Random(steps), most=1)  # anew: how often a run looks is its own affair
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


@every_rule
@pytest.mark.parametrize("tokens", [1, 4, 5, 11, 12, 13, 40, 41])
def test_what_is_taken_and_sent_is_what_each_group_needs_at_the_end(rules, tokens):
    with token_pair(*rules) as pair:
        pair.submit(greedy("r", PROMPT[:tokens], 3))
        pair.decode.engine.step()
        groups = pair.decode.spec.groups
        for group in groups:
            wanted = len(handed_over(group.retention, tokens, 4))
            space = allocator(pair.decode, Tier.DEVICE, group.id)
            assert space.capacity - space.available() == wanted, group.name
        pair.drain()
        assert tokens_of(pair.outputs("r")) == expected_tokens(PROMPT[:tokens], 3)
        moved = [pair.link.moved.get(group.id, 0) for group in groups]
        assert moved == [len(handed_over(group.retention, tokens, 4)) for group in groups]
        pair.assert_nothing_left()


@every_rule
def test_pages_are_sent_while_the_rest_of_the_prompt_is_computed(rules):
    """All that is full by then of what the other side will need, and nothing else; a window that
    lies in the last chunk, and a state, come at the end."""
    with token_pair(*rules) as pair:
        pair.submit(greedy("r", PROMPT, 3))
        computed, moved = RecordingRunner(pair.sides[HandOffSide.PREFILL]), {}
        while computed.computed_tokens < len(PROMPT):
            pair.step()
            moved[computed.computed_tokens] = dict(pair.link.moved)
        assert len(moved) > 5
        for tokens, counts in moved.items():
            for group in pair.decode.spec.groups:
                span = handed_over(group.retention, len(PROMPT), 4)
                full = 0 if group.stateful else len(range(span.start, min(span.stop, tokens // 4)))
                assert counts.get(group.id, 0) == (full if tokens < len(PROMPT) else len(span))
        pair.drain()
        assert tokens_of(pair.outputs("r")) == expected_tokens(PROMPT, 3)
        pair.assert_nothing_left()


@every_rule
def test_requests_that_are_read_are_not_retracted_where_prompts_are_computed(rules):
    """Everything on the device is wanted now and then, while chunks are on their way, slowly; those
    of which nothing is read are retracted and come back. What is freed is poisoned."""
    rng = Random(3)
    with token_pair(*rules, reserve_tokens=1) as pair:
        prefill = pair.sides[HandOffSide.PREFILL]
        pair.link.slow(rng, most=8)
        asked = [
            greedy(f"{n}", [n, *PROMPT[: rng.randrange(20, 59)]], rng.randrange(1, 5))
            for n in range(8)
        ]
        for one in asked:
            pair.submit(one)
        while any(parts.engine.has_work() for parts in pair.sides.values()):
            pair.step()
            if rng.random() < 0.5:
                for one in asked:
                    prefill.engine.retract(one.id)
                prefill.cache.progress.push_out(Tier.DEVICE)
                prefill.engine.check()
        for one in asked:
            answer = expected_tokens(one.tokens, one.sampling.max_tokens)
            assert tokens_of(pair.outputs(one.id)) == answer
        assert prefill.cache.tiers.pools.counters.retracted > 0
        pair.assert_nothing_left()


@every_rule
@pytest.mark.parametrize("more", [1, 2, 3, 4, 11])
def test_what_decode_has_cached_is_not_sent_again(rules, more):
    with token_pair(*rules) as pair:
        pair.run(greedy("first", PROMPT[:20], 9))
        before = dict(pair.link.moved)
        asked = PROMPT[:20] + expected_tokens(PROMPT[:20], 9) + PROMPT[:more]
        assert pair.run(greedy("next", asked, 3)) == [expected_tokens(asked, 3)]
        held = pair.outputs("next")[0].cached.total
        assert held % 4 == 0
        assert held or KeepBoundary() in rules or KeepLive() in rules
        for group in pair.decode.spec.groups:
            span = handed_over(group.retention, len(asked), 4)
            fresh = len(span) if group.stateful else span.stop - max(span.start, held // 4)
            assert pair.link.moved.get(group.id, 0) - before.get(group.id, 0) == fresh
        pair.assert_nothing_left()


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("rules", [RULES[name] for name in RULES if name not in ("state", "all")])
def test_the_same_prompt_sent_again_is_found_where_it_decodes(rules, page):
    """Wherever it ends, also at the end of a page: one page of it at most comes again."""
    with token_pair(*rules, page=page, device=60, host=0, snapshot_tokens=8) as pair:
        for tokens in (1, 3, 4, 5, 8, 11, 12, 13, 16, 23, 24, 25):
            asked = [tokens, *PROMPT[: tokens - 1]]
            for name in ("first", "again"):
                before = pair.link.moved.get(GroupId(0), 0)
                one = greedy(f"{name}{tokens}", asked, 3)
                assert pair.run(one) == [expected_tokens(asked, 3)]
                held = pair.outputs(one.id)[0].cached.total
                assert held == (0 if name == "first" else (tokens - 1) // page * page)
                sent = -(-tokens // page) - held // page
                assert pair.link.moved.get(GroupId(0), 0) - before == sent
        pair.assert_nothing_left()


@pytest.mark.parametrize("rules", [RULES["state"], RULES["all"][:2]], ids=["state", "window too"])
def test_a_prompt_of_a_model_with_states_is_found_where_it_decodes_by_what_is_longer(rules):
    """And that only where it ends with a page: there its one snapshot is. Where it was computed it
    is found again itself."""
    with token_pair(*rules, device=60, snapshot_tokens=4) as pair:
        for tokens in range(5, 22):
            asked = [tokens, *PROMPT[: tokens - 1]]
            held = {}
            for name, more in (("first", []), ("again", []), ("longer", PROMPT[:5])):
                one = greedy(f"{name}{tokens}", asked + more, 1)
                assert pair.run(one) == [expected_tokens(asked + more, 1)]
                held[name] = [pair.outputs(one.id, side)[0].cached.total for side in HandOffSide]
            below, whole = (tokens - 1) // 4 * 4, tokens // 4 * 4
            assert held["again"] == [below, 0]
            assert held["longer"] == [whole, tokens if tokens == whole else 0]
        pair.assert_nothing_left()


def test_a_prompt_that_is_retracted_where_it_is_computed_is_handed_over_whole():
    """Also the page that is behind its window at its end, and that the same prompt can hit."""
    for tokens in (10, 11, 12):
        with token_pair(KeepWindow(5), device=60) as pair:
            pair.submit(greedy("r", PROMPT[:tokens], 3))
            prefill = pair.sides[HandOffSide.PREFILL]
            computed = RecordingRunner(prefill)
            while computed.computed_tokens < 9:
                pair.step()
            prefill.engine.retract(RequestId("r"))
            prefill.cache.progress.push_out(Tier.DEVICE)
            pair.drain()
            assert tokens_of(pair.outputs("r")) == expected_tokens(PROMPT[:tokens], 3)
            assert prefill.cache.tiers.pools.counters.retracted == 1
            pair.run(greedy("again", PROMPT[:tokens], 3))
            assert pair.outputs("again")[0].cached.total == (tokens - 1) // 4 * 4
            pair.assert_nothing_left()


def test_who_leaves_nothing_takes_no_more_than_it_needs():
    with token_pair(KeepWindow(4), device=60, host=0) as pair:
        asked = replace(greedy("r", PROMPT[:24], 3), use=CacheUse.NOTHING)
        assert pair.run(asked) == [expected_tokens(PROMPT[:24], 3)]
        assert pair.link.moved == {GroupId(0): 6, GroupId(1): 1}
        assert pair.run(greedy("s", PROMPT[:24], 3)) == [expected_tokens(PROMPT[:24], 3)]
        assert pair.link.moved == {GroupId(0): 12, GroupId(1): 3}
        pair.assert_nothing_left()


def test_a_page_of_one_token():
    with token_pair(KeepWindow(5), page=1, snapshot_tokens=2) as pair:
        assert pair.run(greedy("r", PROMPT[:30], 5)) == [expected_tokens(PROMPT[:30], 5)]
        pair.assert_nothing_left()


def test_what_the_host_holds_of_a_prefix_is_loaded_and_not_sent():
    with token_pair() as pair:
        pair.run(greedy("first", PROMPT[:40], 2))
        pair.decode.cache.progress.push_out(Tier.DEVICE)
        before = pair.link.moved[GroupId(0)]
        assert pair.run(greedy("again", PROMPT[:40], 4)) == [expected_tokens(PROMPT[:40], 4)]
        cached = pair.outputs("again")[0].cached
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
        answers = pair.run(*asked)
        for one, answer in zip(asked, answers, strict=True):
            assert answer == expected_tokens(one.tokens, one.sampling.max_tokens)
        pair.assert_nothing_left()


# -- pages that run short where it decodes -------------------------------------------------------


def test_a_decode_engine_admits_by_what_decoding_takes():
    """A window of 10 takes 4 pages of 4 while it decodes, and 6 beside a chunk of 9 tokens; the
    prompts take 13."""
    with token_pair(KeepWindow(10), device=(60, 16)) as pair:
        pair.link.stop()
        for n in range(4):
            pair.submit(greedy(f"{n}", [n, *PROMPT[:50]], 3))
        pair.decode.engine.step()
        assert pair.decode.engine.stats().running == 4
        pair.link.go()
        pair.drain()
        for n in range(4):
            assert tokens_of(pair.outputs(f"{n}")) == expected_tokens([n, *PROMPT[:50]], 3)
        pair.assert_nothing_left()


def test_what_receives_leaves_room_for_the_longest_that_decodes():
    """However long their transfers take: it is never kept waiting for one."""
    with token_pair(device=30, reserve_tokens=1) as pair:
        pair.run(greedy("warm", PROMPT[:9], 1))
        pair.submit(greedy("long", PROMPT[:8], 80))
        while pair.phase(HandOffSide.DECODE, "long") is not Phase.DECODING:
            pair.step()
        pair.link.stop()
        for n in range(3):
            pair.submit(greedy(f"{n}", [n, *PROMPT[:15]], 2))
        for _ in range(100):  # steps; it has 80 tokens to say, each the step after the one before
            pair.step()
        assert tokens_of(pair.outputs("long")) == expected_tokens(PROMPT[:8], 80)
        phases = [pair.phase(HandOffSide.DECODE, f"{n}") for n in range(3)]
        assert phases[0] is Phase.TRANSFERRING
        pair.link.go()
        pair.drain()
        pair.assert_nothing_left()


@every_rule
@pytest.mark.parametrize("count", [1, 4, 7])
def test_what_the_host_cannot_save_goes_back_to_be_computed_with_all_its_output(rules, count):
    with token_pair(*rules, host=0) as pair:
        sampling = replace(greedy("r", PROMPT[:21], 12).sampling, temperature=1.0, seed=7)
        asked = replace(greedy("r", PROMPT[:21], 12), sampling=sampling)
        pair.submit(replace(asked, id=RequestId("alone")))
        pair.drain()
        pair.submit(asked)
        while len(pair.outputs("r")) < count:
            pair.step()
        sent = len(pair.outputs("r"))
        pair.decode.engine.retract(RequestId("r"))
        request = pair.decode.engine.status(RequestId("r"))
        assert request.retracted.tokens == 21 + sent - 1, "its last token has no KV"
        assert request.retracted.hold is None
        assert pair.phase(HandOffSide.DECODE, "r") is Phase.RETRACTED
        evict_device(pair.decode)
        while pair.phase(HandOffSide.DECODE, "r") is Phase.RETRACTED:
            pair.step()
        assert pair.phase(HandOffSide.DECODE, "r") in (Phase.TRANSFERRING, Phase.DECODING)
        pair.drain()
        assert tokens_of(pair.outputs("r")) == tokens_of(pair.outputs("alone"))
        assert tokens_of(pair.outputs("r", HandOffSide.PREFILL)) == [
            tokens_of(pair.outputs("r"))[0], tokens_of(pair.outputs("r"))[sent]
        ]  # fmt: skip
        assert [output.cached is not None for output in pair.outputs("r")] == [True] + [False] * 11
        pair.assert_nothing_left()


@every_rule
def test_requests_go_back_and_forth_while_pages_run_short(rules):
    """The engine that decodes has no host, and computes no prompt."""
    rng = Random(6)
    with token_pair(*rules, device=28, host=0, reserve_tokens=1) as pair:
        pair.link.slow(rng, most=4)
        recorder = RecordingRunner(pair.decode)
        asked = [
            greedy(f"{n}", PROMPT[: rng.randrange(1, 60)], rng.randrange(8, 40)) for n in range(8)
        ]
        answers = pair.run(*asked)
        for one, answer in zip(asked, answers, strict=True):
            assert answer == expected_tokens(one.tokens, one.sampling.max_tokens)
        assert pair.decode.cache.tiers.pools.counters.retracted_unsaved > 0
        assert recorder.computed_tokens <= sum(one.sampling.max_tokens for one in asked)
        pair.assert_nothing_left()


@pytest.mark.parametrize("side", HandOffSide)
def test_an_abort_while_it_goes_back_leaves_nothing(side):
    with token_pair(KeepWindow(10), host=0) as pair:
        for steps in (0, 1, 2, 3, 6):
            name = f"r{steps}"
            pair.submit(greedy(name, [steps, *PROMPT[:21]], 30))
            while len(pair.outputs(name)) < 3:
                pair.step()
            pair.decode.engine.retract(RequestId(name))
            for _ in range(steps):
                pair.step()
            pair.sides[side].engine.abort(RequestId(name))
            pair.drain()
            assert ended(pair.outputs(name)) is not None
        pair.assert_nothing_left()


class Unanswered(LocalDecodeRole):
    """Prefill does not answer those that are sent back until ``answers``."""

    answers = False

    def may_start(self, request):
        back = request.phase is Phase.RETRACTED
        return Start.WAIT if back and not self.answers else super().may_start(request)

    def poll(self):
        return [*super().poll(), MayStart(RequestId("back"))]


def test_while_one_waits_to_go_back_others_leave_it_its_pages():
    """It takes 10 pages of 20: of two that come behind it one is let in, and the other waits."""
    link = LocalHandOff()
    role = link.roles[HandOffSide.DECODE] = Unanswered(link)
    with token_pair(device=20, host=0, reserve_tokens=1, link=link) as pair:
        pair.submit(greedy("back", PROMPT[:36], 4))
        while not pair.outputs("back"):
            pair.step()
        pair.decode.engine.retract(RequestId("back"))
        for name, tokens in (("in", 30), ("waits", 12)):
            pair.submit(greedy(name, [*PROMPT[:tokens]][::-1], 8))
        for _ in range(4):
            pair.step()
            assert pair.phase(HandOffSide.DECODE, "waits") is Phase.WAITING
            assert pair.phase(HandOffSide.DECODE, "back") is Phase.RETRACTED
        assert pair.phase(HandOffSide.DECODE, "in") in (Phase.TRANSFERRING, Phase.DECODING)
        role.answers = True
        pair.step()
        assert pair.phase(HandOffSide.DECODE, "back") is Phase.TRANSFERRING
        pair.drain()
        assert tokens_of(pair.outputs("back")) == expected_tokens(PROMPT[:36], 4)
        pair.assert_nothing_left()


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [RULES["all"]], ids=["all"])
@pytest.mark.parametrize("side", HandOffSide)
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
            outputs = pair.outputs(name, side)
            if outputs and outputs[-1].finish is FinishReason.ABORT:
                across = HandOffSide.DECODE if side is HandOffSide.PREFILL else HandOffSide.PREFILL
                assert ended(pair.outputs(name, across)) is not None
        computes = Phase.PREFILLING if side is HandOffSide.PREFILL else Phase.DECODING
        assert {Phase.WAITING, Phase.TRANSFERRING, computes} <= seen
        pair.assert_nothing_left()


def test_pages_that_a_copy_may_still_write_are_nobody_elses():
    """Both have given the request up; what was begun is still on its way."""
    with token_pair(KeepWindow(10)) as pair:
        pair.link.stop()
        pair.submit(greedy("r", PROMPT[:30], 4))
        while pair.phase(HandOffSide.PREFILL, "r") is not Phase.TRANSFERRING:
            pair.step()
        free = [pool.free for pool in pair.decode.cache.tiers.pools.stats()]
        held = [pool.free for pool in pair.sides[HandOffSide.PREFILL].cache.tiers.pools.stats()]
        for parts in pair.sides.values():
            parts.engine.abort(RequestId("r"))
        for _ in range(5):
            pair.step()
        assert [pool.free for pool in pair.decode.cache.tiers.pools.stats()] == free
        assert [
            pool.free for pool in pair.sides[HandOffSide.PREFILL].cache.tiers.pools.stats()
        ] == held
        assert not any(parts.engine.flush() for parts in pair.sides.values())
        pair.link.go()
        pair.assert_nothing_left()


def test_a_request_whose_prompt_fails_fails_where_it_was_to_decode():
    with token_pair() as pair:
        pair.link.stop()
        pair.submit(greedy("r", PROMPT[:30], 4))
        pair.step()
        pair.sides[HandOffSide.PREFILL].engine.abort(RequestId("r"))
        pair.drain()
        last = pair.outputs("r")[-1]
        assert (last.finish, last.failure) == (FinishReason.ERROR, Failure.TRANSFER)
        assert pair.decode.engine.stats().failures["transfer"] == 1
        pair.assert_nothing_left()


def test_the_side_that_computed_says_that_another_goes_on():
    with token_pair() as pair:
        pair.run(greedy("r", PROMPT[:30], 4))
        outputs = pair.outputs("r", HandOffSide.PREFILL)
        assert tokens_of(outputs) == expected_tokens(PROMPT[:30], 1)
        assert ended(outputs) is FinishReason.HANDED_OFF


@pytest.mark.parametrize("count", [1, 2])
def test_an_answer_may_end_with_the_first_token(count):
    with token_pair() as pair:
        assert pair.run(greedy("r", PROMPT[:30], count)) == [expected_tokens(PROMPT[:30], count)]
        assert ended(pair.outputs("r")) is FinishReason.LENGTH
        pair.assert_nothing_left()


def test_a_name_is_taken_as_long_as_its_pages_are():
    with token_pair() as pair:
        pair.link.stop()
        pair.submit(greedy("r", PROMPT[:30], 4))
        pair.step()
        pair.decode.engine.abort(RequestId("r"))
        pair.sides[HandOffSide.PREFILL].engine.abort(RequestId("r"))
        np.testing.assert_equal(pair.phase(HandOffSide.DECODE, "r"), None)
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
