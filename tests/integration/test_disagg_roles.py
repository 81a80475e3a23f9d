"""A prompt computed in one engine is continued in another one, over a transport: what it says is
what one engine says; whoever is aborted, lost or late leaves no wrong byte and no page behind.
"""

from dataclasses import astuple, replace
from functools import partial
from random import Random

import numpy as np
import pytest

from stratakv.cache.records import TierTokens
from stratakv.core.errors import TransportError
from stratakv.core.ids import GroupId, LayerId, RequestId
from stratakv.disagg.loopback import LoopbackWire
from stratakv.disagg.peers import NO_WRITES
from stratakv.disagg.session import SessionState
from stratakv.engine.request import Failure, FinishReason, Phase, TransferSession
from stratakv.spec.retention import KeepBoundary, KeepLive, KeepWindow
from stratakv.testing.hand_off import HandOffSide
from stratakv.testing.patience import wait_until
from stratakv.testing.transport_faults import TransportFaults
from stratakv.tiers import progress
from tests.engines import ended, expected_tokens, greedy, tokens_of
from tests.fixtures.transports import open_loopback
from tests.hit_cases import prompt
from tests.pairs import PAGE, PROMPT, every_rule, right
from tests.transport_pairs import (
    STUCK,
    D,
    Link,
    P,
    apart,
    join_again,
    models_over,
    mooncake,
    settle,
    tcp,
    tokens_over,
    untidy,
    until,
)


@pytest.fixture(autouse=True)
def short_naps(monkeypatch):
    """Engines that wait leave the processor to the links' threads."""
    monkeypatch.setattr(progress, "POLL_S", 0.0005)


CHEAP = ["llama", "gemma3", "qwen3_next", "deepseek_v4"]
FAMILIES = pytest.mark.parametrize("family", CHEAP)
OPENS = {"loopback": open_loopback, "nixl": tcp, "mooncake": mooncake}
CASES = [
    pytest.param(family, opened, id=f"{name}-{family}", marks=() if cheap else pytest.mark.long)
    for name, opened in OPENS.items()
    for family in (*CHEAP, "gpt_oss", "deepseek_v3", "deepseek_v32")
    for cheap in [family in CHEAP and (name != "mooncake" or family == "llama")]
]


@pytest.mark.parametrize(("family", "opened"), CASES)
def test_another_engine_goes_on_exactly(family, opened):
    """Prompts of one token to beyond a page, with a window behind; then each goes on as a
    conversation does, from what both sides have cached by then."""
    with models_over(Link(opened, opened), family) as pair:
        prompts = {f"{n}": prompt(PAGE, n, n) for n in (1, 7, 48, 80, 101)}
        generated = pair.run(*(greedy(name, tokens, 6) for name, tokens in prompts.items()))
        for tokens, answer in zip(prompts.values(), generated, strict=True):
            assert answer == right(family, tokens, 14)[:6]
        longer = {
            f"{name}+": [*tokens, *answer, 5, 9]
            for (name, tokens), answer in zip(prompts.items(), generated, strict=True)
        }
        again = pair.run(*(greedy(name, tokens, 3) for name, tokens in longer.items()))
        for tokens, answer in zip(longer.values(), again, strict=True):
            assert answer == right(family, tokens, 3)
        cached = pair.outputs("101+")[0].cached
        assert cached.prefill is not None, "it was handed over"
        assert cached.total + sum(astuple(cached.prefill)) > 0, "a state is no page of decode's"
        settle(pair)


@every_rule
@pytest.mark.parametrize("seed", range(2))
def test_a_transport_that_is_slow_and_untidy_changes_no_token(rules, seed):
    rng = Random(seed)
    link = Link(untidy(seed), untidy(seed + 100))
    with tokens_over(link, *rules, device=40, reserve_tokens=1) as pair:
        asked = [
            greedy(f"{n}", PROMPT[: rng.randrange(1, 60)], rng.randrange(1, 20)) for n in range(8)
        ]
        for one, answer in zip(asked, pair.run(*asked), strict=True):
            assert answer == expected_tokens(one.tokens, one.sampling.max_tokens)
        settle(pair)


