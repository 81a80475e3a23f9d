"""The transport of simulated pairs passes the suite, at any pace."""

from random import Random

import pytest

from stratakv.testing.fleet.network import NetworkPace, SimNetwork
from stratakv.testing.transport_conformance import TransportConformance
from stratakv.testing.transport_suite import TransportSubject

PACES = {
    "usual": NetworkPace(),
    "eager": NetworkPace(moves=1.0, ranges=64, delivers=0.95, fence_looks=0),
    "slow": NetworkPace(moves=0.3, ranges=2, delivers=0.3, fence_looks=20),
}


class TestSimulated(TransportConformance):
    @pytest.fixture(params=PACES.values(), ids=PACES)
    def subject(self, request):
        return TransportSubject(open=SimNetwork(Random(1), request.param).open, elsewhere=False)
