"""What every transfer engine promises of order, and of rows: the other half of the suite of
``transfer_conformance``, which brings it. Owns
those tests. Needs the ``testing`` extra.
"""

import time
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Final, TypeAlias

import numpy as np
import pytest

from stratakv.core.ids import GroupId, LayerId, PageIds, PageKey, TicketId
from stratakv.memory.mapped import Bytes
from stratakv.testing.compute_queue import MOST_S, ComputeQueue, ManualFence
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.transfer_ends import (
    GLIMPSE_S,
    BackgroundSteps,
    CopyHold,
    TransferEnds,
    TransferSuite,
    finish,
    hybrid_spec,
    page_keys_of,
    plan_of,
    spread,
)
from stratakv.transfer.copy_plan import CopyPlan, Direction, PageRows, RowCopy
from stratakv.transfer.engine import LayerGate, TransferEngine

PAGES: Final = 6
WALK: Final = 30


class TransferOrder(TransferSuite):
    """Plans come after what they name, gates after plans, and rows go where they belong."""

    def test_a_backup_reads_nothing_before_the_work_that_it_comes_after(self) -> None:
        ends = TransferEnds.of(hybrid_spec(), pages=8)
        keys, pages = page_keys_of("after", 8), spread(ends, 8, 1)
        ends.poison_device()
        ends.poison_host()
        fence = ManualFence()
        with self.running(ends) as engine:
            copies = plan_of(Direction.BACKUP, pages, pages).copies
            engine.submit(CopyPlan(Direction.BACKUP, copies, after=fence))
            looked = BackgroundSteps(fence.wait)
            assert not looked.done_within(GLIMPSE_S)
            assert engine.ready(Direction.BACKUP) == 0, "a plan ended before what it comes after"
            ends.fill_device(pages, keys)  # the forward's last write
            fence.open()
            finish(engine, Direction.BACKUP, 1)
            ends.verify_host(pages, keys)

    def test_a_load_writes_nothing_before_the_work_that_it_comes_after(self) -> None:
        """Its pages were freed, and a forward still reads them."""
        ends = TransferEnds.of(hybrid_spec(), pages=8)
        old, new = page_keys_of("old", 8), page_keys_of("new", 8)
        pages = spread(ends, 8, 1)
        ends.fill_device(pages, old)
        ends.fill_host(pages, new)
        fence = ManualFence()
        with self.running(ends) as engine:
            copies = plan_of(Direction.LOAD, pages, pages).copies
            gate = engine.gate([engine.submit(CopyPlan(Direction.LOAD, copies, after=fence))])
            reader = BackgroundSteps(partial(gate.wait, LayerId(0)))
            assert not reader.done_within(GLIMPSE_S), "a gate opened before its load could begin"
            ends.verify_device(pages, old)
            fence.open()
            assert reader.done_within(PATIENCE_S)
            finish(engine, Direction.LOAD, 1)
            ends.verify_device(pages, new)

    @pytest.mark.parametrize("direction", Direction)
    def test_what_one_direction_comes_after_holds_only_that_one_up(
        self, direction: Direction
    ) -> None:
        ends = TransferEnds.of(hybrid_spec(), pages=4)
        ends.fill_device(spread(ends, 4, 0), page_keys_of("device", 4))
        pages = spread(ends, 2, 1)
        other = next(one for one in Direction if one is not direction)
        fence = ManualFence()
        with self.running(ends) as engine:
            engine.submit(CopyPlan(direction, plan_of(direction, pages, pages).copies, after=fence))
            engine.submit(plan_of(direction, pages, pages))
            engine.submit(plan_of(other, pages, pages))
            finish(engine, other, 1)
            assert engine.ready(direction) == 0, "a plan overtook one of its direction"
            fence.open()
            finish(engine, direction, 2)

    def test_a_gate_over_a_backup_opens_when_its_pages_have_been_read(self) -> None:
        ends = TransferEnds.of(hybrid_spec(), pages=8)
        keys, pages = page_keys_of("read", 8), spread(ends, 8, 1)
        ends.fill_device(pages, keys)
        ends.poison_host()
        hold = CopyHold()
        with self.running(ends, hold) as engine:
            gate = engine.gate([engine.submit(plan_of(Direction.BACKUP, pages, pages))])
            layers = ends.layers()
            writer = BackgroundSteps(*(partial(gate.wait, at) for at in layers), ends.poison_device)
            assert not writer.done_within(GLIMPSE_S), "a page was given back before it was read"
            hold.allow(max(layers))
            assert writer.done_within(PATIENCE_S), "the gate never opened"
            finish(engine, Direction.BACKUP, 1)
            ends.verify_host(pages, keys)

    @pytest.mark.parametrize("seed", range(4))
    def test_copies_and_forwards_that_take_any_time_keep_their_order(self, seed: int) -> None:
        """A device that runs late, copies that run late, and a caller that waits for neither: every
        page ends as if each had been done at once."""
        ends, random = TransferEnds.of(hybrid_spec(), pages=PAGES), Random(seed)

        def late(*copy: object) -> None:
            del copy
            time.sleep(random.random() * MOST_S)

        with self.running(ends, late) as engine:
            walk = _Walk(ends, engine, random)
            for step in range(WALK):
                walk.step(page_keys_of(f"{seed} {step}", 1)[0])
            walk.end()

    @pytest.mark.parametrize("direction", Direction)
    def test_rows_of_pages_go_where_they_belong_and_nothing_else_moves(
        self, direction: Direction
    ) -> None:
        """Of each layer other rows, from and to other places; and whole pages beside them."""
        ends, random = TransferEnds.of(hybrid_spec(), pages=PAGES), np.random.default_rng(7)
        every = [np.arange(PAGES, dtype=np.int32)] * len(ends.spec.groups)
        ends.fill_device(every, page_keys_of("device", PAGES))
        ends.fill_host(every, page_keys_of("host", PAGES))
        pages = [ids[:2] for ids in every]
        device, host = _contents(ends)
        plan, size = plan_of(direction, pages, pages), 0
        _expect(ends, direction, pages, device, host)
        rows: list[RowCopy] = []
        for group in ends.spec.groups:
            size += 2 * group.page_bytes
            for at, buffer in enumerate(group.buffers):
                for place, layer in enumerate(buffer.layers):
                    some, others = (_some_rows(random, buffer.rows_per_page) for _ in range(2))
                    rows.append(RowCopy(group.id, buffer.name, layer, some, others))
                    size += len(some) * buffer.row_bytes
                    here = device[group.id, at][place][some.pages, some.offsets]
                    there = host[group.id, at][place][others.pages, others.offsets]
                    if direction is Direction.LOAD:
                        device[group.id, at][place][some.pages, some.offsets] = there
                    else:
                        host[group.id, at][place][others.pages, others.offsets] = here
        with self.running(ends) as engine:
            engine.submit(CopyPlan(direction, plan.copies, tuple(rows)))
            (done,) = finish(engine, direction, 1)
            assert done.bytes_moved == size
        found = _contents(ends)
        for places, wanted in zip(found, (device, host), strict=True):
            for place, layers in wanted.items():
                assert np.array_equal(places[place], layers), f"rows of {place}"

    def test_rows_land_with_their_layer(self) -> None:
        ends = TransferEnds.of(hybrid_spec(), pages=4)
        one = PageRows(np.array([1], np.int32), np.array([2], np.int32))
        rows = tuple(RowCopy(GroupId(0), "k", LayerId(layer), one, one) for layer in (0, 2))
        hold = CopyHold()
        hold.allow(0)
        with self.running(ends, hold) as engine:
            gate = engine.gate([engine.submit(CopyPlan(Direction.LOAD, (), rows))])
            gate.wait(LayerId(0))
            gate.wait(LayerId(1))
            reader = BackgroundSteps(partial(gate.wait, LayerId(2)))
            assert not reader.done_within(GLIMPSE_S), "a gate opened before its rows"
            hold.allow(2)
            assert reader.done_within(PATIENCE_S)
            finish(engine, Direction.LOAD, 1)

    @pytest.mark.parametrize(
        ("pages", "offsets"), [([0, 9], [0, 0]), ([0, -1], [0, 0]), ([0, 1], [0, 4])]
    )
    def test_a_row_outside_of_the_pools_is_refused(
        self, pages: list[int], offsets: list[int]
    ) -> None:
        ends = TransferEnds.of(hybrid_spec(), pages=4)
        fine = PageRows(np.zeros(2, np.int32), np.arange(2, dtype=np.int32))
        wrong = PageRows(np.array(pages, np.int32), np.array(offsets, np.int32))
        with self.running(ends) as engine:
            for device, host in ((wrong, fine), (fine, wrong)):
                copy = RowCopy(GroupId(0), "k", LayerId(0), device, host)
                with pytest.raises((AssertionError, ValueError, IndexError)):
                    engine.submit(CopyPlan(Direction.LOAD, (), (copy,)))


