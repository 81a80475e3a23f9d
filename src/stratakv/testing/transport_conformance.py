"""The suite that every transport must pass; subclass it beside your transport. Owns the contract of
``disagg.transport``, as tests; those of ends and fences are in ``transport_ends``.

    class TestMyTransport(TransportConformance):
        @pytest.fixture
        def subject(self):
            return TransportSubject(open=open_mine, elsewhere=True)

Needs the ``testing`` extra (pytest).
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from threading import Thread

import numpy as np
import pytest

from stratakv.core.errors import TransportError
from stratakv.disagg.transport import NOTIFICATION_BYTES, TransferId, Writes
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.transport_ends import TransportEnds
from stratakv.testing.transport_sides import GUARD, Child, TransportSide, meet, until, writes_of
from stratakv.testing.transport_suite import (
    MANY_BYTES,
    NOTHING,
    REGION_BYTES,
    A,
    B,
    Sides,
    scramble,
)


def scattered(seed: int) -> Writes:
    """Ranges of all sizes between two regions of each side, in any order, that do not overlap at
    the peer."""
    rng = np.random.default_rng(seed)
    ranges: list[tuple[int, int, int, int, int]] = []
    for peer_region, size in enumerate(REGION_BYTES):
        cuts = np.unique(rng.integers(0, size, 41)).tolist()
        for start, stop in pairwise(cuts):
            count = int(rng.integers(0, stop - start + 1))
            region = int(rng.integers(2))
            count = min(count, REGION_BYTES[region])
            offset = int(rng.integers(0, REGION_BYTES[region] - count + 1))
            ranges.append((region, offset, peer_region, start, count))
    rng.shuffle(ranges)
    return writes_of(*ranges)


def expected(writes: Writes, source: TransportSide, before: Sequence[bytes]) -> list[bytes]:
    """What the peer's regions hold after ``writes``, if they held ``before``."""
    regions = [bytearray(each) for each in before]
    columns = (writes.regions, writes.offsets, writes.peer_regions, writes.peer_offsets)
    for region, offset, peer_region, peer_offset, size in zip(
        *(each.tolist() for each in (*columns, writes.sizes)), strict=True
    ):
        part = source.memories[region][offset : offset + size].tobytes()
        regions[peer_region][peer_offset : peer_offset + size] = part
    return [bytes(each) for each in regions]


def contents(side: TransportSide) -> list[bytes]:
    return [each.tobytes() for each in side.memories]


