"""A waiting request is in one phase of its prefetch, which says what it holds."""

from itertools import product
from typing import get_args

import numpy as np
import pytest

from stratakv.core.ids import PageKey, PrefetchId, TicketId
from stratakv.core.page_keys import PageHasher
from stratakv.policy.prefetch import Fetching, Probing
from stratakv.policy.prefetch_ends import CachedPrefix, FetchPlan, Objects
from stratakv.policy.prefetch_reasons import Reason, Tally
from stratakv.tiers.prefetch.fetches import FromStorage
from stratakv.tiers.prefetch.request import (
    IDLE,
    Asking,
    Awaiting,
    Idle,
    Left,
    PrefetchPhase,
    PrefetchRequest,
    Reading,
    Ready,
    ignored,
)
from stratakv.tiers.prefetch.sharing import PrefetchSharing, abandoned
from stratakv.tree.lease import HostHold
from tests.tier_bench import NAMESPACE

NO_OBJECTS = Objects(np.empty(0, np.int64), np.empty(0, np.int64))
HELD = CachedPrefix(0, (np.zeros(3, np.bool_),))
HOLD = HostHold(0, [0], np.empty(0, np.intp), [])
FIRST, OTHER = PageKey(b"first"), PageKey(b"other")
LEGAL = {
    (Idle, Idle), (Idle, Awaiting), (Idle, Asking),
    (Awaiting, Idle),
    (Asking, Idle), (Asking, Reading), (Asking, Left),
    (Reading, Idle), (Reading, Ready), (Reading, Left),
    (Ready, Idle),
    (Left, Idle),
}  # fmt: skip
WAY = {
    Idle: [],
    Awaiting: [Awaiting],
    Asking: [Asking],
    Reading: [Asking, Reading],
    Ready: [Asking, Reading, Ready],
    Left: [Asking, Left],
}
"""How each phase is reached."""


def waiting(at: int = 0) -> PrefetchRequest:
    return PrefetchRequest(PrefetchId(at), PageHasher(NAMESPACE, 2), 3, 0.0)


def asking(first: PageKey = FIRST) -> Asking:
    return Asking(TicketId(1), Probing(HELD), HOLD, first, 0, NO_OBJECTS)


def reading() -> Reading:
    state = Fetching(HELD, Tally(0, 0), FetchPlan(0, 0, (), NO_OBJECTS), 0)
    return Reading(TicketId(2), state, HOLD, FIRST, 0, ())


PHASES: dict[type[PrefetchPhase], PrefetchPhase] = {
    Idle: IDLE,
    Awaiting: Awaiting(waiting(1)),
    Asking: asking(),
    Reading: reading(),
    Ready: Ready(HOLD, FromStorage(0, 0, ())),
    Left: Left(reading(), 0, Reason.ABORTED, ignored),
}


def at(kind: type[PrefetchPhase]) -> PrefetchRequest:
    request = waiting()
    for step in WAY[kind]:
        request.enter(PHASES[step])
    return request


def test_every_phase_is_known():
    assert set(PHASES) == set(WAY) == set(get_args(PrefetchPhase))


@pytest.mark.parametrize(("here", "there"), list(product(WAY, WAY)))
def test_a_prefetch_goes_only_where_something_may_lead(
    here: type[PrefetchPhase], there: type[PrefetchPhase]
):
    request = at(here)
    if (here, there) in LEGAL:
        request.enter(PHASES[there])
        assert request.phase is PHASES[there]
    else:
        with pytest.raises(AssertionError, match="no prefetch goes"):
            request.enter(PHASES[there])
        assert isinstance(request.phase, here), "a refused step changes nothing"


@pytest.mark.parametrize("kind", WAY)
def test_a_phase_says_what_is_held_and_what_is_under_way(kind: type[PrefetchPhase]):
    request = at(kind)
    assert request.asking == (kind in {Asking, Reading})
    assert (request.operation is not None) == (kind in {Asking, Reading, Left})


def test_an_operation_outlives_the_request_that_began_it():
    request = at(Reading)
    under_way = request.operation
    assert isinstance(under_way, Reading)
    request.enter(Left(under_way, 0, Reason.ABORTED, ignored))
    assert request.operation is under_way


def test_one_asks_for_all_and_the_others_are_left_alone_when_it_ends():
    sharing, leader, first, second = PrefetchSharing(), waiting(0), waiting(1), waiting(2)
    assert not sharing.join(leader, FIRST)
    sharing.lead(leader, FIRST)
    leader.enter(asking())
    assert not sharing.join(second, OTHER), "it asks for something else"
    assert sharing.join(first, FIRST)
    assert sharing.join(second, FIRST)
    assert sharing.left_alone() == []
    assert not abandoned(first)
    leader.enter(IDLE)
    sharing.end(FIRST)
    assert abandoned(first)
    assert sharing.left_alone() == [first, second]
    sharing.leave(first)
    sharing.leave(second)
    assert first.phase is second.phase is IDLE
    assert sharing.left_alone() == []
    assert not sharing.join(first, FIRST), "nobody leads any more"
