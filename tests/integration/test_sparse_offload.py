"""Requests whose selected rows are on the host say what they would say with all on the device.

Pages of both tiers that nobody owns are NaN, and ``drain`` checks that every page has one owner. An
engine of the same model without offload, whose device holds everything, says what is right.
"""

import pytest

from stratakv.core.errors import RequestError
from tests.engines import (
    greedy,
)
from tests.fixtures.deepseek_v32 import random_tokens
from tests.offloading import (
    ANSWER,
    CASES,
    PROMPTS,
    SMALL,
    CountedRows,
    answers,
    levels,
    rows_of,
    spilled,
)
from tests.offloading_cases import (
    a_full_host,
    prefix_from_a_store,
    prefix_from_the_host,
    retracted_again_and_again,
    two_of_four_aborted,
)

PAGE, BUFFERS = SMALL.plain["page_tokens"], (24, 32, 56)


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("name", ["small", "glm"])
def test_answers_are_those_without_offload_whatever_the_buffer(name, buffer):
    some = rows_of(PROMPTS[:6])
    with CASES[name].engine(buffer) as parts:
        assert answers(some, parts) == CASES[name].right(*some)
        again = answers(some, parts, first=100)
        assert again == CASES[name].right(*some), "from cached pages"
        assert CountedRows.pages_read
        if buffer < 56:  # a larger one makes room for some that are resident
            assert CountedRows.rows


def test_a_buffer_may_be_nearly_as_long_as_the_context():
    some = rows_of([random_tokens(3, 310)])
    settings = {"max_model_len": 340, "chunk_tokens": 8}
    with SMALL.engine(280, selected=38, **settings) as parts:
        assert answers(some, parts) == SMALL.right(*some, longest=340)
        assert CountedRows.rows


def test_nothing_is_read_on_the_host_while_there_is_room():
    some = rows_of(PROMPTS[:6])
    with SMALL.engine(32, selected=200) as parts:
        assert answers(some, parts) == SMALL.right(*some)
        assert not CountedRows.rows + CountedRows.pages_read + spilled(parts)


def test_who_runs_on_the_device_alone_is_spilled_for_those_who_wait():
    some = rows_of(random_tokens(seed, 120) for seed in range(4))
    with SMALL.engine(24, selected=24) as parts:
        assert answers(some, parts) == SMALL.right(*some)
        assert spilled(parts)
        assert CountedRows.rows


@pytest.mark.parametrize("selected", [None, 60])
def test_a_prefix_comes_from_the_host_spilled_or_not(selected):
    prefix_from_the_host(SMALL, 24, PROMPTS[0], selected)


@pytest.mark.parametrize("selected", [None, 60])
def test_a_prefix_comes_from_a_store_after_a_restart_spilled_or_not(selected):
    prefix_from_a_store(SMALL, 24, PROMPTS[0], selected)


@pytest.mark.parametrize("after", range(1, 16, 2))
def test_a_retracted_request_answers_as_without_a_retraction(after):
    retracted_again_and_again(SMALL, 24, rows_of(PROMPTS[:3]), after)


@pytest.mark.parametrize("after", range(14))
def test_an_abort_in_any_phase_leaves_nothing_behind(after):
    two_of_four_aborted(SMALL, 24, rows_of(PROMPTS[:4]), after)


@pytest.mark.parametrize("host", levels(range(13, 60), (13, 16, 19, 25, 34, 46, 58)))
def test_a_full_host_is_waited_for_and_fails_nobody(host):
    a_full_host(SMALL, 24, rows_of(PROMPTS[:5]), host)


def test_a_request_longer_than_either_tier_is_refused():
    with (
        SMALL.engine(24, selected=SMALL.least(24), host=9) as parts,
        pytest.raises(RequestError, match="selected"),
    ):
        parts.engine.submit(greedy("long", PROMPTS[0], ANSWER + 60))
