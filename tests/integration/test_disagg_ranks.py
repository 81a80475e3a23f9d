"""A prompt computed on several ranks is continued on as many: whatever happens to one rank's bytes
happens to the request on all of them, and no rank's pages are another one's before."""

from random import Random

import pytest

from stratakv.core.ids import RequestId
from stratakv.engine import loop
from stratakv.engine.request import Phase, Request
from stratakv.spec.retention import KeepWindow
from stratakv.testing.hand_off import HandOffSide
from stratakv.testing.patience import wait_until
from stratakv.testing.transport_faults import TransportFaults
from stratakv.tiers import progress
from stratakv.tree.nodes import Tier
from tests.engines import expected_tokens, greedy, tokens_of
from tests.pairs import PROMPT, RULES, every_rule
from tests.ranked_acts import (
    HARD,
    abort_in_every_phase,
    another_prompt_of_one_name,
    go_back,
    go_through,
    has_failed,
    knows,
    phase_of,
    play_of,
    sent_back,
    untidy,
)
from tests.ranked_pairs import DECODE, PREFILL, D, P, on_threads


@pytest.fixture(autouse=True)
def short_naps(monkeypatch):
    monkeypatch.setattr(progress, "POLL_S", 0.0005)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *(pytest.param(name, seed, marks=pytest.mark.long) for name in RULES for seed in (0, 1)),
        *(("all", seed) for seed in (2, 3)),
        *((name, 4) for name in ("window", "state")),
    ],
)
def test_ranks_with_slow_and_untidy_transports_change_no_token(name, seed):
    play = play_of(*RULES[name], device=40, opens=untidy(seed))
    on_threads(play, go_through(seed), ranks=2 + seed % 2, seed=seed)


@every_rule
def test_requests_that_any_rank_reads_are_retracted_on_none(rules):
    """Everything on every device is wanted now and then, while chunks are on their way, on each
    rank at a pace of its own; what nobody reads just then goes. What is freed is poisoned."""
    asked = [greedy(f"{n}", [n, *PROMPT[: 30 + 3 * n]], 3) for n in range(6)]

    def retract(pair):
        parts = pair.sides[PREFILL]
        for one in asked:
            parts.engine.retract(one.id)
        parts.cache.progress.push_out(Tier.DEVICE)
        parts.engine.check()

    def act(pair):
        rng = Random(1)
        for one in asked:
            pair.submit(one)
        while pair.busy():
            pair.step()
            if rng.random() < 0.5:
                pair.do("retract")
        for one in asked:
            assert tokens_of(pair.out[DECODE][one.id]) == expected_tokens(one.tokens, 3)
        pair.settle()

    hasty = untidy(1, faults=TransportFaults(late=1, parts=3))
    on_threads(play_of(*rules, opens=hasty, acts={"retract": retract}), act)


@pytest.mark.parametrize(
    ("rules", "seed"), [(RULES["full"], 6), (RULES["all"], 0)], ids=["full", "all"]
)
def test_what_no_rank_has_saved_goes_back_to_prefill(rules, seed):
    play = play_of(*rules, device=28, host=False, opens=untidy(seed))
    on_threads(play, go_back(seed), seed=seed)


@pytest.mark.parametrize(("rank", "waits"), [(0, 0), (1, 12)])
def test_what_one_rank_cannot_send_back_is_computed_where_it_decodes_on_all(rank, waits):
    """That rank has lost its peer, before the request is sent back or after it."""

    def retract(pair):
        pair.sides[DECODE].engine.retract(RequestId("r"))

    def lose(pair):
        if pair.rank == rank:
            pair.peers[DECODE][0].disconnect(P)

    def act(pair):
        pair.submit(greedy("r", PROMPT[:30], 12))
        pair.until(lambda: len(pair.out[DECODE]["r"]) >= 4, "its tokens")
        pair.do("retract")
        for _ in range(waits):
            pair.step()
        pair.do("lose")
        pair.drain()
        assert tokens_of(pair.out[DECODE]["r"]) == expected_tokens(PROMPT[:30], 12)
        assert sent_back(pair) == 1
        pair.clock.advance(200)  # a rank of prefill may still wait for who asks
        pair.settle()

    stuck = untidy(2, stuck=()) if not waits else untidy(2, faults=TransportFaults(late=40))
    acts = {"retract": retract, "lose": lose}
    on_threads(play_of(*HARD, host=False, opens=stuck, acts=acts), act)


