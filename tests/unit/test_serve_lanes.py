"""Whose turn it is when work waits, and that short work does not wait for long work."""

import asyncio
import threading

import pytest

from stratakv.serve.lanes import (
    INLINE_BYTES,
    LONG_BYTES,
    FairThread,
    Lanes,
    give_memory_back,
    in_pieces,
)
from stratakv.testing.patience import PATIENCE_S


def held(lane_of):
    """Run ``lane_of``'s work behind one that waits; what was done, in order."""

    async def all_of_it():
        lane, gate, done = FairThread("test", lambda: None), threading.Event(), []
        first = asyncio.create_task(lane.run("z", lambda: gate.wait(PATIENCE_S)))
        await asyncio.sleep(0)
        tasks = lane_of(lane, done)
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, *tasks, return_exceptions=True)
        assert not lane.busy
        assert await lane.run("z", lambda: 7) == 7
        return done

    return asyncio.run(all_of_it())


def test_clients_take_turns_however_much_each_has_queued():
    def queue(lane, done):
        return [
            asyncio.create_task(lane.run(client, lambda name=f"{client}{i}": done.append(name)))
            for client, count in (("a", 4), ("b", 2), ("c", 1))
            for i in range(count)
        ]

    assert held(queue) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_who_gives_up_while_it_waits_is_passed_over():
    def queue(lane, done):
        tasks = [
            asyncio.create_task(lane.run("a", lambda name=i: done.append(name))) for i in range(3)
        ]
        asyncio.get_running_loop().call_soon(tasks[0].cancel)
        return tasks

    assert held(queue) == [1, 2]


def test_what_fails_fails_alone():
    def queue(lane, done):
        return [
            asyncio.create_task(lane.run("a", lambda: 1 // 0)),
            asyncio.create_task(lane.run("a", lambda: done.append(1))),
        ]

    assert held(queue) == [1]


def test_short_work_does_not_wait_for_long_work():
    async def both():
        lanes, gate = Lanes(), threading.Event()
        waits = [
            asyncio.create_task(lanes.run("a", LONG_BYTES, lambda: gate.wait(PATIENCE_S)))
            for _ in range(20)
        ]
        await asyncio.sleep(0)
        names = [
            await lanes.run("a", size, lambda: threading.current_thread().name)
            for size in (INLINE_BYTES - 1, INLINE_BYTES, LONG_BYTES - 1)
        ]
        assert not any(task.done() for task in waits)
        gate.set()
        await asyncio.gather(*waits)
        return names

    names = asyncio.run(both())
    assert names[0] == threading.current_thread().name
    assert names[1] == names[2] != names[0]


def test_memory_can_be_given_back():
    give_memory_back()


def test_an_error_is_its_askers():
    with pytest.raises(ZeroDivisionError):
        asyncio.run(Lanes().run("a", LONG_BYTES, lambda: 1 // 0))


def test_small_parts_are_worked_on_together_and_large_ones_alone():
    half, whole = LONG_BYTES // 2, LONG_BYTES
    assert list(in_pieces([half, half, half, whole, whole, 1, 0], int)) == [
        [half, half], [half, whole], [whole], [1, 0],
    ]  # fmt: skip
    assert list(in_pieces([0, 0], int)) == [[0, 0]]
    assert list(in_pieces([], int)) == []
