"""Walks of a cache of requests beside books of its own, cut short, and what the engine's own tests
say of requests that change engines: what ``make mutants`` runs for ``cache/``.
"""

# ruff: noqa: F401 - pytest collects what is imported
import pytest

from tests.integration.test_hand_off import (
    test_a_decode_engine_admits_by_what_decoding_takes,
    test_a_page_of_one_token,
    test_an_abort_while_it_goes_back_leaves_nothing,
    test_what_decode_has_cached_is_not_sent_again,
    test_what_is_taken_and_sent_is_what_each_group_needs_at_the_end,
    test_what_the_host_cannot_save_goes_back_to_be_computed_with_all_its_output,
)
from tests.property.test_cache_machine import SPECS as MACHINES
from tests.property.test_cache_machine import walk


@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("spec", MACHINES.values(), ids=MACHINES)
def test_every_row_that_a_request_reads_is_its_own_tokens(spec, seed):
    walk(spec, seed, 40)
