"""The measurement of a hand-off, and of the library under it, move what they say."""

import pytest

from stratakv.bench import disagg
from stratakv.bench.hand_offs import HandOffLoad, HandOffs
from stratakv.bench.transports import TRANSPORTS, TransportChoice, on_a_thread
from stratakv.core.errors import ConfigError, TransportError
from tests.fixtures.transports import mooncake_is_here, nixl_is_here

LOAD = HandOffLoad(spec=disagg.gpt_oss_spec(4), requests=2, prompt=512, under_way=1)


def nothing_is_needed():
    pass


NEEDS = {
    "loopback": nothing_is_needed,
    "nixl, TCP": nixl_is_here,
    "nixl, shared memory": nixl_is_here,
    "mooncake, TCP": mooncake_is_here,
}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_both_ways_bring_every_byte_of_their_requests_and_of_no_other(name):
    NEEDS[name]()
    with HandOffs.opened(name, LOAD) as hand_offs:
        # Two pages of either group: the window's second one is what the same prompt can hit.
        assert hand_offs.load.request_bytes == (2 + 2) * 2 * 2 * 8 * 64 * 2 * 256
        assert hand_offs.by_library(1) > 0
        here, there = hand_offs.sums(1)
        assert here == there
        here, there = hand_offs.sums(2)
        assert here != there, "the second request was not written yet"
        assert hand_offs.hand_over(2) > 0
        here, there = hand_offs.sums(2)
        assert here == there


def test_a_side_that_ends_early_is_an_error_of_the_transport(monkeypatch):
    def ends(pipe):
        del pipe

    loopback = TRANSPORTS["loopback"]
    choice = TransportChoice(loopback.open, loopback.wire, lambda _: on_a_thread(ends))
    monkeypatch.setitem(TRANSPORTS, "of nobody", choice)
    with (
        pytest.raises(TransportError, match="has ended"),
        HandOffs.opened("of nobody", LOAD),
    ):
        pass


def test_a_library_that_is_missing_is_refused_before_anything_is_started(monkeypatch):
    def missing():
        raise ConfigError("nowhere: its library cannot be imported")

    loopback = TRANSPORTS["loopback"]
    monkeypatch.setitem(TRANSPORTS, "nowhere", TransportChoice(loopback.open, missing, None))
    with pytest.raises(ConfigError, match="nowhere"), HandOffs.opened("nowhere", LOAD):
        pass
