"""Work that is cut for threads is done once, all of it, and what fails in a part is raised."""

import numpy as np
import pytest
import torch

from stratakv.engine.in_c import PART_BYTES, cuts_of, parts_of, spread


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("weights", [[5], [1] * 12, [1, 1, 1000, 1], [9, 0, 0, 3]])
def test_every_unit_is_in_one_part(weights, parts):
    done = []
    spread(lambda first, last: done.extend(range(first, last)), cuts_of(np.array(weights), parts))
    assert sorted(done) == list(range(len(weights)))


def test_parts_are_about_as_heavy():
    assert cuts_of(np.array([4, 4, 4, 4, 8, 8]), 2) == [0, 3, 6]


def test_there_are_no_more_parts_than_threads_or_worth_one(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert [parts_of(size * PART_BYTES) for size in (0, 1, 3, 100)] == [1, 1, 3, 4]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_a_part_raises_is_raised_when_all_have_ended(place):
    ended = []

    def work(first, last):
        ended.append(first)
        if first == place:
            raise IndexError("outside")

    with pytest.raises(IndexError, match="outside"):
        spread(work, [0, 1, 2, 3])
    assert sorted(ended) == [0, 1, 2]
