"""The measurement of a transport by itself moves what it says, and counts it."""

from stratakv.bench.transports import RawThroughput, TransportCase, elsewhere, here, raw_throughput
from stratakv.disagg.nixl import NixlOptions, NixlTransport
from tests.fixtures.transports import nixl_is_here, open_loopback

CASE = TransportCase(pages=64, page_bytes=4096, pages_at_once=10, rounds=2)


def open_nixl(memories):
    return NixlTransport(memories, NixlOptions(transports="tcp"))


def test_every_byte_is_moved_in_each_round():
    seen = []

    def opened(memories):
        seen.extend(memories)
        return open_loopback(memories)

    found = raw_throughput(opened, CASE, here)
    assert len(found.seconds) == 2
    assert found.size_bytes == 64 * 4096
    assert all((memory == 1).all() for memory in seen)


def test_a_process_of_its_own_takes_them_too():
    nixl_is_here()
    found = raw_throughput(open_nixl, CASE, elsewhere)
    assert found.gb_s > 0


def test_throughput_is_of_the_median_round():
    assert RawThroughput(3_000_000_000, (1.0, 2.0, 9.0)).gb_s == 1.5
