"""Copies that are queued on streams: addresses, what waits for what, memory that is pinned."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratakv.core.ids import GroupId, LayerId
from stratakv.memory.host_arena import HostArena
from stratakv.testing.compute_queue import ManualFence
from stratakv.testing.patience import PATIENCE_S, wait_until
from stratakv.testing.transfer_ends import (
    BackgroundSteps,
    TransferEnds,
    cache_specs,
    finish,
    hybrid_spec,
    page_keys_of,
    plan_of,
    spread,
)
from stratakv.transfer.copier import CopyRoute
from stratakv.transfer.copy_plan import CopyPlan, Direction, PageRows, RowCopy
from stratakv.transfer.cpu import CpuTransferEngine
from stratakv.transfer.pinning import OS_PAGE_BYTES, Pinning, chunks_of
from stratakv.transfer.streams import WORD_BYTES, Moves, StreamCopier, page_ends, row_ends
from tests.simulated_streams import SimulatedStreams, by_kernel, by_memmove


class HeldStream:
    """Does nothing before it is asked to."""

    def __init__(self):
        self.queued, self.fences = [], []

    def after(self, fence):
        self.queued.append(fence.wait)

    def copy(self, moves):
        self.queued.append(lambda: by_memmove(moves))

    def mark(self):
        fence = ManualFence()
        self.queued.append(fence.open)
        self.fences.append(fence)
        return fence

    def run(self, count=None):
        while self.queued and count != 0:
            self.queued.pop(0)()
            count = None if count is None else count - 1


def held():
    ends = TransferEnds.of(hybrid_spec(), pages=8)
    streams = {direction: HeldStream() for direction in Direction}
    copier = StreamCopier(streams)
    return ends, streams, CpuTransferEngine(ends.spec, ends.pools, ends.arenas, copier, copier)


def test_what_is_queued_is_not_done():
    ends, streams, engine = held()
    pages = spread(ends, 3, 1)
    ends.fill_device(pages, page_keys_of("queued", 3))
    engine.submit(plan_of(Direction.BACKUP, pages, pages))
    stream = streams[Direction.BACKUP]
    wait_until(lambda: stream.fences)
    assert engine.ready(Direction.BACKUP) == 0
    stream.run()
    finish(engine, Direction.BACKUP, 1)
    ends.verify_host(pages, page_keys_of("queued", 3))
    engine.close()


def test_a_gate_opens_with_its_layer_and_a_plan_ends_with_its_last():
    ends, streams, engine = held()
    keys, pages = page_keys_of("gate", 3), spread(ends, 3, 1)
    ends.fill_host(pages, keys)
    ends.poison_device()
    gate = engine.gate([engine.submit(plan_of(Direction.LOAD, pages, pages))])
    stream, layers = streams[Direction.LOAD], ends.layers()
    wait_until(lambda: len(stream.fences) == len(layers) + 1)
    stream.run(1)  # what the plan comes after
    for layer in layers:
        assert not stream.fences[layer].passed()
        stream.run(2)  # a layer of one group, and its mark
        gate.wait(layer)
        ends.verify_device(pages, keys, [layer])
        assert engine.ready(Direction.LOAD) == 0
    stream.run()
    finish(engine, Direction.LOAD, 1)
    engine.close()


def test_a_caller_goes_on_while_a_plan_waits_for_its_forward():
    ends, streams, engine = held()
    pages, fence = spread(ends, 2, 1), ManualFence()
    copies = plan_of(Direction.BACKUP, pages, pages).copies
    engine.submit(CopyPlan(Direction.BACKUP, copies, after=fence))
    engine.submit(CopyPlan(Direction.BACKUP, copies))
    stream = streams[Direction.BACKUP]
    wait_until(lambda: len(stream.fences) == 2)
    running = BackgroundSteps(stream.run)
    fence.open()
    assert running.done_within(PATIENCE_S)
    finish(engine, Direction.BACKUP, 2)
    engine.close()


def test_closing_waits_for_what_is_queued():
    ends, streams, engine = held()
    pages = spread(ends, 2, 1)
    engine.submit(plan_of(Direction.BACKUP, pages, pages))
    closing = BackgroundSteps(engine.close)
    wait_until(lambda: streams[Direction.BACKUP].fences)
    assert not closing.done_within(0.02)
    streams[Direction.BACKUP].run()
    assert closing.done_within(PATIENCE_S)


# --- addresses -----------------------------------------------------------------------------------


@given(spec=cache_specs(fewest=1), count=st.integers(1, 4), seed=st.integers(0, 99))
def test_moves_are_the_bytes_of_a_copy_each_once(spec, count, seed):
    ends = TransferEnds.of(spec, pages=4)
    device, host = spread(ends, count, seed), spread(ends, count, seed + 1)
    for group, arena in zip(spec.groups, ends.arenas, strict=True):
        layers = {layer for buffer in group.buffers for layer in buffer.layers}
        route = CopyRoute.of(ends.pools, arena, layers)
        here, there, sizes = page_ends(route, device[group.id], host[group.id])
        assert sizes.sum() == count * group.page_bytes
        covered = np.zeros(arena.bytes.size, np.int64)
        for address, size in zip(there - arena.bytes.ctypes.data, sizes, strict=True):
            covered[address : address + size] += 1
        wanted = np.zeros_like(arena.bytes, np.int64)
        wanted[host[group.id], : group.page_bytes] = 1
        assert np.array_equal(covered, wanted.ravel())
        assert len(np.unique(here)) == len(here)


def test_rows_lie_within_their_pages():
    ends = TransferEnds.of(hybrid_spec(), pages=4)
    route = CopyRoute.of(ends.pools, ends.arenas[0], (LayerId(2),), "v")
    rows = PageRows(np.array([3, 0], np.int32), np.array([1, 3], np.int32))
    here, there, sizes = row_ends(route, rows, rows)
    pool = ends.pools.raw(GroupId(0), "v")[1]
    assert here.tolist() == [pool[3, 1].ctypes.data, pool[0, 3].ctypes.data]
    offset = route.segments[0].offset_bytes
    arena = ends.arenas[0].bytes
    assert there.tolist() == [
        arena[page].ctypes.data + offset + row * 16 for page, row in ((3, 1), (0, 3))
    ]
    assert sizes.tolist() == [16, 16]


def test_an_empty_copy_queues_nothing():
    _, streams, engine = held()
    nothing = PageRows(np.empty(0, np.int32), np.empty(0, np.int32))
    copy = RowCopy(GroupId(0), "v", LayerId(0), nothing, nothing)
    engine.submit(CopyPlan(Direction.LOAD, (), (copy,)))
    wait_until(lambda: streams[Direction.LOAD].fences)
    streams[Direction.LOAD].run()
    finish(engine, Direction.LOAD, 1)
    engine.close()


@pytest.mark.parametrize(("shift", "size"), [(0, 48), (0, 40), (8, 48), (3, 17), (0, 20_000)])
def test_a_kernel_moves_any_bytes_and_no_other(shift, size):
    source = np.random.default_rng(size).integers(0, 255, 65_536, np.uint8)
    target = np.zeros_like(source)
    ends = [each.ctypes.data + (-each.ctypes.data) % WORD_BYTES for each in (target, source)]
    starts = np.array([0, 20_480, 40_960]) + shift
    moves = Moves(
        GroupId(0), frozenset(), ends[0] + starts[::-1].copy(), ends[1] + starts,
        np.array([size, size // 2, size]),
    )  # fmt: skip
    assert moves.wide == (shift == 0 and not (size | size // 2) % WORD_BYTES)
    by_kernel(moves)
    wanted = np.zeros_like(source)
    places = (moves.targets - target.ctypes.data, moves.sources - source.ctypes.data)
    for to, begin, count in zip(*places, moves.sizes, strict=True):
        wanted[to : to + count] = source[begin : begin + count]
    assert np.array_equal(target, wanted)


# --- pinned memory -------------------------------------------------------------------------------


def arenas_of(*pages):
    groups = hybrid_spec(row_elements=1000).groups
    return [HostArena(group, count) for group, count in zip(groups, pages, strict=True)]


def test_chunks_cover_arenas_and_cut_no_page():
    arenas = arenas_of(700, 300)
    chunks = chunks_of(arenas, 1 << 20)
    for arena in arenas:
        mine = [chunk for chunk in chunks if chunk.group == arena.group.id]
        assert len(mine) > 2
        at = 0
        for chunk in mine:
            assert chunk.address == arena.bytes.ctypes.data + at
            assert at % arena.layout.stride_bytes == 0 == at % OS_PAGE_BYTES
            at += chunk.size_bytes
            assert chunk.end_bytes == at
        assert at == arena.size_bytes
    shares = [chunk.end_bytes / arenas[chunk.group].size_bytes for chunk in chunks]
    assert {chunk.group for chunk in chunks[:4]} == {0, 1}
    assert shares[0] < 0.5


class Driver:
    def __init__(self, fault_at=None):
        self.registered, self.allowed = {}, threading.Semaphore(0)
        self.fault_at = fault_at

    def register(self, address, size):
        assert self.allowed.acquire(timeout=PATIENCE_S)
        if len(self.registered) == self.fault_at:
            raise OSError("no more memory can be locked")
        self.registered[address] = size

    def unregister(self, address):
        del self.registered[address]


def test_memory_is_pinned_beside_the_server_and_a_copy_waits_for_its_pages():
    ends = TransferEnds.of(hybrid_spec(row_elements=1000), pages=256)
    driver, keys = Driver(), page_keys_of("pinned", 1)
    pinning = Pinning(ends.arenas, driver.register, driver.unregister, chunk_bytes=1)
    streams = SimulatedStreams(registered=pinning.wait)
    copier = streams.copier
    engine = CpuTransferEngine(ends.spec, ends.pools, ends.arenas, copier, copier)
    last = [np.array([255], np.int32)] * 2
    ends.fill_device(last, keys)
    engine.submit(plan_of(Direction.BACKUP, last, last))
    chunks = len(chunks_of(ends.arenas, 1))
    for _ in range(chunks - 2):
        driver.allowed.release()
    wait_until(lambda: len(driver.registered) == chunks - 2)
    wait_until(lambda: pinning.pinned_bytes)
    assert 0 < pinning.pinned_bytes < pinning.total_bytes
    assert engine.ready(Direction.BACKUP) == 0
    driver.allowed.release(2)
    finish(engine, Direction.BACKUP, 1)
    ends.verify_host(last, keys)
    wait_until(lambda: pinning.pinned_bytes == pinning.total_bytes)
    engine.close()
    streams.close()
    pinning.close()
    assert not driver.registered


def test_memory_that_cannot_be_pinned_fails_who_needs_it_alone():
    arenas, driver = arenas_of(256, 256), Driver(fault_at=2)
    driver.allowed.release(3)
    pinning = Pinning(arenas, driver.register, driver.unregister, chunk_bytes=1)
    first = chunks_of(arenas, 1)[0]
    pinning.wait(first.group, first.end_bytes)
    with pytest.raises(RuntimeError, match="not pinned"):
        pinning.wait(GroupId(1), arenas[1].size_bytes)
    pinning.close()
    assert not driver.registered


def test_closing_ends_a_wait():
    arenas, driver = arenas_of(8, 8), Driver()
    pinning = Pinning(arenas, driver.register, driver.unregister)
    waiting = BackgroundSteps(lambda: pinning.wait(GroupId(0), 1))
    closing = BackgroundSteps(pinning.close)
    with pytest.raises(RuntimeError):
        waiting.done_within(PATIENCE_S)
    driver.allowed.release(2)
    assert closing.done_within(PATIENCE_S)