class _Walk:
    """What every page must hold if each thing was done when it was asked for."""

    def __init__(self, ends: TransferEnds, engine: TransferEngine, random: Random) -> None:
        self._ends, self._engine, self._random = ends, engine, random
        self._compute = ComputeQueue(random)
        self._device = page_keys_of("device", PAGES)
        self._host = page_keys_of("host", PAGES)
        every = [np.arange(PAGES, dtype=np.int32)] * len(ends.spec.groups)
        ends.fill_device(every, self._device)
        ends.fill_host(every, self._host)
        self._flying: dict[Direction, list[tuple[TicketId, int, int]]] = {d: [] for d in Direction}

    def step(self, key: PageKey) -> None:
        page, host = self._random.randrange(PAGES), self._random.randrange(PAGES)
        if self._random.random() < 0.4:
            flying = [one for plans in self._flying.values() for one in plans]
            gate = self._engine.gate([ticket for ticket, at, _ in flying if at == page])
            self._compute.launch(partial(self._write, gate, page, key))
            self._device[page] = key
            return
        direction = self._random.choice(list(Direction))
        for other in Direction:  # whoever holds a page in the other direction is waited for
            plans = self._flying[other]
            if other is not direction and any(at == page or to == host for _, at, to in plans):
                self._finish(other)
        ids = ([np.array([at], np.int32)] * len(self._ends.spec.groups) for at in (page, host))
        plan = plan_of(direction, *ids)
        after = self._compute.fence()
        ticket = self._engine.submit(CopyPlan(direction, plan.copies, after=after))
        self._flying[direction].append((ticket, page, host))
        if direction is Direction.BACKUP:
            self._host[host] = self._device[page]
        else:
            self._device[page] = self._host[host]

    def _write(self, gate: LayerGate, page: int, key: PageKey) -> None:
        for layer in self._ends.layers():
            gate.wait(layer)
        ids = [np.array([page], np.int32)] * len(self._ends.spec.groups)
        self._ends.fill_device(ids, [key])

    def _finish(self, direction: Direction) -> None:
        done = finish(self._engine, direction, len(self._flying[direction]))
        assert all(one.ok for one in done)
        self._flying[direction].clear()

    def end(self) -> None:
        for direction in Direction:
            self._finish(direction)
        self._compute.close()
        every = [np.arange(PAGES, dtype=np.int32)] * len(self._ends.spec.groups)
        self._ends.verify_device(every, self._device)
        self._ends.verify_host(every, self._host)


