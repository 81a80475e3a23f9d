"""What a step saves on the host: asked for by the tree, thinned out by the write policy and by the
host's room.
"""

import numpy as np

from stratakv.policy.write import WriteBack, WriteThroughSelective
from stratakv.transfer.copy_plan import Direction
from stratakv.tree.effects import Backup
from stratakv.tree.nodes import Tier
from tests.unit.test_tiers_pools import ANCHOR, WINDOW, machine, serve

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def rows_of(it, keys):
    index = it.cache.tree.internals.nodes.index
    return np.array([index[key] for key in keys], np.intp)


def on_host(it):
    return [space.capacity - space.available() for space in it.cache.pools.tiers[HOST]]


def test_what_is_wanted_is_begun_when_it_is_taken_and_given_once():
    it = machine()
    backups = it.cache.copies.backups
    assert not backups
    assert backups.figures() == {"backups wanted": 0, "backups begun": 0}
    keys = serve(it, 1, 3)
    assert backups
    assert backups.figures() == {"backups wanted": 2, "backups begun": 0}
    assert on_host(it) == [0, 0]
    backups.begin()
    assert backups
    assert backups.figures() == {"backups wanted": 0, "backups begun": 2}
    assert on_host(it) == [3, 2]
    parts = backups.take()
    assert [(part.group, part.rows.tolist()) for part in parts] == [
        (ANCHOR, rows_of(it, keys).tolist()), (WINDOW, rows_of(it, keys[1:]).tolist())
    ]  # fmt: skip
    nodes = it.cache.tree.internals.nodes
    for part in parts:
        for tier, pages in ((DEVICE, part.device), (HOST, part.host)):
            assert pages.tolist() == nodes.page[tier][part.group][part.rows].tolist()
    assert not backups
    assert backups.take() == []
    it.cache.copies.flights.back_up(parts)
    it.wait_for_copies()


def test_as_much_is_begun_as_the_host_has_room_for_and_the_rest_is_counted():
    for host in range(6):
        it = machine(host=host) if host else machine(host=1)
        serve(it, 1, 5)
        it.cache.progress.tick()
        room = max(1, host)
        assert on_host(it) == [min(5, room), min(2, room)]
        dropped = it.cache.pools.counters.dropped_backup_pages
        assert dropped == 5 - min(5, room) + 2 - min(2, room)
        it.wait_for_copies()
        it.cache.check()


def test_the_head_of_a_prefix_is_saved_before_its_end():
    it = machine(host=2)
    keys = serve(it, 1, 5)
    it.settle()
    assert it.cache.pools.counters.backup_pages == 4
    it.cache.pools.push_out(DEVICE)
    assert it.cache.match(keys, 5).anchor_end == 2


def test_older_copies_make_room_for_new_ones():
    it = machine(device=12, host=4)
    serve(it, 1, 3)
    it.settle()
    assert on_host(it) == [3, 2]
    serve(it, 2, 4)
    it.settle()
    assert on_host(it) == [4, 4], "the window has room for two prompts"
    assert it.cache.pools.counters.evicted_host_pages == 3
    assert it.cache.pools.counters.dropped_backup_pages == 0


def test_what_is_wanted_twice_is_saved_once():
    it = machine()
    keys = serve(it, 1, 3)
    again = [Backup(ANCHOR, rows_of(it, keys)), Backup(ANCHOR, rows_of(it, keys[:2]))]
    it.cache.copies.backups.want(again)
    it.settle()
    assert on_host(it) == [3, 2]
    assert it.cache.pools.counters.backup_pages == 5
    assert it.cache.pools.counters.dropped_backup_pages == 0


def test_what_no_checkpoint_needs_takes_no_page_of_one_that_does():
    it = machine(device=12, host=3)
    serve(it, 1, 2)
    it.settle()
    nobodys = serve(it, 2, 2, kept=False)
    it.cache.copies.backups.want([Backup(WINDOW, rows_of(it, nobodys))])
    it.settle()
    assert on_host(it)[WINDOW] == 3
    assert it.cache.pools.counters.dropped_backup_pages == 1
    kept = serve(it, 3, 2)
    it.settle()
    assert set(rows_of(it, kept)) <= set(
        np.flatnonzero(it.cache.tree.internals.nodes.page[HOST][WINDOW] >= 0)
    )


def test_a_retraction_saves_whatever_the_policy_says():
    it = machine(write=WriteBack(0.1))
    keys = serve(it, 1, 4)
    it.cache.progress.tick()
    assert on_host(it) == [0, 0]
    save = it.cache.copies.backups.save
    assert save(ANCHOR, rows_of(it, keys[:2])) == 2
    assert save(ANCHOR, rows_of(it, keys)) == 2
    assert save(ANCHOR, rows_of(it, keys)) == 0
    it.settle()
    assert on_host(it) == [4, 0]
    assert it.cache.pools.counters.backup_pages == 4


def test_a_page_is_worth_its_copy_with_its_second_use():
    it = machine(write=WriteThroughSelective(3))
    keys = serve(it, 1, 4)
    it.cache.progress.tick()
    assert on_host(it) == [0, 0]
    lease = it.cache.lease(keys, 4)
    it.cache.copies.backups.used(lease)
    it.settle()
    assert on_host(it) == [4, 2]
    it.cache.release(lease)


def test_a_use_changes_nothing_where_all_is_saved_at_once():
    it = machine()
    keys = serve(it, 1, 4)
    it.settle()
    before = it.cache.copies.backups.figures()
    lease = it.cache.lease(keys, 4)
    it.cache.copies.backups.used(lease)
    assert it.cache.copies.backups.figures() == before
    it.cache.release(lease)


# -- write-back ----------------------------------------------------------------------------------


def test_the_coldest_are_saved_where_too_little_is_free_or_saved():
    for reserve, wanted in ((0.25, 0), (0.5, 0), (0.75, 1), (1.0, 4)):
        it = machine(device=8, host=8, write=WriteBack(reserve))
        cold, warm = serve(it, 1, 2), serve(it, 2, 1)
        assert it.cache.copies.backups.clean() == bool(wanted)
        count = on_host(it)[ANCHOR]
        short = int(np.ceil(reserve * 8)) - 5
        assert count == (0 if short <= 0 else min(3, short + int(np.ceil(reserve * 8)) // 4))
        it.cache.copies.submit()
        it.wait_for_copies()
        saved = it.cache.tree.internals.nodes.page[HOST][ANCHOR] >= 0
        if 0 < count < 3:
            assert not saved[rows_of(it, warm)].any(), "what was used last is saved last"
            assert saved[rows_of(it, cold)].any()
        assert not it.cache.copies.backups.clean() or count < 3


def test_every_group_is_looked_after():
    """The anchor has room enough, the window has not."""
    it = machine(device=8, host=8, write=WriteBack(1.0))
    serve(it, 1, 2)
    it.cache.progress.tick()
    assert on_host(it) == [2, 2]


def test_a_full_host_is_not_shuffled():
    """Each copy would push another one off that is needed as much."""
    it = machine(device=8, host=2, write=WriteBack(1.0))
    serve(it, 1, 2)
    it.cache.progress.tick()
    it.settle()
    moved = it.transfer.pages[Direction.BACKUP]
    assert moved == 4
    serve(it, 2, 2)
    for _ in range(5):
        it.cache.progress.tick()
        it.settle()
    assert it.transfer.pages[Direction.BACKUP] == moved
    assert on_host(it) == [2, 2]
    it.cache.check()
