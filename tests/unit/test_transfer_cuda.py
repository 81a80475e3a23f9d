"""Copies beside a GPU's computing, over a driver that is late at random: who waits for whom."""

import logging
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest

from stratakv.core.ids import GroupId, LayerId
from stratakv.testing.compute_queue import ManualFence
from stratakv.testing.patience import PATIENCE_S, wait_until
from stratakv.testing.transfer_ends import (
    BackgroundSteps,
    TransferEnds,
    finish,
    hybrid_spec,
    page_keys_of,
    plan_of,
    spread,
)
from stratakv.transfer.copy_paths import (
    NEVER,
    PIECE_BYTES,
    SPARES,
    CopyChoice,
    CopyPath,
    CopyTrial,
)
from stratakv.transfer.copy_plan import CopyPlan, Direction
from stratakv.transfer.copy_trials import LAPS, TrialMemory, copy_trials
from stratakv.transfer.cuda import (
    CudaStreams,
    CudaTransferEngine,
    CurrentStream,
    EventFence,
    PinOptions,
)
from stratakv.transfer.near_cpus import cpus_in, near_cpus
from stratakv.transfer.streams import Moves
from tests.fake_cuda import BOTH_WAYS, FakeCuda, FakeEvent, pool_arrays
from tests.simulated_streams import by_memmove

CHUNK = PinOptions(chunk_bytes=8192)


def on_a_gpu(**driver):
    ends = TransferEnds.of(hybrid_spec(), pages=8)
    cuda = FakeCuda(device=pool_arrays(ends.spec, ends.pools), **driver)
    streams = CudaStreams.of(cuda, BOTH_WAYS)
    return (
        ends,
        cuda,
        streams,
        lambda: CudaTransferEngine(ends.spec, ends.pools, ends.arenas, streams, CHUNK),
    )


# --- who waits -----------------------------------------------------------------------------------


def test_a_fence_holds_the_stream_of_its_thread_and_blocks_a_thread_without_one():
    driver, event, current = FakeCuda(), ManualFence(), CurrentStream()
    fence = EventFence(FakeEvent(event), current)
    stream = driver.stream(urgent=False)
    with current.on(stream):
        fence.wait()
    assert (stream.held, fence.passed()) == (1, False)
    later = BackgroundSteps(fence.wait)
    after_it = stream.record()
    assert not later.done_within(0.02)
    assert not after_it.passed()
    event.open()
    assert later.done_within(PATIENCE_S)
    after_it.block()
    driver.close()


def test_a_step_waits_for_its_layers_on_its_stream_and_its_thread_goes_on():
    ends, cuda, streams, made = on_a_gpu()
    keys, pages = page_keys_of("gate", 3), spread(ends, 3, 1)
    ends.fill_host(pages, keys)
    ends.poison_device()
    engine, fence = made(), ManualFence()
    plan = plan_of(Direction.LOAD, pages, pages)
    compute = cuda.streams[0]
    seen = []
    with ThreadPoolExecutor(1, "compute", streams.compute.enter) as thread:
        held = ManualFence()
        cuda.streams[-1].queue.launch(held.wait)
        cuda.streams[-2].queue.launch(held.wait)
        gate = engine.gate([engine.submit(CopyPlan(Direction.LOAD, plan.copies, after=fence))])
        fence.open()

        def step():
            for layer in ends.layers():
                gate.wait(layer)
                compute.queue.launch(
                    lambda layer=layer: seen.append(ends.verify_device(pages, keys, [layer]))
                )

        thread.submit(step).result(PATIENCE_S)  # nothing has been copied yet
        assert engine.ready(Direction.LOAD) == 0
        assert seen == []
        mark = streams.compute.mark()
        assert not mark.passed()
        held.open()
        mark.wait()
    assert len(seen) == len(ends.layers())
    assert compute.held == len(ends.layers())
    assert cuda.urgent == [True, False, False]
    finish(engine, Direction.LOAD, 1)
    engine.close()
    cuda.close()


