"""Mooncake's TransferEngine passes the suite, over TCP.

To end an engine takes a second, so here are the tests that could fail for its own reasons; the rest
is ``long``.
"""

import sys
from functools import partial

import pytest

from stratakv.testing.transport_conformance import TransportConformance
from stratakv.testing.transport_suite import TransportSubject, TransportSuite
from tests.fixtures.transports import IMPATIENT, mooncake_is_here, open_mooncake

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 14) or sys.platform != "linux",
    reason="the wheel is for Linux and Python 3.11 to 3.13",
)


@pytest.fixture(scope="module", autouse=True)
def _mooncake():
    mooncake_is_here()


@pytest.fixture
def subject():
    return TransportSubject(
        open=open_mooncake, elsewhere=True, impatient=partial(open_mooncake, link=IMPATIENT)
    )


class TestMooncake(TransportSuite):
    test_bytes = TransportConformance.test_every_byte_arrives_where_it_belongs_and_no_other_changes
    test_written = TransportConformance.test_who_disconnects_is_written_to_no_more
    test_killed = TransportConformance.test_a_process_that_is_killed_is_lost_and_another_joins


@pytest.mark.long
class TestMooncakeWhole(TransportConformance):
    pass
