"""Which pages of a file store leave first, over every small index."""

from itertools import product

import numpy as np

from stratakv.storage.file.eviction_order import (
    coldest_first,
    evicts_younger,
    older_group,
    oldest_of,
    unused_since,
)
from stratakv.storage.file.index import FOREIGN, Index

BEFORE = 4  # nothing used then or later may leave
SLOTS = 4
OWNERS = (FOREIGN, 0, 1)


def indices():
    """Every use and owner of a few slots; one of them is free."""
    for used in ((1, 2, 3, 5), (3, 1, 2, 2), (5, 4, 1, 3), (2, 2, 2, 2)):
        for writable in product(OWNERS, repeat=SLOTS):
            for free in (None, 1):
                index = Index()
                index.attach(0, SLOTS)
                index.used[:SLOTS] = used
                index.writable[:SLOTS] = writable
                index.present[:SLOTS] = [row != free for row in range(SLOTS)]
                yield index


def pages_of(index, group=None):
    """Rows that this process may take at all, oldest first."""
    mine = [
        row
        for row in range(SLOTS)
        if index.present[row] and index.writable[row] != FOREIGN
        and group in {None, index.writable[row]}
    ]  # fmt: skip
    return sorted(mine, key=lambda row: index.used[row])


def uses(index, rows):
    return sorted(index.used[row] for row in rows)


def test_the_oldest_leave_and_only_those_used_before():
    for index, need in product(indices(), (1, 2, 3)):
        old = [row for row in pages_of(index, 0) if index.used[row] < BEFORE]
        found = oldest_of(index, 0, need, BEFORE).tolist()
        assert set(found) <= set(old)
        assert uses(index, found) == uses(index, old[:need])


def test_of_a_segment_that_goes_the_coldest_leave_whenever_they_were_used():
    for index, count in product(indices(), (1, 2, 3)):
        found = coldest_first(index, 1, count).tolist()
        assert uses(index, found) == uses(index, pages_of(index, 1)[:count])


def test_an_orphan_is_taken_over_while_what_would_be_evicted_is_no_older():
    for index, need, than in product(indices(), (1, 2), range(1, 6)):
        old = [index.used[row] for row in pages_of(index) if index.used[row] < BEFORE]
        assert evicts_younger(index, need, BEFORE, than) == (
            len(old) < need or old[need - 1] >= than
        )


def test_another_group_gives_a_segment_where_all_that_it_holds_is_older():
    for index, worth in product(indices(), (1, 2, 3)):
        mine, other = (
            [index.used[row] for row in pages_of(index, group) if index.used[row] < BEFORE]
            for group in (0, 1)
        )
        newest = other[min(len(other), worth) - 1] if other else BEFORE
        gives = newest < (mine[0] if mine else BEFORE)
        assert older_group(index, 0, BEFORE, {0: 9, 1: worth}) == (1 if gives else None)


def test_what_expires_was_not_used_since_whoever_writes_it():
    for index in indices():
        found = np.flatnonzero(unused_since(index, 3))
        old = [row for row in range(SLOTS) if index.present[row] and index.used[row] < 3]
        assert found.tolist() == old
