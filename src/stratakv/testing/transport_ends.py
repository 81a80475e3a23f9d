"""Fences, lost peers and those that come back. Owns the half of the suite that is about the ends of
links; ``transport_conformance`` has the other, and is what to subclass.
"""

from collections.abc import Callable

import pytest

from stratakv.disagg.transport import Disconnected, Done, Lost
from stratakv.testing.transport_sides import GUARD, Child, TransportSide, meet, until, writes_of
from stratakv.testing.transport_suite import (
    MANY_BYTES,
    NOTHING,
    A,
    B,
    C,
    Sides,
    TransportSubject,
    TransportSuite,
    post_many,
)


class TransportEnds(TransportSuite):
    def test_who_disconnects_is_written_to_no_more(self, sides: Sides) -> None:
        one, two = sides(MANY_BYTES), sides(MANY_BYTES)
        one.memories[0][:] = 1
        meet(one, A, two, B)
        transfers = post_many(one, B)
        until(lambda: two.memories[0][0] == 1, "the first byte", two, one)
        two.transport.disconnect(A)
        until(lambda: two.is_gone(A), "the fence", one)
        two.memories[0][:] = 7
        until(lambda: one.is_gone(B), "the end of the other side")
        assert (two.memories[0] == 7).all(), "written to after the fence"
        one.verify_ends(transfers, B)
        assert one.has_lost(B), "it was not notified"
        assert not two.has_lost(A)
        assert two.events[-1] == Disconnected(A)

    def test_who_disconnects_is_read_no_more(self, sides: Sides) -> None:
        one, two = sides(MANY_BYTES), sides(MANY_BYTES)
        one.memories[0][:] = 1
        meet(one, A, two, B)
        transfers = post_many(one, B)
        until(lambda: two.memories[0][0] == 1, "the first byte", two, one)
        one.transport.disconnect(B)
        until(lambda: one.is_gone(B), "the fence", two)
        one.memories[0][:] = 9
        one.verify_ends(transfers, B)
        until(lambda: two.is_gone(A), "the end of the other side")
        assert not (two.memories[0] == 9).any(), "read after the fence"
        assert two.has_lost(A)

    def test_a_peer_comes_back_under_its_name_and_nothing_of_before_comes_too(
        self, sides: Sides
    ) -> None:
        one, two = sides(MANY_BYTES), sides(MANY_BYTES)
        for turn in range(3):
            del one.events[:], two.events[:]
            meet(one, A, two, B)
            word = b"turn %d" % turn
            last = one.transport.post(B, writes_of((0, 0, 0, 0, 100)), word)
            until(lambda: one.is_done(last), "the end of a transfer", two)  # noqa: B023
            until(lambda: two.notes(A), "a notification", two, one)
            post_many(one, B)
            (one if turn % 2 else two).transport.disconnect(B if turn % 2 else A)
            until(lambda: one.is_gone(B) and two.is_gone(A), "the end of both sides")
            assert two.notes(A)[0] == word
            assert not one.transport.poll()

    def test_the_end_of_one_peer_is_not_the_end_of_another(self, sides: Sides) -> None:
        one, two, three = sides(MANY_BYTES), sides(MANY_BYTES), sides(MANY_BYTES)
        one.memories[0][:] = 1
        meet(one, A, two, B)
        meet(one, A, three, C)
        to_two, to_three = post_many(one, B), post_many(one, C)
        two.transport.disconnect(A)
        until(lambda: two.is_gone(A) and one.is_gone(B), "the end of one peer", three)
        until(lambda: one.is_done(*to_three), "the end of the other's transfers", three)
        assert (three.memories[0] == 1).all()
        one.verify_ends(to_two, B)
        assert not one.has_lost(C)
        assert not three.events_of(Lost)

    def test_a_peer_that_never_connects_is_ended_and_was_not_written_to(self, sides: Sides) -> None:
        one, two = sides(100), sides(100)
        answer = two.transport.describe(A)
        one.transport.describe(B)
        one.transport.connect(B, answer)
        transfer = one.transport.post(B, writes_of((0, 0, 0, 0, 100)))
        two.transport.disconnect(A)
        until(lambda: two.is_gone(A), "the fence", one)
        one.transport.disconnect(B)
        until(lambda: one.is_gone(B), "the end of the other side", two)
        one.verify_ends([transfer], B)
        assert not one.events_of(Done)
        assert (two.memories[0] == GUARD).all()

    @pytest.mark.parametrize("writer", [True, False])
    def test_close_is_a_fence_for_all_and_twice_is_once(
        self,
        subject: TransportSubject,
        sides: Sides,
        writer: bool,  # noqa: FBT001 - a parameter of the test
    ) -> None:
        closed, other = TransportSide.of(subject.open, MANY_BYTES), sides(MANY_BYTES)
        source, target = (closed, other) if writer else (other, closed)
        source.memories[0][:] = 1
        meet(source, A, target, B)
        post_many(source, B)
        until(lambda: target.memories[0][0] == 1, "the first byte", target, source)
        closed.transport.close()
        closed.transport.close()
        closed.memories[0][:] = 9
        name = A if writer else B
        until(lambda: other.is_gone(name), "the end of the other side")
        if writer:
            assert not (other.memories[0] == 9).any(), "read after close"
        else:
            assert (closed.memories[0] == 9).all(), "written to after close"

    def test_to_disconnect_who_is_gone_is_nothing(
        self, pair: tuple[TransportSide, TransportSide]
    ) -> None:
        one, two = pair
        for _ in range(3):
            one.transport.disconnect(B)
        until(lambda: one.is_gone(B) and two.is_gone(A), "the end of both sides")
        one.transport.disconnect(B)
        assert not one.transport.poll()

    def test_a_process_that_is_disconnected_writes_no_more(
        self, sides: Sides, child: Callable[..., Child]
    ) -> None:
        """What its own process copies, we cannot stop: the fence has to wait for it."""
        one, two = sides(MANY_BYTES), child(MANY_BYTES)
        meet(one, A, two, B)
        two.fill(0, 2)
        post_many(two, A)
        until(lambda: one.memories[0][0] == 2, "the first byte", one)
        one.transport.disconnect(B)
        until(lambda: one.is_gone(B), "the fence")
        one.memories[0][:] = 7
        until(lambda: Disconnected(A) in two.events, "the end of the other side", two)
        assert (one.memories[0] == 7).all(), "written to after the fence"

    def test_a_process_that_is_killed_is_lost_and_another_joins(
        self, sides: Sides, child: Callable[..., Child]
    ) -> None:
        one, two, three = sides(MANY_BYTES), child(MANY_BYTES), child(MANY_BYTES)
        meet(one, A, two, B)
        meet(one, A, three, C)
        one.memories[0][:] = 1
        transfers = post_many(one, B)
        two.kill()
        until(lambda: one.is_gone(B), "the end of its link")
        assert one.has_lost(B)
        one.verify_ends(transfers, B)
        del one.events[:]
        again = child(MANY_BYTES)
        meet(one, A, again, B)
        one.memories[0][:] = 5
        for peer, side in ((B, again), (C, three)):
            last = one.transport.post(peer, writes_of((0, 0, 0, 0, MANY_BYTES)), b"again")
            until(lambda: one.is_done(last), "the end of a transfer")  # noqa: B023
            assert (side.bytes_of(0) == 5).all()
        again.fill(0, 2)
        post_many(again, A)
        until(lambda: one.memories[0][0] == 2, "the first byte", one)
        again.kill()
        until(lambda: one.is_gone(B), "the end of its link")
        assert one.has_lost(B)
        assert not one.has_lost(C)

    def test_a_process_that_hangs_is_lost_and_others_go_on(
        self, subject: TransportSubject, child: Callable[..., Child]
    ) -> None:
        if subject.impatient is None:
            pytest.skip("both sides are in one process")
        one, two, three = TransportSide.of(subject.impatient, MANY_BYTES), child(MANY_BYTES), None
        try:
            meet(one, A, two, B)
            one.memories[0][:] = 1
            first = one.transport.post(B, NOTHING)
            until(lambda: one.is_done(first), "the first transfer")
            two.freeze()
            transfers = post_many(one, B)
            until(lambda: one.has_lost(B), "the loss of a peer that hangs")
            three = child(MANY_BYTES)
            meet(one, A, three, C)
            last = one.transport.post(C, writes_of((0, 0, 0, 0, MANY_BYTES)))
            until(lambda: one.is_done(last), "a transfer to another peer")
            if subject.copies:
                assert not one.is_gone(B), "it may go on, and write"
                two.kill()
            until(lambda: one.is_gone(B), "the fence")
            one.verify_ends(transfers, B)
            assert (three.bytes_of(0) == 1).all()
        finally:
            one.transport.close()
