"""The suite that every transfer engine must pass; subclass it beside your engine. Owns the contract
of ``transfer.engine``, as tests; those of order and of rows are in ``transfer_order``.

    class TestMyEngine(TransferConformance):
        def engine(self, spec, pools, arenas, before_copy):
            return MyEngine(spec, pools, arenas, before_copy=before_copy)

Needs the ``testing`` extra (pytest, Hypothesis). What an engine does about a load that fails is its
own: it stops the process, which no suite survives.
"""

import threading
import time
from collections.abc import Collection
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratakv.core.ids import GroupId, LayerId
from stratakv.spec.groups import CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.transfer_ends import (
    GLIMPSE_S,
    BackgroundSteps,
    CopyHold,
    TransferEnds,
    cache_specs,
    finish,
    hybrid_spec,
    page_keys_of,
    plan_of,
    spread,
)
from stratakv.testing.transfer_order import TransferOrder
from stratakv.transfer.copy_plan import CopyPlan, Direction, GroupCopy
from stratakv.transfer.engine import Completion


class TransferConformance(TransferOrder):
    """Subclass as ``Test...`` and implement ``engine``."""

    @settings(
        max_examples=40,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.differing_executors],
    )
    @given(spec=cache_specs(), count=st.integers(1, 5), seed=st.integers(0, 1000))
    def test_a_round_trip_is_exact_and_writes_nothing_else(
        self, spec: CacheSpec, count: int, seed: int
    ) -> None:
        ends = TransferEnds.of(spec, pages=6)
        keys = page_keys_of("round trip", count)
        device, host, landing = (spread(ends, count, seed + i) for i in range(3))
        ends.poison_device()
        ends.poison_host()
        ends.fill_device(device, keys)
        size = count * sum(group.page_bytes for group in spec.groups)
        with self.running(ends) as engine:
            ticket = engine.submit(plan_of(Direction.BACKUP, device, host))
            assert finish(engine, Direction.BACKUP, 1) == [
                Completion(ticket, ok=True, bytes_moved=size)
            ]
            ends.verify_host(host, keys)
            ends.verify_others_poisoned(device, host)
            ends.poison_device()
            ticket = engine.submit(plan_of(Direction.LOAD, landing, host))
            assert finish(engine, Direction.LOAD, 1) == [
                Completion(ticket, ok=True, bytes_moved=size)
            ]
            ends.verify_device(landing, keys)
            ends.verify_others_poisoned(landing, host)

    def test_one_plan_merges_many_copies_of_the_same_groups(self) -> None:
        ends = TransferEnds.of(hybrid_spec(), pages=64)
        keys = page_keys_of("merged", 64)
        device, host = spread(ends, 64, 1), spread(ends, 64, 2)
        ends.fill_device(device, keys)
        ends.poison_host()
        parts = [slice(at, at + 3) for at in range(0, 64, 3)]
        copies = tuple(
            GroupCopy(group.id, device[group.id][part], host[group.id][part])
            for part in parts
            for group in ends.spec.groups
        )
        with self.running(ends) as engine:
            engine.submit(CopyPlan(Direction.BACKUP, copies))
            finish(engine, Direction.BACKUP, 1)
            ends.verify_host(host, keys)
            ends.poison_device()
            engine.submit(CopyPlan(Direction.LOAD, copies))
            finish(engine, Direction.LOAD, 1)
            ends.verify_device(device, keys)

    @pytest.mark.parametrize("direction", Direction)
    def test_plans_finish_in_submission_order(self, direction: Direction) -> None:
        ends = TransferEnds.of(hybrid_spec(), pages=16)
        hold = CopyHold()
        with self.running(ends, hold) as engine:
            tickets = [
                engine.submit(plan_of(direction, ids, ids))
                for ids in (spread(ends, count, count) for count in (8, 1, 5, 2, 1, 7))
            ]
            assert len(set(tickets)) == len(tickets)
            time.sleep(GLIMPSE_S)
            assert engine.ready(direction) == 0, "a held plan was counted as finished"
            hold.allow(3)
            first = finish(engine, direction, 2)
            rest = finish(engine, direction, 4)
            assert [done.ticket for done in first + rest] == tickets
            assert engine.ready(direction) == 0

    def test_a_later_plan_sees_what_an_earlier_one_wrote(self) -> None:
        """FIFO in bytes: two plans of one direction write the same page; the later one wins."""
        ends = TransferEnds.of(hybrid_spec(), pages=8)
        keys = page_keys_of("order", 8)
        device = spread(ends, 8, 3)
        target = [ids[:1] for ids in spread(ends, 8, 4)]
        ends.fill_device(device, keys)
        with self.running(ends) as engine:
            for at in range(8):
                source = [ids[at : at + 1] for ids in device]
                engine.submit(plan_of(Direction.BACKUP, source, target))
            finish(engine, Direction.BACKUP, 8)
            ends.verify_host(target, keys[7:])

    def test_empty_plans_finish_and_open_their_gates(self) -> None:
        logical = CacheGroup(id=GroupId(0), name="anchor", retention=KeepAll(), buffers=())
        ends = TransferEnds.of(CacheSpec(page_tokens=4, groups=(logical,)), pages=4)
        none, some = np.empty(0, np.int32), np.arange(3, dtype=np.int32)
        with self.running(ends) as engine:
            for direction in Direction:
                plans = [
                    CopyPlan(direction, ()),
                    CopyPlan(direction, (GroupCopy(GroupId(0), none, none),)),
                    CopyPlan(direction, (GroupCopy(GroupId(0), some, some),)),
                ]
                tickets = [engine.submit(plan) for plan in plans]
                if direction is Direction.LOAD:
                    engine.gate(tickets).wait(LayerId(0))
                expected = [Completion(ticket, ok=True, bytes_moved=0) for ticket in tickets]
                assert finish(engine, direction, 3) == expected

    def test_gates_open_layer_by_layer_once_the_bytes_are_there(self) -> None:
        ends = TransferEnds.of(hybrid_spec(), pages=16)
        keys = page_keys_of("gate", 9)
        device, host = spread(ends, 9, 5), spread(ends, 9, 6)
        ends.fill_host(host, keys)
        ends.poison_device()
        hold = CopyHold()
        with self.running(ends, hold) as engine:
            gate = engine.gate([engine.submit(plan_of(Direction.LOAD, device, host))])
            for layer in ends.layers():
                reader = BackgroundSteps(
                    partial(gate.wait, layer), partial(ends.verify_device, device, keys, [layer])
                )
                assert not reader.done_within(GLIMPSE_S), f"gate {layer} opened before its bytes"
                assert engine.ready(Direction.LOAD) == 0
                hold.allow(layer)
                assert reader.done_within(PATIENCE_S), f"gate {layer} never opened"

    def test_a_gate_waits_for_each_of_its_tickets(self) -> None:
        ends = TransferEnds.of(hybrid_spec(), pages=12)
        keys = page_keys_of("tickets", 12)
        device, host = spread(ends, 12, 7), spread(ends, 12, 8)
        ends.fill_host(host, keys)
        ends.poison_device()
        copies = plan_of(Direction.LOAD, device, host).copies
        hold = CopyHold()
        hold.allow(0)
        with self.running(ends, hold) as engine:
            # Layers 0 and 2, then 1 and 3: layer 1 cannot land while layer 2 is held.
            plans = [CopyPlan(Direction.LOAD, (copy,)) for copy in copies]
            gate = engine.gate([engine.submit(plan) for plan in plans])
            gate.wait(LayerId(0))
            ends.verify_device(device, keys, [LayerId(0)])
            reader = BackgroundSteps(partial(gate.wait, LayerId(1)))
            assert not reader.done_within(GLIMPSE_S), "the second ticket was not waited for"
            hold.allow(3)
            for layer in ends.layers():
                gate.wait(layer)
                ends.verify_device(device, keys, [layer])

    def test_a_gate_ignores_layers_that_its_plans_do_not_bring(self) -> None:
        ends = TransferEnds.of(hybrid_spec(), pages=4)
        pages = np.arange(4, dtype=np.int32)
        hold = CopyHold()
        with self.running(ends, hold) as engine:
            engine.gate([]).wait(LayerId(0))
            plan = CopyPlan(Direction.LOAD, (GroupCopy(GroupId(0), pages, pages),))
            gate = engine.gate([engine.submit(plan)])
            for layer in (1, 3, 99):
                reader = BackgroundSteps(partial(gate.wait, LayerId(layer)))
                assert reader.done_within(PATIENCE_S), f"layer {layer} blocked for nothing"

    def test_no_reader_sees_a_torn_page(self) -> None:
        """Large enough that copies overlap reads: no hook, gates and completions alone."""
        ends = TransferEnds.of(hybrid_spec(row_elements=1024), pages=64)
        for attempt in range(3):
            keys = page_keys_of(f"torn {attempt}", 64)
            device, host = spread(ends, 64, attempt), spread(ends, 64, attempt + 10)
            ends.fill_device(device, keys)
            ends.poison_host()
            with self.running(ends) as engine:
                engine.submit(plan_of(Direction.BACKUP, device, host))
                finish(engine, Direction.BACKUP, 1)
                ends.poison_device()
                ends.verify_host(host, keys)
                gate = engine.gate([engine.submit(plan_of(Direction.LOAD, device, host))])
                for layer in ends.layers():
                    gate.wait(layer)
                    ends.verify_device(device, keys, [layer])

    def test_a_failed_backup_is_reported_and_the_next_one_is_not_harmed(self) -> None:
        ends = TransferEnds.of(hybrid_spec(), pages=4)
        keys = page_keys_of("failure", 4)
        pages = spread(ends, 4, 9)
        ends.fill_device(pages, keys)
        ends.poison_host()
        broken = threading.Event()
        broken.set()

        def fail_once(direction: Direction, group: GroupId, layers: Collection[LayerId]) -> None:
            if broken.is_set():
                broken.clear()
                raise OSError("the device is gone")

        with self.running(ends, fail_once) as engine:
            tickets = [engine.submit(plan_of(Direction.BACKUP, pages, pages)) for _ in range(2)]
            failed, done = finish(engine, Direction.BACKUP, 2)
            assert failed == Completion(tickets[0], ok=False, bytes_moved=0)
            assert done.ticket == tickets[1]
            assert done.ok
            ends.verify_host(pages, keys)

    def test_close_finishes_what_is_queued_and_refuses_more(self) -> None:
        ends = TransferEnds.of(hybrid_spec(), pages=16)
        keys = page_keys_of("close", 16)
        pages, landing = spread(ends, 8, 11), spread(ends, 16, 12)
        ends.fill_device(pages, keys[:8])
        ends.poison_host()
        hold = CopyHold()
        with self.running(ends, hold) as engine:
            for at in range(8):
                ids = [group[at : at + 1] for group in pages]
                engine.submit(plan_of(Direction.BACKUP, ids, ids))
            closing = BackgroundSteps(engine.close)
            assert not closing.done_within(GLIMPSE_S), "close() left a plan unfinished"
            hold.allow(3)
            assert closing.done_within(PATIENCE_S), "close() never returned"
            assert engine.ready(Direction.BACKUP) == 8
            assert all(done.ok for done in engine.take(Direction.BACKUP, 8))
            ends.verify_host(pages, keys[:8])
            with pytest.raises((AssertionError, RuntimeError, ValueError)):
                engine.submit(plan_of(Direction.LOAD, landing, landing))
