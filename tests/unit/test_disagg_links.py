"""The parts of a transport without a library: ranges, descriptions, tokens, and silence."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from stratakv.core.clock import ManualClock
from stratakv.core.errors import TransportError
from stratakv.disagg.description import Description, decode
from stratakv.disagg.link import SHORTEST_PAUSE_S, WORK_S, LinkOptions, WorkSeen, pause_after
from stratakv.disagg.loopback import LoopbackTransport, LoopbackWire
from stratakv.disagg.nixl import peer_copies
from stratakv.disagg.ranges import Regions, joined, slices
from stratakv.disagg.transport import Disconnected, Failed, Lost, PeerId, Writes
from stratakv.disagg.wire import Ranges
from stratakv.disagg.wire_transport import WiredTransport
from stratakv.disagg.writer_token import TokenPlace, WriterToken, watched
from stratakv.testing.patience import PATIENCE_S, wait_until


def ranges(*triples):
    table = np.array(triples, np.uint64).reshape(-1, 3)
    return Ranges(table[:, 0], table[:, 1], table[:, 2])


def triples(found):
    return np.stack([found.sources, found.targets, found.sizes], 1).tolist()


def test_neighbours_at_both_ends_are_one_range():
    found = joined(ranges((0, 100, 4), (4, 104, 4), (8, 109, 4), (20, 113, 1), (21, 114, 2)))
    assert triples(found) == [[0, 100, 8], [8, 109, 4], [20, 113, 3]]


def test_slices_are_the_same_bytes_in_order_and_none_is_too_big():
    rng = np.random.default_rng(4)
    for most_bytes, most_ranges in ((1, 3), (7, 2), (10, 100), (1000, 1), (1 << 40, 1 << 20)):
        sizes = rng.integers(1, 40, 30)
        starts = np.cumsum(sizes + 5)
        whole = ranges(*zip(starts, starts + 10_000, sizes, strict=True))
        parts = list(slices(whole, most_bytes, most_ranges))
        assert all(part.sizes.sum() <= most_bytes for part in parts)
        assert all(len(part.sizes) <= most_ranges for part in parts)
        flat = [[s + i, t + i] for part in parts for s, t, n in triples(part) for i in range(n)]
        assert flat == [[s + i, t + i] for s, t, n in triples(whole) for i in range(n)]
    assert not list(slices(ranges(), 10, 10))


def test_slices_are_as_few_as_the_limits_give():
    whole = ranges((0, 0, 10), (50, 50, 10), (90, 90, 25))
    assert [part.sizes.tolist() for part in slices(whole, 20, 9)] == [[10, 10], [20], [5]]


def test_a_description_says_what_was_described():
    regions = Regions.of([(2**63 + 1, 5), (7, 0)])
    found = decode(Description("x", regions, b"\x00\xff").encode(), "x")
    assert found.regions.places() == [[2**63 + 1, 5], [7, 0]]
    assert found.wire == b"\x00\xff"


def test_a_description_of_another_transport_or_version_is_refused_with_both_values():
    data = Description("nixl", Regions.of([]), b"").encode()
    with pytest.raises(TransportError, match="'nixl', this side's 'mooncake'"):
        decode(data, "mooncake")
    with pytest.raises(TransportError, match="version 9, not 1"):
        decode(data.replace(b'"version": 1', b'"version": 9'), "nixl")


def test_a_token_says_until_it_is_closed_that_its_owner_may_write():
    token = WriterToken("a name")
    may_write = watched(token.place)
    assert may_write()
    token.close()
    token.close()
    assert not may_write()


def test_who_is_on_another_machine_writes_nothing_here():
    token = WriterToken("a name")
    assert not watched(replace(token.place, machine="another"))()
    token.close()


def test_a_file_of_our_own_that_is_no_token_is_refused():
    """It would be open for ever, and the peer that names it never behind its fence."""
    token = WriterToken("a name")
    file = os.memfd_create("mine", os.MFD_CLOEXEC)
    for wrong in ({"file": file, "name": "mine"}, {"name": "another"}, {"file": file}):
        with pytest.raises(TransportError, match="none of this process's"):
            watched(replace(token.place, **wrong))
    token.close()
    os.close(file)


CHILD = """
import signal; from dataclasses import astuple
from stratakv.disagg.writer_token import WriterToken
token = WriterToken('of a child'); print(astuple(token.place), flush=True)
signal.pause()
"""


@pytest.fixture
def owner():
    """A process with a token, and where that is."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        yield child, TokenPlace(*eval(child.stdout.readline()))
        child.kill()


def test_the_token_of_a_process_that_was_killed_is_closed(owner):
    child, place = owner
    may_write = watched(place)
    child.send_signal(signal.SIGSTOP)
    assert may_write()
    child.kill()
    child.wait()
    assert not may_write()
    with pytest.raises(TransportError, match="no such token open"):
        watched(place)