@every_rule
def test_what_decode_has_is_not_sent_and_the_rest_is_paired_by_its_place(rules):
    with tokens_over(Link(), *rules) as pair:
        pair.run(greedy("first", PROMPT[:20], 9))
        asked = PROMPT[:20] + expected_tokens(PROMPT[:20], 9) + PROMPT[:11]
        assert pair.run(greedy("next", asked, 3)) == [expected_tokens(asked, 3)]
        settle(pair)


def test_what_prefill_had_of_a_prompt_is_reported():
    with tokens_over(Link()) as pair:
        pair.run(greedy("first", PROMPT[:40], 2))
        pair.decode.engine.flush()
        pair.run(greedy("again", PROMPT[:40], 2))
        assert pair.outputs("first")[0].cached.prefill == TierTokens(0, 0, 0)
        assert pair.outputs("again")[0].cached.prefill == TierTokens(36, 0, 0)
        settle(pair)


def test_long_words_come_in_parts(monkeypatch):
    monkeypatch.setattr("stratakv.disagg.messages.NOTIFICATION_BYTES", 40)
    with tokens_over(Link(untidy(1), untidy(2)), KeepWindow(10)) as pair:
        assert pair.run(greedy("r", PROMPT[:50], 4)) == [expected_tokens(PROMPT[:50], 4)]
        settle(pair)


# -- ends ----------------------------------------------------------------------------------------

HARD = KeepWindow(10), KeepBoundary(), KeepLive()


@pytest.mark.parametrize("side", HandOffSide)
def test_an_abort_in_every_phase_leaves_nothing(side):
    """The pages are asked for by somebody else at once, while they may still be written."""
    computes = Phase.PREFILLING if side is HandOffSide.PREFILL else Phase.DECODING
    with tokens_over(Link(untidy(7), untidy(8)), *HARD, device=24) as pair:
        for at, phase in enumerate([Phase.WAITING, computes, Phase.TRANSFERRING] * 2):
            name = f"r{at}"
            pair.submit(greedy(name, [at, *PROMPT[: 30 + at]], 4))
            until(pair, lambda: pair.phase(side, name) in {phase, None}, "the phase")  # noqa: B023
            pair.sides[side].engine.abort(RequestId(name))
            other = [at + 1, *PROMPT[7:40]]
            assert pair.run(greedy(f"s{at}", other, 3)) == [expected_tokens(other, 3)]
            across = HandOffSide.DECODE if side is HandOffSide.PREFILL else HandOffSide.PREFILL
            assert ended(pair.outputs(name, across)) is not None
        settle(pair)


@FAMILIES
def test_an_abort_of_a_model_s_request_harms_nobody(family):
    with models_over(Link(untidy(3), untidy(4)), family) as pair:
        tokens, other = prompt(PAGE, 3, 70), prompt(PAGE, 4, 70)
        for steps in (3, 9):
            pair.submit(greedy(f"r{steps}", [steps, *tokens], 5))
            for _ in range(steps):
                pair.step()
            pair.decode.engine.abort(RequestId(f"r{steps}"))
            assert pair.run(greedy(f"s{steps}", [steps, *other], 3)) == [
                right(family, [steps, *other], 3)
            ]
        settle(pair)


def test_both_sides_may_abort_in_any_order():
    with tokens_over(Link(untidy(5), untidy(6)), KeepWindow(10), device=24) as pair:
        for steps in range(5):
            for first in HandOffSide:
                name = f"{first.name}{steps}"
                pair.submit(greedy(name, [steps, *PROMPT[:30]], 4))
                for _ in range(5 * steps):
                    pair.step()
                pair.sides[first].engine.abort(RequestId(name))
                for _ in range(steps % 4):
                    pair.step()
                for parts in pair.sides.values():
                    parts.engine.abort(RequestId(name))
                pair.drain()
        settle(pair)


def free_pages(parts):
    return [pool.free for pool in parts.cache.tiers.pools.stats()]


