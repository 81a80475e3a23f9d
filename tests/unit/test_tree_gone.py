"""What is remembered of pages that have left."""

import numpy as np

from stratakv.core.clock import ManualClock
from stratakv.core.ids import PageKey
from stratakv.tree.gone import Gone

KEYS = [PageKey(bytes([n])) for n in range(40)]


def test_a_path_is_remembered_as_far_as_it_is_known_and_no_farther_than_asked():
    gone = Gone(10)
    gone.add(KEYS[2:4], from_host=True)
    gone.add_one(KEYS[4], from_host=False)
    assert gone.of(KEYS, 2, 40).tolist() == [True, True, False]
    assert gone.of(KEYS, 3, 4).tolist() == [True]
    assert gone.of(KEYS, 0, 2).tolist() == []
    assert gone.of(KEYS, 5, 4).tolist() == []
    assert gone.of(KEYS[:3], 2, 40).tolist() == [True]


def test_the_oldest_are_forgotten_children_first():
    gone = Gone(10)
    for key in reversed(KEYS):
        gone.add_one(key, from_host=True)
    assert 10 <= len(gone) < 20
    assert len(gone.of(KEYS, 0, 40)) == len(gone)


def test_where_its_last_copy_was_the_last_time():
    gone = Gone(3)
    gone.add(KEYS[:3], from_host=True)
    gone.add_one(KEYS[0], from_host=False)
    assert gone.of(KEYS, 0, 3).tolist() == [False, True, True]


def test_cleared_is_forgotten():
    gone = Gone(3)
    gone.add(KEYS[:4], from_host=True)
    gone.add_one(KEYS[4], from_host=True)
    gone.clear()
    assert len(gone) == 0
    assert gone.of(KEYS, 0, 5).tolist() == []


def test_a_full_half_is_turned_at_once():
    gone = Gone(2)
    gone.add(KEYS[:2], from_host=True)
    gone.add_one(KEYS[2], from_host=True)
    assert len(gone) == 3
    gone.add_one(KEYS[3], from_host=True)
    assert gone.of(KEYS, 2, 40).tolist() == [True, True]
    assert gone.of(KEYS[:2], 0, 2).tolist() == []
    assert len(gone) == 2


def test_of_a_tree_of_one_page_the_last_that_left_is_remembered():
    for capacity in (0, 1):
        gone = Gone(capacity)
        for key in KEYS[:3]:
            gone.add_one(key, from_host=True)
        assert len(gone) == len(gone.of(KEYS, 2, 3)) == 1


def test_how_pages_left_stays_beside_the_page_where_one_is_not_remembered():
    clock = ManualClock(7.5)
    gone = Gone(4, clock.now_s)
    gone.add([KEYS[1]], from_host=True)
    gone.add(KEYS[10:13], from_host=True)  # that half is full
    clock.advance(1.25)
    gone.add([KEYS[3], KEYS[2]], from_host=False)
    gone.add_one(KEYS[0], from_host=True)
    found = gone.departures(KEYS[:4], 0, 4)
    assert found.from_host.tolist() == [True, True, False, False]
    assert found.at_s.tolist() == [8.75, 7.5, 8.75, 8.75]
    gone.add([KEYS[20], KEYS[21]], from_host=True)
    gone.add_one(KEYS[0], from_host=True)
    found = gone.departures([KEYS[0], KEYS[1], KEYS[2], KEYS[3]], 0, 4)
    assert found.from_host.tolist() == [True, False, False, False]
    np.testing.assert_array_equal(found.at_s, [8.75, np.nan, 8.75, 8.75])