def test_a_process_into_which_we_may_not_look_is_refused_and_does_not_hold_a_fence_for_ever(
    owner, monkeypatch
):
    child, place = owner
    may_write, readlink = watched(place), os.readlink

    def denied(link):
        if link == f"/proc/{place.pid}/fd/{place.file}":
            raise PermissionError(13, "Permission denied")
        return readlink(link)

    monkeypatch.setattr("os.readlink", denied)
    with pytest.raises(TransportError, match="cannot be looked into"):
        watched(place)
    assert may_write(), "the same process, and it could be looked into"
    child.kill()
    child.wait()
    assert not may_write(), "there is no such process any more"


@pytest.mark.parametrize("names", [
    "all", "*", "sm,tcp,self", "shm", "tcp,cma", "tcp,\\cma", "mm", "xpmem", "tcp,knem:aux", "c*",
    "^tcp", "^cma,knem", "^mm", "^posix",
])  # fmt: skip
def test_with_these_a_peer_s_own_process_copies(names):
    assert peer_copies(names)


@pytest.mark.parametrize("names", [
    "tcp", "tcp,self", "self", "posix,sysv,tcp", "ib,tcp", "rc_x", "^cma,knem,xpmem", "^sm", "^shm",
    "^cma,knem,mm", "^all",
])  # fmt: skip
def test_with_these_what_a_peer_writes_ends_with_our_agent(names):
    assert not peer_copies(names)


def test_who_is_silent_for_so_long_is_lost_also_where_its_thread_does_nothing():
    clock, options = ManualClock(), LinkOptions(lost_after_s=10.0)
    one = LoopbackTransport([np.zeros(8, np.uint8)], options, clock)
    silent = LoopbackTransport([np.zeros(8, np.uint8)], options, clock)
    one.describe(PeerId("b"))
    one.connect(PeerId("b"), silent.describe(PeerId("a")))
    for _ in range(6):
        clock.advance(1.5)
        assert one.poll() == []
    clock.advance(1.5)
    events = []
    wait_until(lambda: events.extend(one.poll()) or Disconnected(PeerId("b")) in events, "its end")
    assert isinstance(events[0], Lost)
    assert "10.5 s" in events[0].reason
    silent.close()


def test_who_was_stopped_itself_does_not_take_that_for_a_peer_s_silence():
    """Nor a machine that was asleep: what has come meanwhile is read first."""
    clock = ManualClock()
    one, two = two_of_loopback(LoopbackWire, clock)
    one.post(PeerId("two"), BYTES, b"both know each other")
    wait_until(two.poll, "the notification")
    for _ in range(3):
        clock.advance(60.0)
        assert not any(isinstance(event, Lost) for event in one.poll())
        two.post(PeerId("one"), BYTES, b"still there")
        seen = []
        wait_until(lambda: seen.extend(one.poll()) or seen, "it")  # noqa: B023
        assert not any(isinstance(event, Lost) for event in seen)
    one.close()
    two.close()


def test_what_is_posted_after_a_link_has_ended_ends_before_its_peer_does():
    clock, options = ManualClock(), LinkOptions(lost_after_s=10.0)
    one = LoopbackTransport([np.zeros(8, np.uint8)], options, clock)
    silent = LoopbackTransport([np.zeros(8, np.uint8)], options, clock)
    peer = PeerId("who is silent")
    one.describe(peer)
    one.connect(peer, silent.describe(PeerId("one")))
    for _ in range(4):
        clock.advance(2.5)
        assert one.poll() == []
    clock.advance(2.5)
    ended = f"transport {peer}"
    wait_until(lambda: ended not in {thread.name for thread in threading.enumerate()}, "its end")
    transfer = one.post(peer, Writes(*[np.zeros(0, np.int64)] * 5))
    lost, failed, gone = one.poll()
    assert isinstance(lost, Lost)
    assert isinstance(failed, Failed)
    assert failed.transfer == transfer
    assert gone == Disconnected(peer)
    silent.close()
    one.close()


class Counted(LoopbackWire):
    """What it is asked to send behind bytes, and alone."""

    def __init__(self, memories):
        super().__init__(memories)
        self.behind, self.alone = [], []

    def write(self, ranges, message, given_up):
        self.behind.append(message)
        super().write(ranges, None, given_up)
        if message is not None:
            super().notify(message)

    def notify(self, message):
        self.alone.append(message)
        super().notify(message)


