"""DeepSeek-V4 whose indexed entries are on the host says what it says with all on the device.

Pages of both tiers that nobody owns are NaN, and ``drain`` checks that every page has one owner. An
engine of the same model without offload says what is right.
"""

import pytest

from stratakv.assembly.sizing import buffer_rows
from stratakv.core.errors import ConfigError, RequestError
from tests.engines import (
    drain,
    greedy,
    tokens_of,
)
from tests.fixtures.deepseek_v4 import TWICE, config_of
from tests.fixtures.deepseek_v32 import random_tokens
from tests.offloading import (
    ANSWER,
    CASES,
    CountedRows,
    answers,
    by_name,
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

V4 = CASES["v4"]
PAGE, PLENTY = V4.plain["page_tokens"], 100
BUFFERS = (8, 16, 24)
"""Entries, of four tokens each; an indexer selects 8."""
PROMPTS = [random_tokens(seed, 90 + 13 * seed % 61) for seed in range(20)]


@pytest.mark.parametrize("name", ["v4", "narrow v4"])
@pytest.mark.parametrize("buffer", BUFFERS)
def test_answers_are_those_without_offload_whatever_the_buffer(buffer, name):
    some = rows_of(PROMPTS[:6])
    with CASES[name].engine(buffer) as parts:
        assert answers(some, parts) == CASES[name].right(*some)
        again = answers(some, parts, first=100)
        assert again == CASES[name].right(*some), "from cached pages"
        if buffer < 24:  # a larger one makes room for all of a request
            assert CountedRows.pages_read
            assert CountedRows.rows


def test_prompts_shorter_than_a_block_decode_beside_a_spilled_one():
    """What pads their entries must be written, wherever the other's are: it has a page whose first
    entry is not there yet when one of them begins at its every step."""
    some = rows_of([random_tokens(31, 158), *([token] for token in range(16))])
    with V4.engine(8, selected=V4.least(8) + 4) as parts:
        parts.engine.submit(greedy("0", some[0], ANSWER))
        outputs = []
        for at, short in enumerate(some[1:], 1):
            outputs += parts.engine.step()
            parts.engine.submit(greedy(str(at), short, 4))
        found = by_name([*outputs, *drain(parts)], len(some))
        assert tokens_of(found[0]) == V4.right(some[0])[0]
        assert [tokens_of(one) for one in found[1:]] == V4.right(*some[1:], answer=4)
        assert CountedRows.rows


def test_a_buffer_may_be_nearly_as_long_as_the_context():
    some = rows_of([random_tokens(3, 400)])
    settings = {"max_model_len": 440, "chunk_tokens": 16}
    with V4.engine(88, selected=25, **settings) as parts:
        assert answers(some, parts) == V4.right(*some, longest=440)
        assert CountedRows.rows


def test_nothing_is_read_on_the_host_while_there_is_room():
    some = rows_of(PROMPTS[:6])
    with V4.engine(16, selected=PLENTY) as parts:
        assert answers(some, parts) == V4.right(*some)
        assert not CountedRows.rows + CountedRows.pages_read + spilled(parts)


def test_who_runs_on_the_device_alone_is_spilled_for_those_who_wait():
    some = rows_of(random_tokens(seed, 190) for seed in range(4))
    with V4.engine(8, selected=20) as parts:
        assert answers(some, parts) == V4.right(*some)
        assert spilled(parts)
        assert CountedRows.rows


@pytest.mark.parametrize("selected", [None, 60])
def test_a_prefix_comes_from_the_host_spilled_or_not(selected):
    prefix_from_the_host(V4, 8, PROMPTS[0], selected)


@pytest.mark.parametrize("selected", [None, 60])
def test_a_prefix_comes_from_a_store_after_a_restart_spilled_or_not(selected):
    prefix_from_a_store(V4, 8, PROMPTS[0], selected)


@pytest.mark.parametrize("after", range(1, 16, 2))
def test_a_retracted_request_answers_as_without_a_retraction(after):
    retracted_again_and_again(V4, 8, rows_of(PROMPTS[:3]), after)


@pytest.mark.parametrize("after", range(0, 14, 2))
def test_an_abort_in_any_phase_leaves_nothing_behind(after):
    two_of_four_aborted(V4, 8, rows_of(PROMPTS[:4]), after)


@pytest.mark.parametrize("host", levels(range(11, 44), range(11, 44, 4)))
def test_a_full_host_is_waited_for_and_fails_nobody(host):
    a_full_host(V4, 8, rows_of(PROMPTS[:5]), host)


def test_a_request_longer_than_either_tier_is_refused():
    with (
        V4.engine(8, selected=V4.least(8), host=7) as parts,
        pytest.raises(RequestError, match="selected"),
    ):
        parts.engine.submit(greedy("long", PROMPTS[0], ANSWER + 60))


def test_only_indexed_entries_leave_the_anchor():
    spec = V4.spec(8)
    found = [[buffer.name for buffer in group.buffers] for group in spec.groups]
    assert found[:2] == [["c4_index_k", "c16"], ["c4"]]
    assert [group.at_home_on_host for group in spec.groups] == [False, True, False, False]


def test_a_model_without_an_indexer_is_refused():
    fields = config_of(TWICE).to_dict()
    kinds = ["sliding_attention", "heavily_compressed_attention", "sliding_attention"]
    facts = type("Facts", (), {"config": {**fields, "layer_types": kinds}})
    with pytest.raises(ConfigError, match="no layer of this deepseek_v4 has an indexer"):
        buffer_rows(facts, V4.config(8))
