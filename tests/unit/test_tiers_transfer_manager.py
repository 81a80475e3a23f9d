"""Copies between device and host: what a load takes and gives back, and what the end of a copy
means.
"""

import numpy as np

from stratakv.core.ids import NONE
from stratakv.transfer.copy_plan import Direction
from stratakv.tree.lease import LoadLease
from stratakv.tree.nodes import Tier
from tests.unit.test_tiers_pools import ANCHOR, WINDOW, free, machine, serve

DEVICE, HOST = Tier.DEVICE, Tier.HOST
NOTHING = {
    "backups": 0, "newest backup": NONE, "loads": 0, "newest load": NONE, "loads begun": 0,
    "backups wanted": 0, "backups begun": 0, "saves failed": 0,
}  # fmt: skip


def on_the_host(it, prompt, pages):
    keys = serve(it, prompt, pages)
    it.settle()
    it.cache.pools.push_out(DEVICE)
    return keys


def load_lease(it, keys):
    lease = it.cache.tree.leases.take_to_load(keys, len(keys))
    assert isinstance(lease, LoadLease)
    return lease


def test_a_load_is_counted_once_and_until_it_has_ended():
    it = machine()
    keys = on_the_host(it, 1, 4)
    lease = it.cache.copies.load(load_lease(it, keys), 4)
    assert it.cache.copies.loading_pages == 4
    other = it.cache.lease(keys, 4)
    assert it.cache.copies.loading_pages == 4, "the other one waits for the same copy"
    assert lease.loading == other.loading
    assert it.cache.copies.busy
    it.cache.copies.submit()
    assert it.cache.copies.loading_pages == 4
    it.transfer.end(Direction.LOAD)
    it.cache.progress.tick()
    assert it.cache.copies.loading_pages == 0
    assert not it.cache.copies.busy
    counters = it.cache.pools.counters
    bytes_of = [group.page_bytes for group in it.spec.groups]
    assert (counters.load_pages, counters.load_bytes) == (6, 4 * bytes_of[0] + 2 * bytes_of[1])


def test_loads_of_one_step_add_up():
    it = machine(device=12, host=12)
    first, second = on_the_host(it, 1, 3), on_the_host(it, 2, 4)
    leases = [
        it.cache.copies.load(load_lease(it, keys), n) for keys, n in ((first, 3), (second, 2))
    ]
    assert it.cache.copies.loading_pages == 5
    assert leases[0].loading == leases[1].loading
    it.settle()
    assert it.cache.copies.loading_pages == 0


def test_a_load_without_pages_in_one_group_takes_none_of_the_others():
    for short in (ANCHOR, WINDOW):
        it = machine(device=4)
        keys = on_the_host(it, 1, 3)
        space = it.cache.pools.tiers[DEVICE][short]
        mine = space.alloc(space.available() - 1)
        before = free(it, DEVICE)
        lease = load_lease(it, keys)
        assert it.cache.copies.load(lease, 3) is None
        assert free(it, DEVICE) == before
        assert it.cache.copies.loading_pages == 0
        assert not it.cache.copies.busy
        space.free(mine)
        assert it.cache.copies.load(lease, 3) is not None
        it.settle()


def test_pages_that_fail_while_they_are_taken_are_all_given_back(monkeypatch):
    """Room was promised by who could be evicted, and one of the groups has none after all."""
    it = machine()
    keys = on_the_host(it, 1, 3)
    space = it.cache.pools.tiers[DEVICE][WINDOW]
    lease = load_lease(it, keys)
    with monkeypatch.context() as patch:
        patch.setattr(space, "alloc", lambda count: None)
        assert it.cache.copies.load(lease, 3) is None
    assert free(it, DEVICE) == [8, 8]
    it.cache.release(lease)
    it.cache.check()


def test_a_failed_save_of_live_pages_is_reported_once():
    it = machine()
    (device, host) = (it.cache.pools.tiers[tier][WINDOW].alloc(2) for tier in (DEVICE, HOST))
    lost = it.cache.copies.save_live([(WINDOW, device, host)])
    it.transfer.end(Direction.BACKUP, ok=False)
    kept = it.cache.copies.save_live([(WINDOW, device, host)])
    it.wait_for_copies()
    assert it.cache.copies.figures()["saves failed"] == 1
    assert not it.cache.copies.failed(kept)
    assert it.cache.copies.failed((*kept, *lost))
    assert not it.cache.copies.failed(lost)
    assert it.cache.pools.counters.backup_failed_pages == 2
    assert it.cache.pools.counters.backup_pages == 2
    assert it.cache.copies.load_live([]) == ()


def test_a_failed_backup_is_as_if_it_had_never_been():
    it = machine()
    keys = serve(it, 1, 3)
    it.cache.progress.tick()
    it.transfer.end(Direction.BACKUP, ok=False)
    it.cache.progress.tick()
    assert free(it, HOST) == [8, 8]
    assert it.cache.match(keys, 3).device_end == 3
    assert it.cache.hold(keys, 3).end == 0
    counters = it.cache.pools.counters
    assert (counters.backup_failed_pages, counters.backup_pages, counters.backup_bytes) == (5, 0, 0)


def test_what_was_begun_before_a_save_leaves_before_it():
    it = machine()
    serve(it, 1, 3)
    device, host = (it.cache.pools.tiers[tier][ANCHOR].alloc(1) for tier in (DEVICE, HOST))
    it.cache.copies.save_live([(ANCHOR, device, host)])
    first, second = (plan for _, plan in it.transfer.queued[Direction.BACKUP])
    assert [len(copy.device) for copy in first.copies] == [3, 2]
    assert [copy.device.tolist() for copy in second.copies] == [device.tolist()]


def test_ranks_compare_what_is_under_way():
    it = machine()
    assert it.cache.copies.figures() == NOTHING
    keys = serve(it, 1, 3)
    assert it.cache.copies.figures() == NOTHING | {"backups wanted": 2}
    it.cache.progress.tick()
    assert it.cache.copies.figures() == NOTHING | {"backups": 1, "newest backup": 1}
    it.settle()
    it.cache.pools.push_out(DEVICE)
    it.cache.lease(keys, 3)
    assert it.cache.copies.figures() == NOTHING | {"loads begun": 2}
    it.cache.copies.submit()
    assert it.cache.copies.figures() == NOTHING | {"loads": 1, "newest load": 2}
    it.settle()
    assert it.cache.copies.figures() == NOTHING


def test_what_a_load_reads_is_what_was_saved():
    it = machine()
    keys = on_the_host(it, 1, 4)
    lease = it.cache.lease(keys, 4)
    gate = it.cache.copies.flights.gate(lease.loading)
    gate.wait(0)
    for group, first in ((ANCHOR, 0), (WINDOW, 2)):
        pages = it.cache.tree.leases.pages(lease, group)
        bytes_of = it.arenas[DEVICE][group].bytes[pages]
        expected = [np.frombuffer(it.content(key, group), np.uint8) for key in keys[first:]]
        assert np.array_equal(bytes_of, expected)
    assert it.cache.copies.flights.gate(()) is None
