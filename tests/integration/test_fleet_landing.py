"""Landing pages over ranks: one rank cannot be short of them while the others are not.

Ranks take the smallest size of every pool (``RankContext.all_reduce_min``), every change of a pool
follows from what the ballot has agreed on, and the ballot compares the free pages themselves. So a
fetch finds the same room on all ranks, however unlike their stores are; and where one did not, all
would stop at the next ballot, before a page has landed. Owns what it watches.
"""

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from stratakv.core.errors import DivergenceError
from stratakv.testing.fleet.rank import SimRank
from stratakv.testing.fleet.run import Fleet
from stratakv.tiers.prefetch.fetches import Fetches
from tests.fleet_plans import CALM, storage_plan

pytestmark = pytest.mark.usefixtures("quiet")


@contextmanager
def watched(fails=lambda fetches: False):
    """By rank: the room that each fetch found and the pages that it got, and where they landed."""
    asked, landed = defaultdict(list), defaultdict(list)
    allocate, land = Fetches.allocate, Fetches.land

    def allocated(self, plan):
        free = [space.stack[: space.available()].tolist() for space in self._host]
        pages = None if fails(self) else allocate(self, plan)
        given = None if pages is None else [ids.tolist() for ids in pages]
        asked[self].append((free, [at.tolist() for at in plan.allocate], given))
        return pages

    def observed(self, keys, what, mine):
        landed[self].append(what.end)
        return land(self, keys, what, mine)

    with (
        mock.patch.object(Fetches, "allocate", allocated),
        mock.patch.object(Fetches, "land", observed),
    ):
        yield asked, landed


@pytest.mark.parametrize("host", [5, 8, 60], ids=["short", "tight", "roomy"])
@pytest.mark.parametrize("name", ["anchor", "three", "live"])
def test_every_rank_finds_the_same_room_for_a_fetch_whatever_its_store_has(name, host):
    plan = storage_plan(0, name, 3)
    plan = replace(
        plan,
        host=(host,) * len(plan.spec.groups),
        fault_rates=tuple(replace(CALM, loses=some) for some in (0.0, 0.05, 0.1)),
    )
    with watched() as (asked, landed):
        Fleet(plan).run()
    rooms = list(asked.values())
    assert len(rooms) == 3
    assert rooms[0] == rooms[1] == rooms[2]
    assert all(given is not None for _, _, given in rooms[0]), "a plan that had no room was made"
    assert len({tuple(ends) for ends in landed.values()}) == 1


@pytest.mark.parametrize("name", ["anchor", "three", "live"])
def test_a_rank_that_could_not_take_its_pages_would_stop_all_of_them_before_any_lands(name):
    plan = storage_plan(7, name, 3)
    fleet = Fleet(plan)
    ours = fleet.ranks[1].cache.storage.prefetcher._fetches
    with (
        mock.patch.object(SimRank, "after_step", return_value=None),  # it would be the first
        watched(fails=lambda fetches: fetches is ours) as (asked, landed),
        pytest.raises(DivergenceError, match=r"differ in (the tree|free pages)"),
    ):
        fleet.run()
    assert all(len(taken) == 1 for taken in asked.values()), "it went on"
    assert not landed


def test_a_rank_that_can_take_its_pages_stops_nobody():
    """The same plan without the failure."""
    with watched() as (_, landed):
        Fleet(storage_plan(7, "three", 3)).run()
    assert list(landed.values()) == [[8]] * 3
