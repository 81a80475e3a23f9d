"""The tests of requests that go back to prefill see who breaks a rule of it, one bug at a time."""

from contextlib import contextmanager
from dataclasses import replace
from random import Random
from unittest import mock

import pytest

from stratakv.core.ids import RequestId
from stratakv.disagg import decode_role, sending
from stratakv.disagg.decode_role import DecodeRole
from stratakv.disagg.prefill_role import PrefillRole
from stratakv.disagg.recompute import Recompute
from stratakv.engine.request import Phase, Request
from stratakv.engine.roles import Start
from stratakv.spec.retention import KeepBoundary, KeepLive, KeepWindow
from stratakv.testing.hand_off import HandOffSide
from stratakv.testing.transport_faults import TransportFaults
from stratakv.tiers import progress
from tests.engines import evict_device, expected_tokens, greedy, tokens_of
from tests.pairs import PROMPT
from tests.transport_pairs import Link, P, settle, tokens_over, untidy, until

PREFILL, DECODE = HandOffSide
HARD = KeepWindow(10), KeepBoundary(), KeepLive()
SEEDS = 0, 6
STEPS = 600
"""Twice what a scene takes; a bug may make it go on for ever."""


@pytest.fixture(autouse=True)
def short_naps(monkeypatch):
    monkeypatch.setattr(progress, "POLL_S", 0.0005)


def goes_back(seed):
    """Requests whose pages run short, on a transport that is late: all go back and come again."""
    rng, late = Random(seed), TransportFaults(late=12, delay=2, parts=4)
    link = Link(untidy(seed, faults=late), untidy(seed + 100, faults=late))
    with tokens_over(link, *HARD, device=28, host=0, reserve_tokens=1) as pair:
        asked = [
            greedy(f"{n}", PROMPT[: rng.randrange(1, 60)], rng.randrange(8, 40)) for n in range(8)
        ]
        for one in asked:
            pair.submit(one)
        drain(pair)
        for one in asked:
            expected = expected_tokens(one.tokens, one.sampling.max_tokens)
            assert tokens_of(pair.outputs(one.id)) == expected
        unsaved = pair.decode.cache.tiers.pools.counters.retracted_unsaved
        assert unsaved
        assert link.roles[PREFILL].stats().succeeded == len(asked) + unsaved
        settle(pair)


def drain(pair):
    for _ in range(STEPS):
        if not any(parts.engine.has_work() for parts in pair.sides.values()):
            return
        pair.step()
    raise AssertionError("it goes on for ever")


def is_given_up(seed):
    """By its client, by the side that computes it, or by a link that ends, at every moment."""
    for steps in (seed, seed + 3, seed + 7):
        late = TransportFaults(late=12, delay=2, parts=4)
        link = Link(untidy(steps, faults=late), untidy(steps + 50, faults=late))
        with tokens_over(link, *HARD, host=0) as pair:
            for how in ("decode", "prefill", "link"):
                gives_up(pair, how, steps)
            drain(pair)
            settle(pair)


def gives_up(pair, how, steps):
    pair.submit(greedy(how, [steps, *PROMPT[:21]], 30))
    until(pair, lambda: len(pair.outputs(how)) >= 3, "its tokens")
    pair.decode.engine.retract(RequestId(how))
    evict_device(pair.decode)
    for _ in range(steps):
        pair.step()
    if how == "link":
        pair.link.peers[DECODE].disconnect(P)
    else:
        engine = pair.sides[DECODE if how == "decode" else PREFILL].engine
        for status in engine.statuses():
            engine.abort(status.prompt.id)
    if how == "decode":
        other = [steps + 1, *PROMPT[7:40]]  # which gets the pages at once
        pair.submit(greedy("other", other, 3))
        drain(pair)
        assert tokens_of(pair.outputs("other")) == expected_tokens(other, 3)
        return
    drain(pair)
    assert tokens_of(pair.outputs(how)) == expected_tokens([steps, *PROMPT[:21]], 30)


@pytest.mark.parametrize(
    ("scene", "seed"),
    [
        *((goes_back, seed) for seed in SEEDS),
        (is_given_up, 0),
        pytest.param(is_given_up, 6, marks=pytest.mark.long),
    ],
)
def test_without_a_bug_all_goes_well(scene, seed):
    scene(seed)


# -- bugs ----------------------------------------------------------------------------------------


def brings_the_prompt_alone():
    real = Recompute.of

    def of(request):
        found = real(request)
        return replace(found, tokens=request.prompt.tokens)

    return mock.patch.object(Recompute, "of", staticmethod(of))


@contextmanager
def brings_a_token_too_few():
    """And nobody compares what both sides have."""
    real = Recompute.of

    def of(request):
        found = real(request)
        return replace(found, tokens=found.tokens[[*range(len(found.tokens) - 1), 0]])

    with (
        mock.patch.object(Recompute, "of", staticmethod(of)),
        mock.patch.object(decode_role, "prompt_identity", return_value="same"),
        mock.patch.object(sending, "prompt_identity", return_value="same"),
    ):
        yield


def never_goes_back():
    def may_start(role, request):
        if request.phase is Phase.RETRACTED:
            return Start.COMPUTE
        return real(role, request)

    real = DecodeRole.may_start
    return mock.patch.object(DecodeRole, "may_start", may_start)


def fails_with_prefill():
    return mock.patch.object(Request, "has_generated", False)


def forgets_to_compute():
    return mock.patch.object(PrefillRole, "submit_to")


@pytest.mark.parametrize(
    ("bug", "scene"),
    [
        (brings_the_prompt_alone, goes_back),
        (brings_a_token_too_few, goes_back),
        (never_goes_back, goes_back),
        (forgets_to_compute, goes_back),
        (fails_with_prefill, is_given_up),
    ],
)
def test_who_breaks_a_rule_is_seen(bug, scene):
    def scenes():
        for seed in SEEDS:
            scene(seed)

    with bug(), pytest.raises(AssertionError):
        scenes()
