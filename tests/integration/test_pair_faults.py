"""Every rule of a hand-off, broken once: simulated pairs must see it, in a run of those that are
made each time."""

import pytest

from stratakv.testing.fleet.pair import run_pair
from tests import pair_faults

CASES = {
    pair_faults.rows_that_are_read_and_retracted: 42,
    pair_faults.rows_that_are_read_and_given_back: 42,
    pair_faults.rows_that_are_written_and_given_back: 21,
    pair_faults.pages_that_are_free_once_they_are_given_up: 21,
    pair_faults.an_arrival_of_another_generation: 4,
    pair_faults.a_page_that_counts_as_sent: 0,
    pair_faults.an_end_before_all_writes_have_ended: 0,
    pair_faults.a_part_that_is_sent_while_it_is_read: 42,
}
"""Seeds, each the first that sees it; after a change of what is drawn look for it from 0 on."""


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("fault", CASES, ids=lambda fault: fault.__name__)
def test_a_seeded_fault_is_seen_and_nothing_is_without_it(fault):
    run_pair(CASES[fault])
    with fault(), pytest.raises((AssertionError, KeyError)):
        run_pair(CASES[fault])