def test_copies_come_after_a_step_on_their_stream_alone():
    """The thread that copies queues a whole plan while the device is still at the step."""
    ends, cuda, streams, made = on_a_gpu()
    pages, held = spread(ends, 2, 1), ManualFence()
    ends.fill_device(pages, page_keys_of("step", 2))
    cuda.streams[0].queue.launch(held.wait)
    step = streams.compute.mark()
    engine = made()
    copies = plan_of(Direction.BACKUP, pages, pages).copies
    engine.submit(CopyPlan(Direction.BACKUP, copies, after=step))
    backups = cuda.streams[1 + list(Direction).index(Direction.BACKUP)]
    wait_until(lambda: backups.moved)
    assert backups.held == 1
    assert engine.ready(Direction.BACKUP) == 0
    held.open()
    finish(engine, Direction.BACKUP, 1)
    ends.verify_host(pages, page_keys_of("step", 2))
    engine.close()
    cuda.close()


def test_large_pieces_go_by_the_copy_engine_and_small_ones_by_the_kernel():
    ends, cuda, _, made = on_a_gpu()
    engine, pages = made(), spread(ends, 2, 1)
    ends.fill_device(pages, page_keys_of("paths", 2))
    for direction in (Direction.BACKUP, Direction.LOAD):
        engine.submit(plan_of(direction, pages, pages))
        finish(engine, direction, 1)
    paths = {path for stream in cuda.streams for path, _ in stream.moved}
    assert paths <= set(CopyPath)
    backups = cuda.streams[1 + list(Direction).index(Direction.BACKUP)].moved
    assert {path for path, _ in backups} == {CopyPath.ENGINE}
    engine.close()
    cuda.close()


# --- pinned memory -------------------------------------------------------------------------------


def test_a_server_goes_on_while_its_memory_is_pinned_and_a_copy_waits_for_its_own():
    ends, cuda, _, made = on_a_gpu()
    cuda.let.clear()
    engine, pages = made(), spread(ends, 2, 1)
    ends.fill_device(pages, page_keys_of("pin", 2))
    engine.submit(plan_of(Direction.BACKUP, pages, pages))
    assert engine.ready(Direction.BACKUP) == 0
    assert engine.pinning.pinned_bytes == 0
    assert not any(stream.moved for stream in cuda.streams)
    cuda.let.set()
    finish(engine, Direction.BACKUP, 1)
    ends.verify_host(pages, page_keys_of("pin", 2))
    engine.close()
    assert not cuda.registered
    cuda.close()


def test_memory_that_cannot_be_pinned_is_copied_nowhere_and_the_log_says_it_once(caplog):
    ends, cuda, _, made = on_a_gpu(refused=0)
    engine, pages = made(), spread(ends, 2, 1)
    for _ in range(3):
        engine.submit(plan_of(Direction.BACKUP, pages, pages))
    assert not any(done.ok for done in finish(engine, Direction.BACKUP, 3))
    lines = [one for one in caplog.records if one.name == "stratakv.transfer.cpu"]
    assert ["host memory is not pinned" in one.message for one in lines] == [True]
    assert lines[0].exc_info is None
    engine.close()
    assert caplog.messages[-1] == "3 backups failed: host memory is not pinned"
    cuda.close()


def test_the_log_says_how_far_pinning_is(caplog):
    _, cuda, _, made = on_a_gpu()
    with caplog.at_level(logging.INFO, "stratakv.transfer.pinning"):
        engine = made()
        wait_until(lambda: engine.pinning.pinned_bytes == engine.pinning.total_bytes)
        engine.close()
    lines = [line for line in caplog.messages if "of host memory are pinned" in line]
    assert 1 <= len(lines) <= 10
    whole = lines[-1].split(" of ")
    assert whole[0] == whole[1]
    cuda.close()


# --- which path ----------------------------------------------------------------------------------


def trials(engine, kernel, direction=Direction.LOAD):
    return [
        CopyTrial(path, direction, size, seconds)
        for path, times in ((CopyPath.ENGINE, engine), (CopyPath.KERNEL, kernel))
        for size, seconds in zip(PIECE_BYTES, times, strict=True)
    ]


@pytest.mark.parametrize(
    ("engine", "kernel", "engine_from"),
    [
        ((9, 3, 1, 1), (1, 1, 1, 1), PIECE_BYTES[2]),
        ((9, 3, 1 * SPARES, 1), (1, 1, 1, 1), PIECE_BYTES[2]),
        ((9, 3, 1.2, 1), (1, 1, 1, 1), PIECE_BYTES[3]),
        ((9, 1, 3, 1), (1, 1, 1, 1), PIECE_BYTES[3]),
        ((1, 1, 1, 1), (2, 2, 2, 2), PIECE_BYTES[0]),
        ((2, 2, 2, 2), (1, 1, 1, 1), NEVER),
        ((None,) * 4, (1, 1, 1, 1), NEVER),
        ((1, 1, 1, 1), (None,) * 4, 0),
    ],
)
def test_the_engine_is_taken_from_where_it_is_as_good_at_all_sizes(engine, kernel, engine_from):
    other = trials((2,) * 4, (1,) * 4, Direction.BACKUP)
    choice = CopyChoice.of(trials(engine, kernel) + other)
    assert choice.engine_from == {Direction.LOAD: engine_from, Direction.BACKUP: NEVER}


