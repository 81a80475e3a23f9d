"""The fake engine's pattern shows every way in which a page can be wrong."""

import numpy as np
import pytest
from hypothesis import given, settings

from stratakv.core.ids import GroupId, LayerId
from stratakv.testing.transfer_ends import (
    TransferEnds,
    cache_specs,
    hybrid_spec,
    page_keys_of,
    spread,
)

FULL, SWA = GroupId(0), GroupId(1)
EVERY = np.arange(4, dtype=np.int32)
KEYS = page_keys_of("pattern", 4)


@pytest.fixture
def ends():
    filled = TransferEnds.of(hybrid_spec(), pages=4)
    filled.fill_device([EVERY, EVERY], KEYS)
    filled.fill_host([EVERY, EVERY], KEYS)
    return filled


def test_what_was_written_is_verified(ends):
    ends.verify_device([EVERY, EVERY], KEYS)
    ends.verify_host([EVERY, EVERY], KEYS)


def corrupt_swapped_pages(raw):
    raw[:, [0, 1]] = raw[:, [1, 0]]


def corrupt_swapped_layers(raw):
    raw[[0, 1]] = raw[[1, 0]]


def corrupt_swapped_rows(raw):
    raw[1, 2, [0, 1]] = raw[1, 2, [1, 0]]


def corrupt_one_bit(raw):
    raw[1, 3, 3, -1] ^= 1


def corrupt_rotated_row(raw):
    raw[0, 0, 0] = np.roll(raw[0, 0, 0], 8)


@pytest.mark.parametrize(
    "corrupt",
    [
        corrupt_swapped_pages, corrupt_swapped_layers, corrupt_swapped_rows, corrupt_one_bit,
        corrupt_rotated_row,
    ],
)  # fmt: skip
def test_a_device_corruption_is_caught(ends, corrupt):
    corrupt(ends.pools.raw(SWA, "v"))
    with pytest.raises(AssertionError, match="group swa, buffer v"):
        ends.verify_device([EVERY, EVERY], KEYS)


def test_swapped_sidecars_are_caught(ends):
    keys, values = ends.pools.raw(FULL, "k"), ends.pools.raw(FULL, "v")
    kept = keys.copy()
    keys[:] = values
    values[:] = kept
    with pytest.raises(AssertionError, match="buffer k"):
        ends.verify_device([EVERY, EVERY], KEYS)


def test_another_groups_bytes_are_caught(ends):
    ends.pools.raw(SWA, "k")[:] = ends.pools.raw(FULL, "k")
    with pytest.raises(AssertionError, match="group swa"):
        ends.verify_device([EVERY, EVERY], KEYS)


def test_a_stale_prefix_is_caught(ends):
    newer = [*KEYS[:3], *page_keys_of("newer", 1)]
    with pytest.raises(AssertionError, match=r"device page 3 .* \(1 of 4"):
        ends.verify_device([EVERY, EVERY], newer)


def test_a_short_host_page_is_caught(ends):
    page_bytes = ends.arenas[FULL].layout.page_bytes
    ends.arenas[FULL].bytes[2, page_bytes - 1] = 0xFF
    with pytest.raises(AssertionError, match="buffer index_k, layer 2: host page 2"):
        ends.verify_host([EVERY, EVERY], KEYS)


def test_only_the_layers_asked_for_are_verified(ends):
    ends.pools.raw(SWA, "v")[1] = 0
    ends.verify_device([EVERY, EVERY], KEYS, [LayerId(0), LayerId(1), LayerId(2)])
    with pytest.raises(AssertionError, match="layer 3"):
        ends.verify_device([EVERY, EVERY], KEYS, [LayerId(3)])


@settings(max_examples=40, deadline=None)
@given(cache_specs())
def test_host_pages_are_what_an_arena_holds(spec):
    ends = TransferEnds.of(spec, pages=5)
    pages = spread(ends, 3, 1)
    ends.fill_host(pages, KEYS[:3])
    ends.verify_host(pages, KEYS[:3])
    for group in spec.groups:
        expected = ends.pattern.host_pages(group.id, KEYS[:3])
        assert expected.shape == (3, group.page_bytes)
