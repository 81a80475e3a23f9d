"""What keeps its promises passes the suite, however untidy; what breaks one does not.

Owns the seeded bugs of transports.
"""

import ctypes
import inspect
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from random import Random

import pytest

from stratakv.core.errors import TransportError
from stratakv.disagg.loopback import LoopbackTransport, LoopbackWire
from stratakv.disagg.transport import Done, Failed
from stratakv.disagg.wire_transport import WiredTransport
from stratakv.testing.transport_conformance import TransportConformance
from stratakv.testing.transport_faults import FaultyTransport, TransportFaults
from stratakv.testing.transport_sides import TransportSide, meet, until, writes_of
from stratakv.testing.transport_suite import MANY, REGION_BYTES, A, B, TransportSubject
from tests.fixtures.transports import PATIENT, open_loopback

UNTIDY = TransportFaults(late=4, delay=4, parts=5)


def open_untidy(seed, memories):
    return FaultyTransport(open_loopback(memories), Random(seed), UNTIDY)


@pytest.fixture
def subject():
    return TransportSubject(open=partial(open_untidy, 1), elsewhere=False)


class TestUntidy(TransportConformance):
    """But for threads, and that a range outside of its region is seen when it is begun."""

    test_many_threads_may_post = None
    test_a_range_outside_of_a_region_writes_nothing = None


def test_a_completion_that_is_lost_is_a_failure_when_the_link_ends():
    lossy = TransportFaults(lost=0.5)
    one = TransportSide.of(
        lambda memories: FaultyTransport(open_loopback(memories), Random(1), lossy), 64
    )
    two = TransportSide.of(open_loopback, 64)
    meet(one, A, two, B)
    transfers = [one.transport.post(B, writes_of((0, 0, 0, 0, 64)), b"%d" % i) for i in range(20)]
    until(lambda: len(two.notes(A)) == 20, "all notifications", one, two)
    two.transport.disconnect(A)
    until(lambda: one.is_gone(B), "the end of the link", two)
    one.verify_ends(transfers, B)
    assert one.events_of(Done)
    assert one.events_of(Failed)


class FenceThatDoesNotWait(LoopbackWire):
    """Its peer's writes go on, and end later."""

    def sever(self):
        def end():
            for _ in range(20_000):  # or until nobody waits for it any more
                if b"N%d" % (MANY - 1) in list(self._end.inbox):
                    break
                time.sleep(0.001)
            LoopbackWire.sever(self)

        threading.Thread(target=end, daemon=True).start()
        return True

    def write(self, ranges, message, given_up):
        time.sleep(0.001)
        super().write(ranges, message, given_up)

    def notify(self, message):
        if message != b"E":
            super().notify(message)


class CopiesLate(LoopbackWire):
    """It says that bytes are there which are on their way."""

    def write(self, ranges, message, given_up):
        def copy():
            time.sleep(0.05)
            with suppress(TransportError):
                LoopbackWire.write(self, ranges, None, threading.Event())

        threading.Thread(target=copy, daemon=True).start()
        if message is not None:
            self.notify(message)


class ReadsOn(LoopbackWire):
    """Who has given up still reads what it was to write."""

    last = None

    def write(self, ranges, message, given_up):
        self.last = self._connected(), ranges
        super().write(ranges, message, given_up)

    def sever(self):
        if self.last is not None:
            threading.Thread(target=self.read, daemon=True).start()
        return super().sever()

    def read(self):
        peer, ranges = self.last
        for _ in range(100):
            time.sleep(0.001)
            with peer.lock:
                if not peer.open:
                    return
                ctypes.memmove(ranges.targets.item(0), ranges.sources.item(0), 8)

    def notify(self, message):
        if message != b"E":
            super().notify(message)


class WritesAll(LoopbackWire):
    """Gaps between ranges are written too."""

    def write(self, ranges, message, given_up):
        ranges.sizes[:] += 1
        super().write(ranges, message, given_up)


def wired(wire, memories):
    return WiredTransport("loopback", memories, wire, PATIENT)


class ReportsTwice:
    def __init__(self, memories):
        self._inner = open_loopback(memories)

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def poll(self):
        found = self._inner.poll()
        return [*found, *(event for event in found if isinstance(event, Done))]


class FailsAfterTheFence(ReportsTwice):
    def poll(self):
        found = list(self._inner.poll())
        return [e for e in found if not isinstance(e, Failed)] + [
            e for e in found if isinstance(e, Failed)
        ]


class ClosesAtOnce(LoopbackTransport):
    """Memory is given back while writes to it are under way."""

    def close(self):
        threading.Timer(0.03, super().close).start()


BUGS = {
    "a fence that does not wait": (
        partial(wired, FenceThatDoesNotWait), ["test_who_disconnects_is_written_to_no_more"]),
    "a notification before its bytes": (
        partial(wired, CopiesLate),
        ["test_a_notification_comes_after_its_bytes_and_all_before_them",
            "test_done_is_reported_once_and_then_the_bytes_are_there_and_the_source_is_free"]),
    "a source that is read after the end": (
        partial(wired, ReadsOn), ["test_who_disconnects_is_read_no_more"]),
    "bytes beside a range": (
        partial(wired, WritesAll),
        ["test_every_byte_arrives_where_it_belongs_and_no_other_changes"]),
    "a completion twice": (
        ReportsTwice,
        ["test_done_is_reported_once_and_then_the_bytes_are_there_and_the_source_is_free"]),
    "a failure after the fence": (
        FailsAfterTheFence, ["test_who_disconnects_is_written_to_no_more"]),
    "memory given back under a write": (
        ClosesAtOnce, ["test_close_is_a_fence_for_all_and_twice_is_once"]),
}  # fmt: skip


def run(name, open_transport):
    """One test of the suite over ``open_transport``."""
    test = getattr(TransportConformance(), name)
    wanted = inspect.signature(test).parameters
    with ExitStack() as closing:

        def sides(*sizes):
            side = TransportSide.of(open_transport, *sizes)
            closing.callback(side.transport.close)
            return side

        given = {"sides": sides, "subject": TransportSubject(open=open_transport, elsewhere=False)}
        if "pair" in wanted:
            given["pair"] = sides(*REGION_BYTES), sides(*REGION_BYTES)
            meet(given["pair"][0], A, given["pair"][1], B)
        if "writer" in wanted:
            given["writer"] = False
        test(**{name: given[name] for name in wanted})


def fails(name, open_transport):
    try:
        run(name, open_transport)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("bug", BUGS)
def test_a_broken_promise_is_seen(bug):
    """Races are lost now and then, on a busy machine."""
    open_transport, tests = BUGS[bug]
    for name in tests:
        assert any(fails(name, open_transport) for _ in range(20)), name
