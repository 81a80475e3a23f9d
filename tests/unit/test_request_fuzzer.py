"""The fuzzer leaves out no field of the schema, and no side of a bound."""

from itertools import islice

import pytest

from stratakv.serve import decoding, schemas
from tests.request_fuzzer import (
    CHAT,
    COMPLETIONS,
    FIELDS,
    HUGE,
    RAW,
    alone,
    attempts,
    mixed,
    own_values,
)

BOOLEANS = {
    "stream", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "no_stop_trim",
    "return_token_ids", "add_special_tokens", "add_generation_prompt", "continue_final_message",
}  # fmt: skip


@pytest.mark.parametrize("field", sorted((schemas.COMPLETION | schemas.CHAT) - BOOLEANS))
def test_every_field_that_is_honoured_has_values_of_its_own(field):
    assert own_values(field), f"say in tests/request_fuzzer.py what is tried in {field}"


@pytest.mark.parametrize("field", sorted(decoding.WHOLE))
def test_whole_numbers_are_tried_at_below_and_above_each_bound(field):
    for bound in decoding.WHOLE[field]:
        assert {bound - 1, bound, bound + 1} <= set(own_values(field))


def test_alone_come_all_values_of_all_fields_and_then_pairs():
    count = alone()
    found = list(islice(attempts(0), count + 50))
    plain = {COMPLETIONS: {"prompt": [7, 8, 9], "max_tokens": 2}}
    plain[CHAT] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    tried = {
        (one.path, name)
        for one in found[:count]
        for name, value in one.fields.items()
        if plain[one.path].get(name) != value
    }
    assert tried >= {(path, name) for path, known in FIELDS.items() for name in known}
    assert all(one.body() for one in found)
    assert len({tuple(sorted(one.fields)) for one in found[count:]}) > 25


def test_the_short_campaign_meets_the_bounds_and_names_that_are_none():
    tried = {(one.path, name) for one in mixed(1, 700) for name in one.fields}
    assert {(path, "\ud800") for path in FIELDS} <= tried
    tops = [one.fields.get("top_k") for one in mixed(1, 700)]
    assert decoding.LARGEST + 1 in tops


def test_what_no_field_takes_is_tried_in_all():
    assert {1 << 31, 1 << 63, 10**400} <= set(HUGE)
    assert {raw.text for raw in RAW} >= {"NaN", "Infinity", "-Infinity"}
