"""Ranges of memory, copied in C and in plain Python."""

import numpy as np
import pytest

from stratakv.transfer.range_copy import copy_ranges, move_ranges


@pytest.mark.parametrize("copy", [copy_ranges, move_ranges])
@pytest.mark.parametrize("seed", range(5))
def test_each_range_and_nothing_else_is_written(copy, seed):
    random = np.random.default_rng(seed)
    source = random.integers(0, 256, 40_000, np.uint8)
    targets = [np.full(30_000, 7, np.uint8) for _ in range(3)]
    expected, columns = [target.copy() for target in targets], []
    for at, target in enumerate(targets):
        ends = np.sort(random.choice(len(target), 20, replace=False)).reshape(-1, 2)
        for begin, end in ends.tolist():
            place = random.integers(0, len(source) - (end - begin)).item()
            expected[at][begin:end] = source[place : place + end - begin]
            columns.append((source.ctypes.data + place, target.ctypes.data + begin, end - begin))
    random.shuffle(columns)
    copy(*np.array(columns, np.uint64).T)
    assert all((found == due).all() for found, due in zip(targets, expected, strict=True))


@pytest.mark.parametrize("copy", [copy_ranges, move_ranges])
def test_no_range_is_nothing_to_do(copy):
    copy(*np.empty((3, 0), np.uint64))
