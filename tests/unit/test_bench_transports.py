"""The measurement of a transport by itself moves what it says."""

import pytest

from stratakv.bench.transports import RawTransport, TransportCase
from stratakv.disagg.nixl import NixlOptions, NixlTransport
from tests.fixtures.transports import nixl_is_here, open_loopback

CASE = TransportCase(pages=64, page_bytes=4096, pages_at_once=10)


def open_nixl(memories):
    nixl_is_here()
    return NixlTransport(memories, NixlOptions(transports="tcp"))


@pytest.mark.parametrize("open_one", [open_loopback, open_nixl])
def test_every_byte_is_moved_in_a_round(open_one):
    seen = []

    def opened(memories):
        seen.extend(memories)
        return open_one(memories)

    with RawTransport.opened(opened, CASE) as raw:
        raw.round()
        assert [int((memory == 1).sum()) for memory in seen] == [64 * 4096] * 2