class TransportConformance(TransportEnds):
    """Subclass as ``Test...`` and give it a fixture ``subject``: a ``TransportSubject`` of
    ``transport_suite``."""

    def test_every_byte_arrives_where_it_belongs_and_no_other_changes(
        self, pair: tuple[TransportSide, TransportSide]
    ) -> None:
        one, two = pair
        for seed in range(6):
            scramble(one, seed)
            before, writes = contents(two), scattered(seed)
            transfer = one.transport.post(B, writes)
            until(lambda: one.is_done(transfer), "the end of a transfer", two)  # noqa: B023
            assert contents(two) == expected(writes, one, before)

    def test_a_notification_comes_after_its_bytes_and_all_before_them(self, sides: Sides) -> None:
        one, two = sides(MANY_BYTES), sides(MANY_BYTES)
        meet(one, A, two, B)
        for turn in range(1, 9):
            one.memories[0][:] = turn
            half = MANY_BYTES // 2
            one.transport.post(B, writes_of((0, half, 0, half, half)))
            last = one.transport.post(B, writes_of((0, 0, 0, 0, half)), b"%d" % turn)
            until(lambda: len(two.notes(A)) == turn, "a notification", two, one)  # noqa: B023
            assert (two.memories[0] == turn).all(), "a notification before its bytes"
            until(lambda: one.is_done(last), "the end of a transfer", two)  # noqa: B023
        assert two.notes(A) == [b"%d" % turn for turn in range(1, 9)]

    def test_done_is_reported_once_and_then_the_bytes_are_there_and_the_source_is_free(
        self, sides: Sides
    ) -> None:
        one, two = sides(MANY_BYTES), sides(MANY_BYTES)
        meet(one, A, two, B)
        whole = writes_of((0, 0, 0, 0, MANY_BYTES))
        transfers: list[TransferId] = []
        for turn in range(1, 5):
            one.memories[0][:] = turn
            transfers.append(one.transport.post(B, whole))
            until(lambda: one.is_done(*transfers), "the end of a transfer", two)
            one.memories[0][:] = 99
            assert (two.memories[0] == turn).all()
        assert len(set(transfers)) == len(transfers)
        one.transport.disconnect(B)
        until(lambda: one.is_gone(B), "the fence", two)
        one.verify_ends(transfers, B)

    def test_notifications_without_bytes_keep_their_order_and_their_content(
        self, pair: tuple[TransportSide, TransportSide]
    ) -> None:
        one, two = pair
        words = [b"", bytes(range(256)), b"x" * NOTIFICATION_BYTES, *(b"%d" % i for i in range(30))]
        transfers = [one.transport.post(B, NOTHING, word) for word in words]
        transfers.append(one.transport.post(B, NOTHING))
        until(lambda: one.is_done(*transfers), "the end of all", two)
        until(lambda: len(two.notes(A)) >= len(words), "all notifications", two, one)
        assert two.notes(A) == words

    def test_both_write_at_once(self, pair: tuple[TransportSide, TransportSide]) -> None:
        one, two = pair
        half = REGION_BYTES[1] // 2
        for side in pair:
            scramble(side, half)
        there, back = writes_of((1, 0, 1, 0, half)), writes_of((1, half, 1, half, half))
        ours = [one.transport.post(B, there, b"there") for _ in range(20)]
        theirs = [two.transport.post(A, back, b"back") for _ in range(20)]
        until(lambda: one.is_done(*ours) and two.is_done(*theirs), "the end of all")
        until(lambda: len(two.notes(A)) == len(one.notes(B)) == 20, "all notifications", one, two)
        assert (one.memories[1] == two.memories[1]).all()

    def test_many_threads_may_post(self, pair: tuple[TransportSide, TransportSide]) -> None:
        one, two = pair
        scramble(one, 1)
        step = REGION_BYTES[0] // 8
        posted: list[TransferId] = []

        def post(at: int) -> None:
            there = writes_of((0, at, 0, at, step))
            posted.extend(one.transport.post(B, there, b"%d" % at) for _ in range(5))

        threads = [Thread(target=post, args=(at * step,)) for at in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(set(posted)) == 40
        until(lambda: one.is_done(*posted), "the end of all", two)
        until(lambda: len(two.notes(A)) == 40, "all notifications", two, one)
        assert (one.memories[0] == two.memories[0]).all()

    def test_a_range_outside_of_a_region_writes_nothing(
        self, pair: tuple[TransportSide, TransportSide]
    ) -> None:
        """Beyond ours it is a bug; what is beyond the peer's, the peer has named."""
        one, two = pair
        size = REGION_BYTES[0]
        wrong: tuple[tuple[tuple[int, int, int, int, int], type[Exception]], ...] = (
            ((0, 0, 0, 1, size), TransportError),
            ((0, 0, 2, 0, 1), TransportError),
            ((0, 1, 0, 0, size), AssertionError),
            ((2, 0, 0, 0, 1), AssertionError),
            ((0, -1, 0, 0, 1), AssertionError),
            ((0, 0, 0, 0, -1), AssertionError),
            ((0, size + 1, 0, 0, 1), AssertionError),
        )
        for ranges, error in wrong:
            with pytest.raises(error):
                one.transport.post(B, writes_of((1, 0, 1, 0, 8), ranges), b"wrong")
        last = one.transport.post(B, NOTHING, b"right")
        until(lambda: one.is_done(last), "the end of a transfer", two)
        until(lambda: two.notes(A), "a notification", two, one)
        assert two.notes(A) == [b"right"]
        assert all((each == GUARD).all() for each in two.memories)

    def test_a_description_that_is_none_is_refused_and_the_right_one_taken(
        self, sides: Sides
    ) -> None:
        one, two = sides(100), sides(100)
        described, answer = one.transport.describe(B), two.transport.describe(A)
        for wrong in (b"", b"{}", b"\xff" * 40, b"[" * 10_000, answer[: len(answer) // 2]):
            with pytest.raises(TransportError):
                one.transport.connect(B, wrong)
        one.transport.connect(B, answer)
        two.transport.connect(A, described)
        last = one.transport.post(B, writes_of((0, 0, 0, 0, 100)), b"here")
        until(lambda: one.is_done(last), "the end of a transfer", two)
        until(lambda: two.notes(A), "a notification", two, one)

    def test_pages_cross_from_one_process_to_another_and_back(
        self, sides: Sides, child: Callable[..., Child]
    ) -> None:
        one, two = sides(MANY_BYTES), child(MANY_BYTES)
        meet(one, A, two, B)
        scramble(one, 5)
        sent, half = one.memories[0].copy(), MANY_BYTES // 2
        order = list(range(0, MANY_BYTES, 4096))
        Random(3).shuffle(order)
        ranges = [(0, at, 0, (at + half) % MANY_BYTES, 4096) for at in order]
        last = one.transport.post(B, writes_of(*ranges), b"here")
        until(lambda: one.is_done(last), "the end of a transfer")
        until(lambda: two.events, "a notification", two)
        assert (two.bytes_of(0) == np.roll(sent, half)).all()
        two.transport.post(A, writes_of((0, 0, 0, 0, half), (0, half, 0, half, half)), b"back")
        until(lambda: one.notes(B), "a notification", one)
        assert (one.memories[0] == np.roll(sent, half)).all()