@pytest.mark.parametrize("rank", range(2))
def test_what_one_rank_could_not_send_back_gives_later_ones_no_other_name(rank):
    """Ranks of prefill know by its name what comes back, so it is one on all ranks."""

    def retract(pair):
        if pair.rank == rank and not pair.sides[DECODE].engine.status(RequestId("r1")):
            pair.peers[DECODE][0].disconnect(P)
        for at in range(2):
            pair.sides[DECODE].engine.retract(RequestId(f"r{at}"))

    def act(pair):
        for at in range(2):
            asked = greedy(f"r{at}", [at, *PROMPT[:30]], 12)
            pair.submit(asked)
            pair.until(lambda: len(pair.out[DECODE][f"r{at}"]) >= 4, "its tokens")  # noqa: B023
            pair.do("retract")
            pair.drain()
            assert tokens_of(pair.out[DECODE][f"r{at}"]) == expected_tokens(asked.tokens, 12)
        assert sent_back(pair) == 3, "both of them, and the second once more"
        pair.clock.advance(200)
        pair.settle()

    on_threads(play_of(*HARD, host=False, asks=True, acts={"retract": retract}), act)


def test_what_prefill_fails_over_on_its_way_back_is_computed_where_it_decodes(monkeypatch):
    """At once: no deadline passes."""

    def fails(*, prompt, **more):
        if prompt.id.startswith("again-"):
            raise ValueError("seeded")
        return Request(prompt=prompt, **more)

    def retract(pair):
        pair.sides[DECODE].engine.retract(RequestId("r"))

    def act(pair):
        pair.submit(greedy("r", PROMPT[:30], 12))
        pair.until(lambda: len(pair.out[DECODE]["r"]) >= 4, "its tokens")
        pair.do("retract")
        pair.until(lambda: len(pair.out[DECODE]["r"]) == 12, "its answer")
        assert tokens_of(pair.out[DECODE]["r"]) == expected_tokens(PROMPT[:30], 12)
        assert sent_back(pair) == 1
        pair.clock.advance(11)  # prefill remembers on the other ranks that it does not come
        pair.settle()

    monkeypatch.setattr(loop, "Request", fails)
    on_threads(play_of(*HARD, host=False, acts={"retract": retract}), act)


@pytest.mark.parametrize("side", HandOffSide)
def test_an_abort_in_every_phase_leaves_nothing_on_any_rank(side):
    on_threads(play_of(*HARD, device=24, opens=untidy(7)), abort_in_every_phase(side))


def free_pages(pair):
    return [
        [pool.free for pool in parts.cache.tiers.pools.stats()] for parts in pair.sides.values()
    ]


@pytest.mark.parametrize("rank", range(2))
def test_pages_of_one_rank_that_may_still_be_written_are_free_on_none(rank):
    """One rank's writes are begun when it likes; both sides have given the request up."""
    play = play_of(KeepWindow(10), opens=untidy(1, {(PREFILL, rank)}))
    free, leases = {}, {}

    def remember(pair):
        free[pair.rank] = free_pages(pair)

    def compare(pair):
        assert free[pair.rank] == free_pages(pair)
        assert not any(parts.engine.flush() for parts in pair.sides.values())
        leases[pair.rank] = len(pair.inner[DECODE][0])

    play.acts.update(remember=remember, compare=compare)

    def act(pair):
        pair.submit(greedy("r", PROMPT[:30], 4))
        pair.until(lambda: phase_of(pair, PREFILL, "r") is Phase.TRANSFERRING, "the writes")
        pair.do("remember")
        for side in HandOffSide:
            pair.abort(side, "r")
        for _ in range(20):
            pair.step()
        pair.do("compare")
        assert leases == {rank: 1, 1 - rank: 0}, "the other rank's were acknowledged"
        pair.clock.advance(41)  # prefill tears the link down
        pair.settle()

    on_threads(play, act)