def test_pages_that_may_still_be_written_are_nobody_elses_until_the_fence():
    """Prefill's writes are begun when it likes; both sides have given the request up."""
    link = Link(prefill=untidy(1, STUCK))
    with tokens_over(link, KeepWindow(10)) as pair:
        pair.submit(greedy("r", PROMPT[:30], 4))
        until(
            pair, lambda: pair.phase(HandOffSide.PREFILL, "r") is Phase.TRANSFERRING, "the writes"
        )
        free = {side: free_pages(parts) for side, parts in pair.sides.items()}
        for parts in pair.sides.values():
            parts.engine.abort(RequestId("r"))
        for _ in range(5):
            pair.step()
        assert free == {side: free_pages(parts) for side, parts in pair.sides.items()}
        assert not any(parts.engine.flush() for parts in pair.sides.values())
        link.clock.advance(39)
        pair.step()
        assert not link.roles[HandOffSide.DECODE].lease_counts().quarantined
        link.clock.advance(32)
        settle(pair)
        assert link.roles[HandOffSide.DECODE].lease_counts().overdue == 0, "prefill was first"


def test_a_client_of_a_lost_peer_has_its_error_before_the_fence(monkeypatch):
    """As of a stopped process that writes through shared memory: only the pages wait."""
    fences, sever = [], LoopbackWire.sever
    monkeypatch.setattr(LoopbackWire, "sever", lambda wire: bool(fences) and sever(wire))
    link = Link(prefill=untidy(1, STUCK))
    with tokens_over(link, KeepWindow(10)) as pair:
        pair.submit(greedy("r", PROMPT[:30], 4))
        until(
            pair, lambda: pair.phase(HandOffSide.PREFILL, "r") is Phase.TRANSFERRING, "the writes"
        )
        decode, role = pair.sides[HandOffSide.DECODE], link.roles[HandOffSide.DECODE]
        free = free_pages(decode)
        link.peers[HandOffSide.DECODE].disconnect(P, "it hangs")
        until(pair, lambda: ended(pair.outputs("r")), "the answer")
        last = pair.outputs("r")[-1]
        assert (last.finish, last.failure) == (FinishReason.ERROR, Failure.TRANSFER)
        assert last.reason.endswith("is lost: it hangs")
        counts = role.lease_counts()
        assert counts.leased == counts.quarantined != {}
        assert free_pages(decode) == free, "they may be written"
        fences.append("holds")
        settle(pair)
        assert free_pages(decode) != free
        assert not role.lease_counts().leased


def holds(held, pages, tokens):
    return (held[pages].reshape(-1) == tokens).all()