_Places: TypeAlias = dict[tuple[GroupId, int], list[Bytes]]
"""Of a group and a buffer, uint8 [pages, rows, row_bytes] of each of its layers."""


def _contents(ends: TransferEnds) -> tuple[_Places, _Places]:
    """What device and host hold."""
    device: _Places = {}
    host: _Places = {}
    for group, arena in zip(ends.spec.groups, ends.arenas, strict=True):
        for at, buffer in enumerate(group.buffers):
            raw = ends.pools.raw(group.id, buffer.name).copy()
            device[group.id, at] = list(raw)
            host[group.id, at] = [
                arena.bytes[:, one.offset_bytes : one.offset_bytes + one.bytes]
                .copy()
                .reshape(PAGES, buffer.rows_per_page, -1)
                for one in arena.layout.segments
                if one.buffer == at
            ]
    return device, host


def _expect(
    ends: TransferEnds,
    direction: Direction,
    pages: Sequence[PageIds],
    device: _Places,
    host: _Places,
) -> None:
    """Whole ``pages``, which have the same ids on both tiers."""
    for (group, at), layers in device.items():
        for place in range(len(layers)):
            source, target = device[group, at][place], host[group, at][place]
            if direction is Direction.LOAD:
                source, target = target, source
            target[pages[group]] = source[pages[group]]
    assert len(ends.spec.groups) == len(pages)


def _some_rows(random: np.random.Generator, rows: int) -> PageRows:
    """Seven rows of pages that the plan does not move as a whole, none of them twice."""
    places = random.permutation((PAGES - 2) * rows)[:7]
    return PageRows((places // rows + 2).astype(np.int32), (places % rows).astype(np.int32))