def test_where_nothing_copies_there_is_no_choice():
    with pytest.raises(AssertionError, match="nothing copies pieces of"):
        CopyChoice.of(trials((None,) * 4, (None,) * 4))


def moves(*sizes, offset=0):
    at = np.arange(len(sizes)) * (1 << 20) + offset
    return Moves(GroupId(0), frozenset({LayerId(0)}), at, at, np.array(sizes))


def test_a_path_is_chosen_by_the_mean_piece_and_for_odd_bytes_apart():
    choice = CopyChoice({Direction.LOAD: 4096, Direction.BACKUP: NEVER}, CopyPath.ENGINE)
    assert choice.path(Direction.LOAD, moves(4096, 4096)) is CopyPath.ENGINE
    assert choice.path(Direction.LOAD, moves(4096, 4080)) is CopyPath.KERNEL
    assert choice.path(Direction.BACKUP, moves(1 << 20)) is CopyPath.KERNEL
    assert choice.path(Direction.BACKUP, moves(100)) is CopyPath.ENGINE
    assert choice.path(Direction.BACKUP, moves(32, offset=8)) is CopyPath.ENGINE
    assert str(choice) == "load: copy engine from 4096 bytes, backup: kernel alone"


def test_both_paths_are_tried_and_what_does_not_arrive_counts_as_failed():
    def lost(one):
        by_memmove(Moves(one.group, one.layers, one.targets[1:], one.sources[1:], one.sizes[1:]))

    def broken(one):
        raise RuntimeError("no such engine")

    def lost_odd(one):
        (by_memmove if one.wide else lost)(one)

    def wider_odd(one):
        at = 0 if one.wide else 1
        ends = one.targets - at, one.sources - at, one.sizes + at
        by_memmove(Moves(one.group, one.layers, *ends))

    size = 1 << 16
    device, source, target = (np.zeros(size, np.uint8) for _ in range(3))
    memory = TrialMemory(device.ctypes.data, source, target)
    ticks = iter(range(10_000))
    for wrong in (lost, lost_odd, wider_odd, broken, by_memmove):
        stream = Immediate({CopyPath.KERNEL: by_memmove, CopyPath.ENGINE: wrong})
        found = copy_trials(stream, memory, (1024, 4096), lambda: next(ticks))
        assert len(found) == 2 * 2 * 2
        engine = {one.seconds for one in found if one.path is CopyPath.ENGINE}
        assert engine == ({1} if wrong is by_memmove else {None})
        assert {one.seconds for one in found if one.path is CopyPath.KERNEL} == {1}
    assert len(stream.moved) == 2 * 2 * 2 * (LAPS + 1)
    assert {(path, wide) for path, wide in stream.moved} == {*product(CopyPath, (True, False))}


class Immediate:
    def __init__(self, paths):
        self._paths, self.moved = paths, []

    def move(self, one, path):
        self.moved.append((path, one.wide))
        self._paths[path](one)

    def record(self):
        return self

    def block(self):
        pass


# --- near processors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8\n", {0, 1, 2, 3, 8}),
        ("", set()),
        ("\n", set()),
        ("5", {5}),
        ("0-1,64-65", {0, 1, 64, 65}),
    ],
)
def test_a_list_of_processors(text, cpus):
    assert cpus_in(text) == cpus


def test_memory_is_touched_first_by_processors_near_the_gpu(tmp_path):
    name = "0000:3b:00.0"
    (tmp_path / name).mkdir()
    (tmp_path / name / "local_cpulist").write_text("0-7\n")
    assert near_cpus(name, {6, 7, 8}, tmp_path) == {6, 7}
    assert near_cpus(name, {9}, tmp_path) == frozenset()
    assert near_cpus("0000:ff:00.0", {1}, tmp_path) == frozenset()
