"""What admitted requests may still take, against plain sums, over every short course of events."""

from itertools import product

import numpy as np
import pytest

from stratakv.cache.sequence_states import SequenceState, SequenceStates
from stratakv.core.ids import GroupId
from stratakv.core.page_keys import PageHasher
from stratakv.memory.block_table import BlockTable
from stratakv.policy.admission import Demand
from stratakv.spec.retention import KeepWindow
from stratakv.testing.specs import small_spec
from stratakv.tree.lease import DeviceLease, HostHold
from tests.small_cache import NAMESPACE

SPEC = small_spec([KeepWindow(2)], page_tokens=2)
ANCHOR, WINDOW = GroupId(0), GroupId(1)
TOTALS = (10, 6)


def demand_of(growth: tuple[int, int], peak: tuple[int, int]) -> Demand:
    """Of one that may be retracted, and needs little more."""
    none = (0, 0)
    return Demand(growth=growth, peak=peak, fixed=none, rest=none)


def sequence(growth: tuple[int, int], peak: tuple[int, int] = (4, 3)) -> SequenceState:
    lease = DeviceLease(0, [0, 0], np.empty(0, np.intp))
    return SequenceState(PageHasher(NAMESPACE, 2), lease, demand_of(growth, peak), 0, 0, [], [], 1)


def states() -> tuple[SequenceStates, BlockTable]:
    tables = BlockTable(2, 3, 8)
    return SequenceStates(SPEC, tables, TOTALS), tables


def open_row(sequences: SequenceStates, tables: BlockTable, of: SequenceState) -> int:
    row = tables.open_row()
    assert row is not None
    sequences.open(row, of)
    return row


def room(sequences: SequenceStates) -> tuple[int, int]:
    """The most that one more request may book: growth where all is kept, a peak elsewhere."""
    fits = sequences.budget.fits
    grows = [n for n in range(11) if fits(demand_of(growth=(n, 0), peak=(0, 0)), TOTALS)]
    peaks = [n for n in range(7) if fits(demand_of(growth=(0, 0), peak=(0, n)), TOTALS)]
    return grows[-1], peaks[-1]


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("second", range(4))
def test_what_is_booked_is_taken_once_and_comes_back_whoever_ends_first(first: int, second: int):
    for taken, order in product(range(5), ((0, 1), (1, 0))):
        sequences, tables = states()
        rows = [open_row(sequences, tables, sequence((n, 0))) for n in (first, second)]
        assert room(sequences) == (10 - first - second, 0)
        sequences.grow(np.array(rows[:1]), ANCHOR, np.array([taken]))
        left = [max(0, first - taken), second]  # what goes beyond was never booked
        assert room(sequences)[0] == 10 - sum(left)
        for at in order:
            sequences.close(rows[at])
            left[at] = 0
            assert room(sequences)[0] == 10 - sum(left)
        assert room(sequences) == TOTALS
        assert not list(sequences.items())
        assert tables.taken == 0


def test_several_rows_grow_at_once_each_by_its_own():
    sequences, tables = states()
    rows = [open_row(sequences, tables, sequence((n, 0))) for n in (1, 2, 3)]
    sequences.grow(np.array(rows), ANCHOR, np.array([3, 1, 0]))
    booked = dict(sequences.columns())["booked of group 0"]
    assert booked[rows].tolist() == [0, 1, 3]


def test_a_peak_that_is_lowered_makes_room_and_ends_as_it_is():
    sequences, tables = states()
    row = open_row(sequences, tables, sequence((0, 0), peak=(4, 5)))
    assert room(sequences)[1] == 1
    sequences.decodes(row, (4, 2))
    assert room(sequences)[1] == 4
    assert sequences[row].demand.peak == (4, 2)
    with pytest.raises(AssertionError, match="does not grow"):
        sequences.decodes(row, (4, 3))
    sequences.close(row)
    assert room(sequences)[1] == 6


def test_a_lease_or_a_row_that_nobody_has_is_noticed():
    sequences, tables = states()
    held = sequence((0, 0))
    row = open_row(sequences, tables, held)
    hold = HostHold(0, [0, 0], np.empty(0, np.intp), [])
    sequences.check([held.lease, hold])  # who counts on the host alone has no row
    for leases in ([], [held.lease, sequence((0, 0)).lease]):
        with pytest.raises(AssertionError, match="a lease leaks"):
            sequences.check(leases)
    assert tables.open_row() is not None
    with pytest.raises(AssertionError, match="a row is nobody's"):
        sequences.check([held.lease])
    assert row in sequences