def again(pair):
    """Whoever is still linked is not, and then all are."""
    for peers, name in ((pair.peers[PREFILL][0], D), (pair.peers[DECODE][0], P)):
        peers.disconnect(name)

    def gone():
        for (role,) in pair.inner.values():
            role.poll()
        return not any(peers._peers for (peers,) in pair.peers.values())

    wait_until(gone, "the fences")
    pair.join()


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("side", HandOffSide)
def test_one_rank_that_loses_its_peer_fails_the_requests_of_all(side, rank):
    play = play_of(KeepWindow(10), opens=untidy(1))

    def lose(pair):
        if pair.rank == rank:
            pair.peers[side][0].disconnect(D if side is PREFILL else P)

    play.acts.update(lose=lose, again=again)

    def act(pair):
        for steps in (0, 6, 20)[rank:]:
            names = [f"r{steps}-{n}" for n in range(3)]
            for n, name in enumerate(names):
                pair.submit(greedy(name, [steps, *PROMPT[: 20 + n]], 4))
            for _ in range(steps):
                pair.step()
            pair.do("lose")
            pair.step()
            pair.clock.advance(11)  # those of which the other side has never heard
            pair.drain()
            pair.do("again")
            for n, name in enumerate(names):
                right = expected_tokens([steps, *PROMPT[: 20 + n]], 4)
                assert tokens_of(pair.out[DECODE][name]) == right or has_failed(pair, name)
            other = [steps, *PROMPT[5:40]]
            assert pair.run(greedy(f"s{steps}", other, 3)) == [expected_tokens(other, 3)]
        pair.clock.advance(11)
        pair.settle()

    on_threads(play, act)


def test_a_session_that_one_rank_refuses_ends_on_all():
    on_threads(play_of(), another_prompt_of_one_name)


# -- joining -------------------------------------------------------------------------------------


def test_ranks_join_when_a_request_needs_it():
    def same(pair):
        assert knows(pair) == (True, True)

    def act(pair):
        assert knows(pair) == (False, False)
        assert pair.run(greedy("r", PROMPT[:30], 4)) == [expected_tokens(PROMPT[:30], 4)]
        pair.do("same")
        pair.settle()

    play = play_of(*HARD, opens=untidy(2), asks=True, acts={"same": same})
    for ranks in (2, 3):
        on_threads(play, act, ranks)


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("side", HandOffSide)
def test_a_link_that_one_rank_has_lost_is_made_again_on_all(side, rank):
    """Nobody used it, so nobody hears of it but by the ballot."""

    def lose(pair):
        if pair.rank == rank:
            pair.peers[side][0].disconnect(D if side is PREFILL else P)

    def act(pair):
        for at in range(3):
            asked = [at, *PROMPT[:30]]
            assert pair.run(greedy(f"r{at}", asked, 4)) == [expected_tokens(asked, 4)]
            pair.do("lose")
            pair.until(lambda: knows(pair) == (False, False), "the loss, on the other rank too")
        pair.settle()

    on_threads(play_of(KeepWindow(10), opens=untidy(3), asks=True, acts={"lose": lose}), act)


@pytest.mark.parametrize("rank", range(2))
def test_one_rank_that_does_not_fit_is_refused_on_all_with_both_values(rank):
    def act(pair):
        pair.submit(greedy("r", PROMPT[:30], 4))
        pair.until(lambda: has_failed(pair, "r"), "the refusal")
        reason = pair.out[DECODE]["r"][-1].reason
        assert f"model is {b'model'.hex()!r} here and {b'other'.hex()!r} there" in reason
        pair.clock.advance(11)
        pair.drain()
        pair.do("nobody")

    def nobody(pair):
        assert knows(pair) == (False, False)

    models = {(DECODE, rank): b"other"}
    on_threads(play_of(asks=True, models=models, acts={"nobody": nobody}), act)
