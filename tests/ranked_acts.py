"""What happens to pairs on several ranks, as many on both sides or one alone on one of them.

Owns the acts, and how their plays are made.
"""

from dataclasses import replace
from random import Random

from stratakv.core.ids import RequestId
from stratakv.engine.request import Failure, FinishReason, Phase
from stratakv.spec.retention import KeepBoundary, KeepLive, KeepWindow
from stratakv.testing.hand_off import HandOffSide
from stratakv.testing.transport_faults import FaultyTransport, TransportFaults
from tests.engines import ended, expected_tokens, greedy, token_engine, token_spec
from tests.fixtures.transports import open_loopback
from tests.pairs import CONFIG, PROMPT
from tests.ranked_pairs import DECODE, PREFILL, D, P, Play

UNTIDY = TransportFaults(late=3, delay=2, parts=5)
STUCK = TransportFaults(late=1 << 30)
HARD = KeepWindow(10), KeepBoundary(), KeepLive()


def untidy(seed, stuck=(), faults=UNTIDY):
    """Every rank's ends are slow in a way of their own; those of ``stuck`` do nothing at all."""

    def opens(side, rank, usual=faults):
        faults = STUCK if (side, rank) in stuck else usual
        random = Random(f"{seed} {side} {rank}")
        return lambda memories: FaultyTransport(open_loopback(memories), random, faults)

    return opens


def play_of(*rules, device=60, page=4, opens=None, host=True, **more):
    """``host``: whether the side that decodes has one."""
    spec, config = token_spec(page, *rules), replace(CONFIG, page_tokens=page)
    groups = len(spec.groups)

    def engine(side, sockets):
        if side is PREFILL:
            return token_engine(spec, config, (60,) * groups, (100,) * groups, sockets=sockets)
        mine = config if host else replace(config, cache="device", reserve_tokens=1)
        hosts = (100 if host else 0,) * groups
        return token_engine(spec, mine, (device,) * groups, hosts, sockets=sockets)

    return Play(engine, opens or untidy(0), **more)


# -- what is seen ---------------------------------------------------------------------------------


def sent_back(pair):
    return pair.inner[PREFILL][0].stats().succeeded


def phase_of(pair, side, name):
    found = pair.sides[side].engine.status(RequestId(name))
    return None if found is None else found.phase


def has_failed(pair, name, side=DECODE):
    out = pair.out[side][name]
    return bool(out) and (out[-1].finish, out[-1].failure) == (
        FinishReason.ERROR,
        Failure.TRANSFER,
    )


def knows(pair):
    """Of rank 0."""
    return pair.peers[PREFILL][0].knows(D), pair.peers[DECODE][0].knows(P)


# -- acts -----------------------------------------------------------------------------------------


def run_mixed(pair, seed, longest):
    """Eight prompts of any length, of which decode has a part, and answers of up to ``longest``."""
    rng = Random(seed)
    asked = [
        greedy(f"{n}", PROMPT[: rng.randrange(1, 60)], rng.randrange(*longest)) for n in range(8)
    ]
    for one, answer in zip(asked, pair.run(*asked), strict=True):
        assert answer == expected_tokens(one.tokens, one.sampling.max_tokens)


def go_through(seed):
    def act(pair):
        run_mixed(pair, seed, (1, 20))
        pair.settle()

    return act


def go_back(seed):
    """Pages run short where it is decoded, and there is no host."""

    def act(pair):
        run_mixed(pair, seed, (8, 40))
        assert sent_back(pair) > 8
        pair.settle()

    return act


def abort_in_every_phase(side):
    """The pages are asked for by somebody else at once, while they may still be written."""
    computes = Phase.PREFILLING if side is PREFILL else Phase.DECODING

    def act(pair):
        assert pair.run(greedy("joins", PROMPT[:9], 2)) == [expected_tokens(PROMPT[:9], 2)]
        for at, phase in enumerate([Phase.WAITING, computes, Phase.TRANSFERRING]):
            name = f"r{at}"
            pair.submit(greedy(name, [at, *PROMPT[: 30 + at]], 4))
            pair.until(lambda: phase_of(pair, side, name) in {phase, None}, "it")  # noqa: B023
            pair.abort(side, name)
            other = [at + 1, *PROMPT[7:40]]
            assert pair.run(greedy(f"s{at}", other, 3)) == [expected_tokens(other, 3)]
            across = DECODE if side is PREFILL else PREFILL
            assert ended(pair.out[across][name]) is not None
        pair.settle()

    return act


def another_prompt_of_one_name(pair):
    """Every rank finds out by itself."""
    for side, parts in pair.sides.items():
        pair.out[side]["r"] = []
        tokens = PROMPT[:30] if side is PREFILL else PROMPT[1:31]
        parts.port.submit(greedy("r", tokens, 4))
    pair.drain()
    assert all(has_failed(pair, "r", side) for side in HandOffSide)
    pair.settle()
