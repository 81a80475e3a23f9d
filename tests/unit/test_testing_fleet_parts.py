"""The fake device, the unkind store and the adversary, alone."""

from collections import Counter

import numpy as np
import pytest

from stratakv.core.clock import ManualClock
from stratakv.core.errors import StorageError
from stratakv.core.ids import GroupId, LayerId, PageKey
from stratakv.storage.backend import ObjectKey, ReadStatus, StoreFormat, WriteStatus
from stratakv.storage.io_jobs import Kind, Query
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.fleet.adversary import Adversary, FaultRates
from stratakv.testing.fleet.device import PageBytes, PoisoningAllocator, SimTransfer
from stratakv.testing.fleet.scenario import spec_named
from stratakv.testing.fleet.store import FaultyStore, SteppedHand
from stratakv.transfer.copy_plan import CopyPlan, Direction, GroupCopy

SPEC = spec_named("window")
ALWAYS = {"backup": 1.0, "load": 1.0, "storage": 1.0}
FORM = StoreFormat(spec_digest=SPEC.digest, page_bytes=(16, 16))
KEYS = [ObjectKey(PageKey(bytes([n]) * 32), GroupId(n % 2)) for n in range(200)]


def ids(*pages):
    return np.array(pages, np.int32)


def device(pages=4):
    return [PageBytes(group, pages) for group in SPEC.groups]


def plan(direction, on_device, on_host):
    return CopyPlan(direction, (GroupCopy(GroupId(0), ids(*on_device), ids(*on_host)),))


def test_a_copy_moves_its_bytes_when_it_ends_and_not_before():
    near, far = device(), device()
    adversary = Adversary(1, FaultRates(pace=ALWAYS))
    transfer = SimTransfer(SPEC, near, far, adversary)
    near[0].rows[2] = 7
    transfer.submit(plan(Direction.BACKUP, [2], [3]))
    assert np.isnan(far[0].rows[3]).all()
    assert transfer.ready(Direction.BACKUP) == 1
    assert (far[0].rows[3] == 7).all()
    assert transfer.peek(Direction.BACKUP, 1) == transfer.take(Direction.BACKUP, 1)


def test_a_gate_lands_loads_up_to_its_own_and_reports_to_nobody():
    near, far = device(), device()
    adversary = Adversary(1, FaultRates(pace=ALWAYS | {"load": 0.0}))
    transfer = SimTransfer(SPEC, near, far, adversary)
    far[0].rows[:] = 5
    tickets = [transfer.submit(plan(Direction.LOAD, [at], [at])) for at in range(3)]
    transfer.gate(tickets[1:2]).wait(LayerId(0))
    assert [bool((near[0].rows[at] == 5).all()) for at in range(3)] == [True, True, False]
    assert transfer.ready(Direction.LOAD) == 0


def test_a_backup_that_fails_leaves_nothing_to_read():
    near, far = device(), device()
    transfer = SimTransfer(SPEC, near, far, Adversary(1, FaultRates(pace=ALWAYS, backup_fails=1.0)))
    near[0].rows[:], far[0].rows[:] = 7, 7
    transfer.submit(plan(Direction.BACKUP, [2], [3]))
    assert transfer.ready(Direction.BACKUP) == 1
    assert not transfer.take(Direction.BACKUP, 1)[0].ok
    assert np.isnan(far[0].rows[3]).all()


def test_freed_pages_are_poisoned_and_views_share_their_bytes():
    of = device()[0]
    allocator = PoisoningAllocator(of)
    pages = allocator.alloc(2)
    of.views(pages)[1][:] = bytes(16)
    assert (of.rows[pages[1]] == 0).all()
    allocator.free(pages)
    assert np.isnan(of.rows).all()


@pytest.mark.parametrize("lane", ALWAYS)
def test_a_lane_that_is_held_stands_still_and_then_goes_on(lane):
    adversary = Adversary(1, FaultRates(pace=ALWAYS))
    adversary.hold(lane, 3)
    assert [adversary.moves(lane) for _ in range(5)] == [False] * 3 + [True] * 2


def unkind(**fault_rates):
    store = FaultyStore(MemoryBackend(FORM), Adversary(3, FaultRates(pace=ALWAYS, **fault_rates)))
    return store, [memoryview(bytearray([n]) * 16) for n in range(len(KEYS))]


def test_every_fault_of_a_store_strikes():
    store, pages = unkind(write_refused=0.3, write_fails=0.3)
    written = Counter(store.write(KEYS, pages))
    assert set(written) == {WriteStatus.STORED, WriteStatus.REFUSED, WriteStatus.FAILED}
    store, pages = unkind(read_misses=0.3, read_fails=0.3, read_corrupt=0.3, contains_lies=0.5)
    assert 0 < store.contains(KEYS).sum() < len(KEYS)
    store.write(KEYS, pages)
    assert set(store.read(KEYS, pages)) == set(ReadStatus)
    lost = store.lose(0.5)
    assert 0 < lost < len(KEYS)
    assert len(store.names) == len(KEYS) - lost
    store.close()
    assert store.lose(1.0) == 0
    store, _ = unkind(call_fails=1.0)
    with pytest.raises((StorageError, ValueError)):
        store.contains(KEYS)


def test_a_lane_without_a_thread_works_when_it_is_run():
    store, _ = unkind()
    hands: list[SteppedHand] = []

    def hand(lane, name):
        del name
        hands.append(SteppedHand(lane, Adversary(1, FaultRates(pace=ALWAYS))))
        return hands[-1]

    worker = IoWorker(Backends(store, store), FORM, IoLimits(batch_pages=2), ManualClock(), hand)
    worker.submit(Query(KEYS[:4]))
    worker.submit(Query(KEYS[:3]))
    ready = []
    for _ in range(3):
        hands[0].stir()
        ready.append(worker.ready(Kind.QUERY))
    assert ready == [0, 1, 1]
    assert worker.close(0.0)
    assert worker.ready(Kind.QUERY) == 2
