"""NIXL passes the suite, over TCP and over shared memory."""

from functools import partial

import pytest

from stratakv.disagg.link import LinkOptions
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.transport_conformance import TransportConformance
from stratakv.testing.transport_sides import Child, TransportSide, meet, until, writes_of
from stratakv.testing.transport_suite import A, B, TransportSubject, TransportSuite
from tests.fixtures.transports import IMPATIENT, nixl_is_here, open_nixl

SHARED = "sm,tcp,self"
BIG_BYTES = 160 << 20
ONE_SLICE = LinkOptions(beat_s=0.05, lost_after_s=PATIENCE_S, slice_bytes=BIG_BYTES)


def subject_of(transports):
    return TransportSubject(
        open=partial(open_nixl, transports),
        elsewhere=True,
        copies=transports == SHARED,
        impatient=partial(open_nixl, transports, link=IMPATIENT),
    )


@pytest.fixture(scope="module", autouse=True)
def _nixl():
    nixl_is_here()


class TestNixlTcp(TransportConformance):
    test_a_process_that_hangs_is_lost_and_others_go_on = None  # below

    @pytest.fixture
    def subject(self):
        return subject_of("tcp")


class TestNixlSharedMemory(TransportSuite):
    test_bytes = TransportConformance.test_every_byte_arrives_where_it_belongs_and_no_other_changes
    test_written = TransportConformance.test_who_disconnects_is_written_to_no_more
    test_killed = TransportConformance.test_a_process_that_is_killed_is_lost_and_another_joins

    @pytest.fixture
    def subject(self):
        return subject_of(SHARED)


@pytest.mark.long
class TestNixlTcpHangs(TransportSuite):
    test_hangs = TransportConformance.test_a_process_that_hangs_is_lost_and_others_go_on

    @pytest.fixture
    def subject(self):
        return subject_of("tcp")


@pytest.mark.long
class TestNixlSharedMemoryWhole(TransportConformance):
    """But for a peer that leaves before it has connected: of that UCX aborts us, now and then."""

    test_a_peer_that_never_connects_is_ended_and_was_not_written_to = None

    @pytest.fixture
    def subject(self):
        return subject_of(SHARED)


def written_after_the_fence():
    """Whether a process still writes here by shared memory, after we have disconnected it in the
    middle of a slice."""
    opened = partial(open_nixl, SHARED, link=ONE_SLICE)
    one, two = TransportSide.of(opened, BIG_BYTES), Child(opened, BIG_BYTES)
    try:
        meet(one, A, two, B)
        two.fill(0, 2)
        two.transport.post(A, writes_of((0, 0, 0, 0, BIG_BYTES)))
        until(lambda: one.memories[0][0] == 2, "the first byte", one)
        one.transport.disconnect(B)
        until(lambda: one.is_gone(B), "the fence")
        one.memories[0][:] = 7
        two.poll()
        until(lambda: two.events, "what becomes of the write", two)
        return not (one.memories[0] == 7).all()
    finally:
        two.end()
        one.transport.close()


def test_over_tcp_nobody_is_asked_whether_a_peer_has_let_go(monkeypatch):
    """A process that is stopped never does: the end of our agent is the fence."""
    monkeypatch.setattr("stratakv.disagg.nixl.watched", lambda place: lambda: True)
    opened = partial(open_nixl, "tcp")
    one, two = TransportSide.of(opened, 100), TransportSide.of(opened, 100)
    meet(one, A, two, B)
    last = one.transport.post(B, writes_of((0, 0, 0, 0, 100)))
    until(lambda: one.is_done(last), "a transfer", two)
    one.transport.disconnect(B)
    until(lambda: one.is_gone(B), "the fence", two)
    until(lambda: two.is_gone(A), "the end of the other side")
    one.transport.close()
    two.transport.close()


def test_of_shared_memory_the_fence_is_the_writers_own():
    """To delete our agent does not stop it, so we wait for its token."""
    assert not written_after_the_fence()


@pytest.mark.long
def test_without_the_token_it_would_not_be_one(monkeypatch):
    monkeypatch.setattr("stratakv.disagg.nixl.watched", lambda place: lambda: False)
    assert any(written_after_the_fence() for _ in range(20))