def wait_for_chunk(pair, name):
    """Until decode has what prefill has computed of PROMPT; how much that is."""
    prefill, decode = (pair.sides[side] for side in HandOffSide)
    tokens = prefill.engine.status(RequestId(name)).computed
    row = decode.engine.status(RequestId(name)).row
    mine = decode.cache.hand_off.pages(row, len(PROMPT)).groups[0].pages[: tokens // 4]
    wanted = np.array(PROMPT[: tokens // 4 * 4], np.float32)
    held = decode.pools.layer(GroupId(0), "tokens", LayerId(0)).numpy()
    wait_until(partial(holds, held, mine, wanted), "the chunk")
    return tokens


def test_chunks_arrive_while_the_rest_is_computed():
    """All but the last ones are written when the prompt is computed: the link has nothing else to
    do meanwhile."""
    with tokens_over(Link(), KeepWindow(10)) as pair:
        pair.submit(greedy("r", PROMPT, 4))
        until(pair, lambda: pair.phase(HandOffSide.PREFILL, "r") is Phase.PREFILLING, "the start")
        seen = 0
        while pair.phase(HandOffSide.PREFILL, "r") is Phase.PREFILLING:
            seen = max(seen, wait_for_chunk(pair, "r"))
            pair.step()
        assert seen == 54, "six chunks of nine tokens"
        settle(pair)
        assert tokens_of(pair.outputs("r")) == expected_tokens(PROMPT, 4)


@pytest.mark.parametrize("gives_up", HandOffSide)
def test_what_is_given_up_between_chunks_is_nobody_elses_until_it_is_written(gives_up):
    """A chunk's pages are read for a write that has not begun, and those it goes to are leased; the
    same session is asked for again at once."""
    link = Link(prefill=untidy(1, STUCK))
    with tokens_over(link, KeepWindow(10)) as pair:
        prefill = pair.sides[HandOffSide.PREFILL]
        pair.submit(greedy("r", PROMPT, 4))
        until(pair, lambda: pair.phase(HandOffSide.PREFILL, "r") is Phase.PREFILLING, "a chunk")
        assert link.roles[HandOffSide.PREFILL].stats().states[SessionState.TRANSFERRING] == 1
        pair.sides[gives_up].engine.abort(RequestId("r"))
        for _ in range(20):
            pair.step()
        free = {side: free_pages(parts) for side, parts in pair.sides.items()}
        assert free[HandOffSide.PREFILL][0] < 60
        assert sum(link.roles[HandOffSide.DECODE].lease_counts().leased.values()) > 0
        assert not any(parts.engine.flush() for parts in pair.sides.values())
        again = replace(greedy("again", PROMPT[:20], 2), session=TransferSession("r"))
        prefill.engine.submit(again)
        pair.out[HandOffSide.PREFILL]["again"] = []
        for _ in range(5):
            pair.step()
        assert free == {side: free_pages(parts) for side, parts in pair.sides.items()}
        prefill.engine.abort(RequestId("again"))
        link.clock.advance(72)
        settle(pair)


def test_a_prompt_that_takes_longer_than_a_transfer_may_is_handed_over():
    """Each chunk has its time, on both sides, and so have its pages: far more than the seventy
    seconds that a first chunk and the answer have together."""
    link = Link()
    with tokens_over(link) as pair:
        role = link.roles[HandOffSide.PREFILL]
        pair.submit(greedy("r", PROMPT, 4))
        until(pair, lambda: pair.phase(HandOffSide.PREFILL, "r") is Phase.PREFILLING, "a chunk")
        while pair.phase(HandOffSide.PREFILL, "r") is Phase.PREFILLING:
            wait_for_chunk(pair, "r")  # its message comes right behind
            link.clock.advance(30)
            pair.step()
        settle(pair)
        assert tokens_of(pair.outputs("r")) == expected_tokens(PROMPT, 4)
        assert role.stats().succeeded == 1


def test_what_takes_too_long_fails_on_both_sides_and_they_join_again():
    link = Link(prefill=untidy(1, TransportFaults(lost=1.0, late=1 << 30)))
    with tokens_over(link, KeepWindow(10)) as pair:
        pair.submit(greedy("r", PROMPT[:30], 4))
        until(
            pair, lambda: pair.phase(HandOffSide.PREFILL, "r") is Phase.TRANSFERRING, "the writes"
        )
        link.clock.advance(41)
        settle(pair)
        last = pair.outputs("r")[-1]
        assert (last.finish, last.failure) == (FinishReason.ERROR, Failure.TRANSFER)
        link.join()
        pair.submit(greedy("s", PROMPT[:30], 4))
        until(
            pair, lambda: pair.phase(HandOffSide.PREFILL, "s") is Phase.TRANSFERRING, "the next one"
        )


@pytest.mark.parametrize("side", HandOffSide)
def test_a_lost_peer_fails_its_requests_and_may_join_again(side):
    link = Link(untidy(1), untidy(2))
    with tokens_over(link, KeepWindow(10)) as pair:
        for steps in (0, 6, 20):
            for n in range(3):
                pair.submit(greedy(f"r{steps}-{n}", [steps, *PROMPT[: 20 + n]], 4))
            for _ in range(steps):
                pair.step()
            link.peers[side].disconnect(D if side is HandOffSide.PREFILL else P)
            join_again(pair)
            link.clock.advance(11)  # those of which the other side has never heard
            pair.drain()
            for n in range(3):
                assert ended(pair.outputs(f"r{steps}-{n}")) is not None
                answer = tokens_of(pair.outputs(f"r{steps}-{n}"))
                right_one = expected_tokens([steps, *PROMPT[: 20 + n]], 4)
                assert answer in (right_one, [])
            other = [steps, *PROMPT[5:40]]
            assert pair.run(greedy(f"s{steps}", other, 3)) == [expected_tokens(other, 3)]
        link.clock.advance(11)
        settle(pair)


def test_a_request_waits_for_its_peer_to_join_and_fails_when_that_takes_too_long():
    link = Link(joins=False)
    with tokens_over(link) as pair:
        pair.submit(greedy("late", PROMPT[:30], 4))
        for _ in range(3):
            pair.step()
        assert pair.phase(HandOffSide.DECODE, "late") is Phase.WAITING
        link.clock.advance(11)
        pair.drain()
        for side in HandOffSide:
            assert pair.outputs("late", side)[-1].failure is Failure.TRANSFER
        pair.submit(greedy("r", PROMPT[:30], 4))
        pair.step()
        link.join()
        pair.drain()
        assert tokens_of(pair.outputs("r")) == expected_tokens(PROMPT[:30], 4)
        link.clock.advance(11)
        settle(pair)


def test_another_prompt_of_the_same_name_is_not_handed_over():
    with tokens_over(Link()) as pair:
        for side, parts in pair.sides.items():
            pair.out[side]["r"] = []
            tokens = PROMPT[:30] if side is HandOffSide.PREFILL else PROMPT[1:31]
            parts.engine.submit(greedy("r", tokens, 4))
        pair.drain()
        for side in HandOffSide:
            assert pair.outputs("r", side)[-1].failure is Failure.TRANSFER
        settle(pair)


def test_another_tenant_s_prompt_is_not_handed_over():
    with tokens_over(Link()) as pair:
        for side, parts in pair.sides.items():
            pair.out[side]["r"] = []
            salt = side.name
            parts.engine.submit(replace(greedy("r", PROMPT[:30], 4), salt=salt))
        pair.drain()
        assert pair.outputs("r")[-1].failure is Failure.TRANSFER
        settle(pair)


def test_an_unsupported_pair_is_refused_with_both_values():
    link = Link(joins=False)
    link.models[HandOffSide.DECODE] = b"other"
    with tokens_over(link) as pair, pytest.raises(TransportError) as refused:
        link.join()
    assert f"model is {b'other'.hex()!r} here and {b'model'.hex()!r} there" in str(refused.value)
    assert not pair.link.peers[HandOffSide.DECODE].knows(P)


def test_who_sends_nonsense_is_lost_and_others_go_on():
    link = Link()
    with tokens_over(link) as pair:
        transport = link.peers[HandOffSide.PREFILL]._end.transport
        transport.post(D, NO_WRITES, b".{}")
        wait_until(partial(apart, pair), "the end of both links")
        join_again(pair)
        assert pair.run(greedy("r", PROMPT[:30], 4)) == [expected_tokens(PROMPT[:30], 4)]
        settle(pair)


def test_a_chunk_that_brings_no_page_ends_no_write_of_an_earlier_one():
    """Half of the chunks fill no page, and the first page's write is begun when it likes."""
    link = Link(prefill=untidy(1, STUCK))
    with tokens_over(link, chunk_tokens=2) as pair:
        pair.submit(greedy("r", PROMPT[:30], 4))
        engine = pair.sides[HandOffSide.PREFILL].engine

        def computed():
            status = engine.status(RequestId("r"))
            return 0 if status is None else status.computed

        until(pair, lambda: computed() >= 10, "some chunks")
        engine.retract(RequestId("r"))
        assert pair.phase(HandOffSide.PREFILL, "r") is Phase.PREFILLING, "its pages are read"
        until(
            pair, lambda: pair.phase(HandOffSide.PREFILL, "r") is Phase.TRANSFERRING, "the prompt"
        )
        link.clock.advance(72)
        settle(pair)
