"""What the CPU engine promises beyond the public suite."""

import threading

import numpy as np
import pytest

from stratakv.core.ids import GroupId, LayerId, TicketId
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.transfer_ends import (
    CopyHold,
    HookedCopier,
    TransferEnds,
    finish,
    hybrid_spec,
    page_keys_of,
    plan_of,
    spread,
)
from stratakv.transfer.copy_plan import CopyPlan, Direction, GroupCopy
from stratakv.transfer.cpu import DEFAULT_COPIER, CpuTransferEngine


@pytest.fixture
def ends():
    return TransferEnds.of(hybrid_spec(), pages=8)


def engine_of(ends, before_copy):
    copier = HookedCopier(DEFAULT_COPIER, before_copy)
    return CpuTransferEngine(ends.spec, ends.pools, ends.arenas, copier)


def fail_on_layer_1(direction, group, layers):
    if direction is Direction.LOAD and layers == {1}:
        raise OSError("the link is down")


def load_of(ends):
    pages = spread(ends, 4, 0)
    return plan_of(Direction.LOAD, pages, pages)


def error_of_waiting(gate, layer, meanwhile=lambda: None):
    """What ``gate.wait`` raised on a thread of its own: a waiter that hangs fails, not hangs."""
    caught = []

    def wait():
        try:
            gate.wait(LayerId(layer))
        except AssertionError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    meanwhile()
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive(), "the waiter hangs"
    return caught[0] if caught else None


def test_a_failed_load_wakes_waiters_and_stops_every_later_call(ends):
    engine = engine_of(ends, fail_on_layer_1)
    gate = engine.gate([engine.submit(load_of(ends))])
    error = error_of_waiting(gate, 3)
    assert error is not None
    assert isinstance(error.__cause__, OSError)
    for call in (
        lambda: gate.wait(LayerId(0)),
        lambda: engine.submit(CopyPlan(Direction.BACKUP, ())),
        lambda: engine.ready(Direction.BACKUP),
        lambda: engine.take(Direction.LOAD, 0),
        engine.close,
    ):
        with pytest.raises(AssertionError, match="load failed"):
            call()


def test_loads_queued_behind_a_failed_one_wake_their_waiters_too(ends):
    hold = CopyHold()

    def held_then_failing(direction, group, layers):
        hold(direction, group, layers)
        fail_on_layer_1(direction, group, layers)

    engine = engine_of(ends, held_then_failing)
    engine.submit(load_of(ends))
    later = engine.gate([engine.submit(load_of(ends))])
    assert error_of_waiting(later, 2, meanwhile=lambda: hold.allow(3)) is not None
    with pytest.raises(AssertionError):
        engine.close()


def test_backups_pass_a_stalled_load(ends):
    load_held = threading.Event()

    def hold_loads(direction, group, layers):
        if direction is Direction.LOAD:
            assert load_held.wait(PATIENCE_S)

    engine = engine_of(ends, hold_loads)
    pages = spread(ends, 4, 1)
    engine.submit(load_of(ends))
    engine.submit(plan_of(Direction.BACKUP, pages, pages))
    assert finish(engine, Direction.BACKUP, 1)[0].ok
    assert engine.ready(Direction.LOAD) == 0
    load_held.set()
    engine.close()
    assert engine.ready(Direction.LOAD) == 1


def test_the_callers_arrays_are_free_once_submitted(ends):
    keys = page_keys_of("owned", 4)
    device, host = spread(ends, 4, 2), spread(ends, 4, 3)
    ends.fill_device(device, keys)
    hold = CopyHold()
    engine = engine_of(ends, hold)
    plan = plan_of(Direction.BACKUP, [ids.copy() for ids in device], [ids.copy() for ids in host])
    engine.submit(plan)
    for copy in plan.copies:
        copy.device[:] = copy.host[:] = 0
    hold.allow(3)
    engine.close()
    ends.verify_host(host, keys)


def ids(*pages, dtype=np.int32):
    return np.array(pages, dtype)


@pytest.mark.parametrize(
    ("device", "host"),
    [
        (ids(8), ids(0)),
        (ids(-1), ids(0)),
        (ids(0), ids(8)),
        (ids(0), ids(-1)),
        (ids(0, dtype=np.int64), ids(0)),
    ],
)
def test_a_plan_outside_the_pools_is_refused_where_it_is_submitted(ends, device, host):
    engine = engine_of(ends, lambda *_: None)
    with pytest.raises(AssertionError):
        engine.submit(CopyPlan(Direction.BACKUP, (GroupCopy(GroupId(1), device, host),)))
    engine.close()
    assert engine.ready(Direction.BACKUP) == 0


def test_gates_refuse_unknown_and_taken_tickets(ends):
    engine = engine_of(ends, lambda *_: None)
    taken = engine.submit(load_of(ends))
    open_gate = engine.gate([taken])
    finish(engine, Direction.LOAD, 1)
    for ticket in (taken, TicketId(99)):
        with pytest.raises(AssertionError):
            engine.gate([ticket])
    open_gate.wait(LayerId(3))
    engine.close()


def test_taking_more_than_is_ready_is_caught(ends):
    engine = engine_of(ends, lambda *_: None)
    with pytest.raises(AssertionError):
        engine.take(Direction.LOAD, 1)
    engine.close()


def test_close_twice_is_harmless_and_ends_the_threads(ends):
    before = set(threading.enumerate())
    engine = engine_of(ends, lambda *_: None)
    workers = set(threading.enumerate()) - before
    assert {worker.name for worker in workers} == {"stratakv-backup", "stratakv-load"}
    engine.close()
    engine.close()
    assert not any(worker.is_alive() for worker in workers)


def test_a_failed_backup_says_why(ends, caplog):
    def fail(direction, group, layers):
        raise OSError("the device is gone")

    engine = engine_of(ends, fail)
    pages = spread(ends, 1, 0)
    engine.submit(plan_of(Direction.BACKUP, pages, pages))
    engine.close()
    assert "the device is gone" in caplog.text
