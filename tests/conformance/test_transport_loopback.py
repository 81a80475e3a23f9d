"""The reference transport passes the suite, and does what the page on disaggregation shows."""

import pytest

from stratakv.testing.transport_conformance import TransportConformance
from stratakv.testing.transport_suite import TransportSubject
from tests.doc_blocks import python_of
from tests.fixtures.transports import open_loopback


class TestLoopback(TransportConformance):
    @pytest.fixture
    def subject(self):
        return TransportSubject(open=open_loopback, elsewhere=False)


def test_the_example_of_the_page_runs():
    (example,) = python_of("docs/disaggregation.md")
    exec(example, {})