def test_a_notification_goes_with_the_last_slice_and_alone_only_where_there_are_no_bytes():
    wires, memory = [], [np.zeros(40, np.uint8)]

    def wire(memories):
        wires.append(Counted(memories))
        return wires[-1]

    options = LinkOptions(slice_bytes=16)
    one, two = (WiredTransport("loopback", memory, wire, options) for _ in range(2))
    described, answer = one.describe(PeerId("two")), two.describe(PeerId("one"))
    one.connect(PeerId("two"), answer)
    two.connect(PeerId("one"), described)
    whole = Writes(*(np.array([n], np.int64) for n in (0, 0, 0, 0, 40)))
    nothing = Writes(*[np.zeros(0, np.int64)] * 5)
    for writes, word in ((whole, b"with"), (whole, None), (nothing, b"alone"), (nothing, None)):
        one.post(PeerId("two"), writes, word)
    done, got = [], []
    wait_until(lambda: done.extend(one.poll()) or len(done) == 4, "the end of all")
    wait_until(lambda: got.extend(two.poll()) or len(got) == 2, "the notifications")
    assert [event.notification for event in got] == [b"with", b"alone"]
    assert wires[0].behind == [None, None, b"Nwith", None, None, None]
    assert [message for message in wires[0].alone if message != b"B"] == [b"Nalone"]
    one.close()
    two.close()


class Paced(LoopbackWire):
    """Writes when it may; what it did, in order."""

    def __init__(self, memories, may_write, acts):
        super().__init__(memories)
        self.may_write, self.acts = may_write, acts

    def write(self, ranges, message, given_up):
        self.may_write.wait(PATIENCE_S)
        self.acts.append("write")
        super().write(ranges, message, given_up)

    def notifications(self):
        self.acts.append("look")
        return super().notifications()


def two_of_loopback(first_wire, clock=None, wake=None):
    """Joined, with eight bytes each."""
    memory = [np.zeros(8, np.uint8)]
    one = WiredTransport("loopback", memory, first_wire, LinkOptions(), clock, wake)
    two = LoopbackTransport(memory)
    described, answer = one.describe(PeerId("two")), two.describe(PeerId("one"))
    one.connect(PeerId("two"), answer)
    two.connect(PeerId("one"), described)
    return one, two


BYTES = Writes(*(np.array([n], np.int64) for n in (0, 0, 0, 0, 8)))


def test_who_has_more_to_write_looks_no_oftener_than_every_ten_milliseconds():
    may_write, acts, clock, done = threading.Event(), [], ManualClock(), []
    one, two = two_of_loopback(lambda memories: Paced(memories, may_write, acts), clock)
    for _ in range(20):
        one.post(PeerId("two"), BYTES)
    may_write.set()
    wait_until(lambda: done.extend(one.poll()) or len(done) == 20, "the end of all")
    first = acts.index("write")
    assert acts[first : first + 20] == ["write"] * 20, "no time has passed, and so no look is due"
    clock.advance(0.01)
    wait_until(lambda: acts[-1] == "look", "a look in the silence behind them")
    one.close()
    two.close()


def test_whoever_polls_is_woken_by_a_notification_and_by_the_last_of_many_writes():
    may_write, woken, done = threading.Event(), [], []
    paced = two_of_loopback(
        lambda memories: Paced(memories, may_write, []), wake=lambda: woken.append(len(done))
    )
    one, two = paced
    for _ in range(5):
        one.post(PeerId("two"), BYTES)
    assert not woken
    may_write.set()
    wait_until(lambda: woken, "the end of the writes")
    done += one.poll()
    assert len(done) == 5
    assert len(woken) == 1, "once for all of them"
    two.post(PeerId("one"), BYTES, b"a page")
    wait_until(lambda: len(woken) == 2, "a notification")
    assert [event.notification for event in one.poll()] == [b"a page"]
    two.close()
    wait_until(lambda: Disconnected(PeerId("two")) in one.poll(), "the fence")
    assert len(woken) >= 3, "a peer that ends wakes, too"
    one.close()


def test_looks_at_a_wire_are_rarer_in_silence_and_at_once_again_when_bytes_come():
    pauses = [SHORTEST_PAUSE_S]
    for _ in range(100):
        pauses.append(pause_after(pauses[-1], busy=False))
    assert pauses == sorted(pauses)
    assert pauses[-1] == pauses[-2] == 0.002
    assert all(pauses[at] <= 0.11 * sum(pauses[:at]) + SHORTEST_PAUSE_S for at in range(100))
    assert pause_after(pauses[-1], busy=True) == SHORTEST_PAUSE_S


@pytest.mark.parametrize("slower", [1, 10, 100])
def test_a_slow_processor_s_idle_looks_are_no_work(slower):
    """Else its link would look without a pause for ever."""
    looks = WorkSeen()
    idle = [slower * took_s for took_s in (20e-6, 12e-6, 80e-6, 15e-6)]
    assert not any(map(looks.busy, idle[1:]))
    assert looks.busy(slower * 200e-6)
    assert not looks.busy(WORK_S / 2)
