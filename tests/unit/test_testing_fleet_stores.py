"""What fleets leave in their stores, and what is known of it."""

from dataclasses import replace
from random import Random

import pytest

from stratakv.core.ids import GroupId, PageKey
from stratakv.storage.backend import ObjectKey
from stratakv.testing.fleet.run import Fleet, run_plan
from stratakv.testing.fleet.stores import Stores
from tests.fleet_plans import over_one_store, storage_plan


def served(plan):
    fleet = Fleet(plan)
    fleet.run()
    return fleet


def test_ranks_with_stores_of_their_own_have_every_page_each():
    fleet = served(storage_plan(1, "window", 3))
    names = [set(fleet.stores.of(rank).names) for rank in range(3)]
    assert names[0] == names[1] == names[2]
    assert {name.shard for name in names[0]} == {0}
    assert fleet.stores.check(fleet.plan) == 3 * len(names[0])


def test_ranks_with_one_store_write_each_slice_once_and_what_all_have_alike_as_rank_0():
    fleet = served(over_one_store(storage_plan(1, "three", 4), heads=8, cut=8))
    names = set(fleet.stores.of(0).names)
    assert fleet.stores.of(3) is fleet.stores.of(0)
    slices = {group: {n.shard for n in names if n.group == group} for group in range(4)}
    first = 8 * 7 // 2
    assert slices == {0: set(range(first, first + 8)), 1: slices[0], 2: slices[0], 3: {0}}
    assert fleet.stores.check(fleet.plan) == len(names)


def broken(change):
    fleet = served(over_one_store(storage_plan(1, "state", 2), heads=4, cut=4))
    memory, names = fleet.stores.of(0).memory, list(fleet.stores.of(0).names)
    change(memory, names)
    return fleet


def other_bytes(group):
    def change(memory, names):
        one, two = [name for name in names if name.group == group][:2]
        page = memoryview(bytearray(len(memory.snapshot()[one])))
        memory.read([two], [page])
        memory.remove([one])
        memory.write([one], [page])

    return change


@pytest.mark.parametrize("group", [0, 1])
def test_an_object_with_the_bytes_of_another_is_seen(group):
    fleet = broken(other_bytes(group))
    with pytest.raises(AssertionError, match=f"of group {group} has the bytes of something else"):
        fleet.stores.check(fleet.plan)


def test_an_object_that_is_broken_is_seen():
    fleet = broken(lambda memory, names: memory.damage(names[3], 5))
    with pytest.raises(AssertionError, match="is broken"):
        fleet.stores.check(fleet.plan)


def test_an_object_of_a_page_that_nobody_asked_for_is_seen(monkeypatch):
    plan = replace(storage_plan(1, "anchor"), then=storage_plan(1, "anchor"))
    run_plan(plan)
    foreign = ObjectKey(PageKey(b"?" * 32), GroupId(0))
    plain = Stores.of

    def of(self, rank):
        shelf = plain(self, rank)
        shelf.memory.write([foreign], [memoryview(bytearray(16))])
        return shelf

    monkeypatch.setattr(Stores, "of", of)
    with pytest.raises(AssertionError, match="pages that nobody asked for"):
        run_plan(plan)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1), (2, 8)])
def test_what_so_many_ranks_have_stored_others_find(before, after):
    plan = over_one_store(storage_plan(3, "window", before), heads=8, cut=8)
    then = over_one_store(storage_plan(3, "window", after), heads=8, cut=8)
    then = replace(then, events=then.events[-1:], seed=Random(3).randrange(1000))
    first, again = run_plan(replace(plan, then=then))
    assert again.cached["storage"] == 8 * 4
    assert first.cached["storage"] >= 8 * 4
