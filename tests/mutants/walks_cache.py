"""Requests that come, leave and change engines, without a model: what ``make mutants`` runs of the
engine's own tests for ``cache/``.
"""

# ruff: noqa: F401 - pytest collects what is imported
from tests.integration.test_engine_retraction import *  # noqa: F403
from tests.integration.test_hand_off import (
    test_a_decode_engine_admits_by_what_decoding_takes,
    test_a_page_of_one_token,
    test_an_abort_while_it_goes_back_leaves_nothing,
    test_requests_come_and_go_while_pages_run_short,
    test_requests_go_back_and_forth_while_pages_run_short,
    test_what_decode_has_cached_is_not_sent_again,
    test_what_is_taken_and_sent_is_what_each_group_needs_at_the_end,
    test_what_receives_leaves_room_for_the_longest_that_decodes,
    test_what_the_host_cannot_save_goes_back_to_be_computed_with_all_that_it_has_said,
)
