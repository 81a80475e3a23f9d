"""A side of one rank hands over to one of two, and the other way round: to its peer it is as many
ranks as that one has, and what happens to one of these happens to the request on all."""

import pytest

from stratakv.engine.request import Phase
from stratakv.testing.hand_off import HandOffSide
from stratakv.testing.transport_faults import TransportFaults
from stratakv.tiers import progress
from tests.engines import expected_tokens, greedy, tokens_of
from tests.pairs import PROMPT
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
    untidy,
)
from tests.ranked_pairs import DECODE, LIMITS, PREFILL, D, P, on_threads

each_alone = pytest.mark.parametrize("alone", HandOffSide, ids=lambda side: f"{side.name} alone")


@pytest.fixture(autouse=True)
def short_naps(monkeypatch):
    monkeypatch.setattr(progress, "POLL_S", 0.0005)


def alone_play(alone, *rules, **more):
    return play_of(*rules, asks=True, alone=alone, **more)


@each_alone
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_slow_and_untidy_transports_change_no_token(alone, ranks):
    """In chunks, with prompts of which decode has a part; pages run short there."""
    play = alone_play(alone, *HARD, device=40, opens=untidy(ranks))
    on_threads(play, go_through(ranks), ranks)


@pytest.mark.parametrize("alone", [DECODE, pytest.param(PREFILL, marks=pytest.mark.long)])
def test_what_nobody_has_saved_goes_back_to_prefill(alone):
    on_threads(alone_play(alone, *HARD, device=28, host=False, opens=untidy(4)), go_back(6))


@pytest.mark.parametrize(
    ("alone", "side"),
    [
        (PREFILL, DECODE),
        (DECODE, PREFILL),
        *(pytest.param(each, each, marks=pytest.mark.long) for each in HandOffSide),
    ],
)
def test_an_abort_in_every_phase_leaves_nothing_anywhere(alone, side):
    on_threads(alone_play(alone, *HARD, device=24, opens=untidy(7)), abort_in_every_phase(side))


@each_alone
def test_pages_that_one_link_may_still_write_are_free_for_nobody(alone):
    """One of the two links begins its writes when it likes; both sides have given it up."""
    stuck = TransportFaults(late=1 << 30)
    opened = []

    def opens(side, rank):
        def open_end(memories):
            opened.append(side)
            held = side is PREFILL and opened.count(PREFILL) == 2
            return untidy(1, faults=stuck if held else TransportFaults())(side, rank)(memories)

        return open_end

    def look(pair):
        assert not any(parts.engine.flush() for parts in pair.sides.values())

    def act(pair):
        pair.submit(greedy("r", PROMPT[:30], 4))
        pair.until(lambda: phase_of(pair, PREFILL, "r") is Phase.TRANSFERRING, "the writes")
        for side in HandOffSide:
            pair.abort(side, "r")
        for _ in range(20):
            pair.step()
        pair.do("look")
        pair.clock.advance(41)  # prefill tears the link down
        pair.settle()

    on_threads(alone_play(alone, *HARD, opens=opens, acts={"look": look}), act)


@each_alone
@pytest.mark.parametrize("lane", [pytest.param(0, marks=pytest.mark.long), 1])
def test_one_link_that_is_lost_is_lost_with_all_and_made_again(alone, lane):
    across = P if alone is DECODE else D

    def lose(pair):
        if not pair.rank:
            pair.peers[alone][lane].disconnect(across)

    def act(pair):
        for at in range(2):
            asked = [at, *PROMPT[:30]]
            assert pair.run(greedy(f"r{at}", asked, 4)) == [expected_tokens(asked, 4)]
            pair.submit(greedy(f"lost{at}", [at, *PROMPT[:40]], 4))
            for _ in range(4 * at):
                pair.step()
            pair.do("lose")
            pair.until(lambda: knows(pair) == (False, False), "the loss, on the other link too")
            pair.clock.advance(11)
            pair.drain()
            right = expected_tokens([at, *PROMPT[:40]], 4)
            name = f"lost{at}"
            assert tokens_of(pair.out[DECODE][name]) == right or has_failed(pair, name)
        pair.clock.advance(11)
        pair.settle()

    on_threads(alone_play(alone, *HARD, opens=untidy(3), acts={"lose": lose}), act)


@each_alone
def test_time_begins_anew_on_every_link_with_each_part(alone):
    """Also on one on which no byte goes, since all ranks have the same pages: a prompt may take
    longer to compute than a transfer may to move."""

    def act(pair):
        assert pair.run(greedy("joins", PROMPT[1:9], 2)) == [expected_tokens(PROMPT[1:9], 2)]
        pair.submit(greedy("r", PROMPT[:60], 3))
        pair.until(lambda: phase_of(pair, PREFILL, "r") is Phase.PREFILLING, "its computation")
        steps = 0
        while not pair.out[DECODE]["r"]:
            pair.step()
            pair.clock.advance(8)
            steps += 1
        assert 8 * steps > LIMITS.sessions.transfer_s
        pair.drain()
        assert tokens_of(pair.out[DECODE]["r"]) == expected_tokens(PROMPT[:60], 3)
        pair.settle()

    on_threads(alone_play(alone, *HARD, opens=untidy(5, faults=TransportFaults())), act)


def test_a_prompt_of_the_same_name_on_one_side_alone_is_refused_on_every_link():
    on_threads(alone_play(PREFILL), another_prompt_of_one_name)
