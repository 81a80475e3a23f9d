"""The measurement of a transport's library by itself moves what it says."""

import numpy as np
import pytest

from stratakv.bench.transports import TRANSPORTS, BareWires, WriteCase
from stratakv.disagg.wire import Ranges
from tests.fixtures.transports import mooncake_is_here, nixl_is_here

PAGES, PAGE = 64, 4096


def nothing_is_needed():
    pass


NEEDS = {
    "loopback": nothing_is_needed,
    "nixl, TCP": nixl_is_here,
    "nixl, shared memory": nixl_is_here,
    "mooncake, TCP": mooncake_is_here,
}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_byte_is_moved_in_a_round(name):
    NEEDS[name]()
    here = np.arange(PAGES * PAGE, dtype=np.uint64).view(np.uint8)
    there = np.zeros_like(here)
    places = np.random.default_rng(1).permutation(8 * PAGES).astype(np.uint64) * np.uint64(PAGE)
    starts = np.arange(8 * PAGES, dtype=np.uint64) * np.uint64(PAGE)
    batches = [
        Ranges(
            starts[part] + np.uint64(here.ctypes.data),
            places[part] + np.uint64(there.ctypes.data),
            np.full(len(starts[part]), PAGE, np.uint64),
        )
        for part in (slice(0, 100), slice(100, None))
    ]
    case = WriteCase([here], [there], batches)
    assert case.size_bytes == len(here)
    with BareWires.opened(TRANSPORTS[name].wire(), case) as bare:
        bare.round()
    pages = there.reshape(-1, PAGE)[(places // np.uint64(PAGE)).astype(int)]
    assert (pages == here.reshape(-1, PAGE)).all()
