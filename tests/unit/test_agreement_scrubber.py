"""A scrubber sees every byte once a round, and names what it has seen."""

import numpy as np
import pytest

from stratakv.agreement.scrubber import PIECE_BYTES, ScrubbedTable, Scrubber


def tables():
    return [
        ScrubbedTable("ranks", np.arange(5000, dtype=np.int64)),
        ScrubbedTable("rows", np.zeros((30, 700), np.int32)),
        ScrubbedTable("none", np.empty(0, np.int32)),
        ScrubbedTable("marks", np.zeros(3, np.bool_)),
    ]


def sums(scrubber):
    return [tuple(scrubber.figures().values()) for _ in range(len(scrubber))]


def test_a_round_takes_as_many_ballots_as_there_are_pieces():
    assert len(Scrubber(tables())) == 3 + 6 + 1


def test_a_piece_has_16_kib():
    scrubber = Scrubber([ScrubbedTable("bytes", np.zeros(40_000, np.uint8))])
    lengths = []
    for _ in range(3):
        scrubber.figures()
        lengths.append(len(scrubber.description()))
    assert lengths == [16384, 16384, 40_000 - 2 * 16384]


@pytest.mark.parametrize("table", [0, 1, 3])
def test_every_cell_shows_within_a_round(table):
    ours, theirs = tables(), tables()
    here, there = Scrubber(ours), Scrubber(theirs)
    cells = theirs[table].cells
    random = np.random.default_rng(0)
    for _ in range(20):
        assert sums(here) == sums(there)
        at = tuple(random.integers(size) for size in cells.shape)
        before = cells[at]
        cells[at] = 1 - before
        assert sum(a != b for a, b in zip(sums(here), sums(there), strict=True)) == 1
        cells[at] = before


def test_the_piece_that_differs_is_reported_by_name_and_place():
    ours = tables()
    ours[1].cells[20, 3] = 9
    scrubber = Scrubber(ours)
    per_piece = PIECE_BYTES // 4
    for _ in range(3 + (20 * 700 + 3) // per_piece + 1):
        scrubber.figures()
    assert "rows[20, 3] 9" in scrubber.description()
    assert len(scrubber.description()) == per_piece


def test_a_cell_that_is_larger_than_a_piece_is_a_piece_of_its_own():
    assert len(Scrubber([ScrubbedTable("large", np.zeros(3, f"V{PIECE_BYTES + 1}"))])) == 3
