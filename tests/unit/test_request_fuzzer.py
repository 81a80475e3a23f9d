"""The fuzzer leaves out no field of the schema, and no side of a bound."""

from itertools import islice

import pytest

from stratakv.serve import schemas
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

BOOLEANS = {"stream", "ignore_eos"}


@pytest.mark.parametrize("field", sorted((schemas.COMPLETION | schemas.CHAT) - BOOLEANS))
def test_every_field_that_is_honoured_has_values_of_its_own(field):
    assert own_values(field), f"say in tests/request_fuzzer.py what is tried in {field}"


@pytest.mark.parametrize("field", sorted(schemas.WHOLE))
def test_whole_numbers_are_tried_at_below_and_above_each_bound(field):
    for bound in schemas.WHOLE[field]:
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
    tried = {(one.path, name) for one in mixed(1, 300) for name in one.fields}
    assert {(path, "\ud800") for path in FIELDS} <= tried
    tops = [one.fields.get("top_k") for one in mixed(1, 300)]
    assert schemas.LARGEST + 1 in tops


def test_what_no_field_takes_is_tried_in_all():
    assert {1 << 31, 1 << 63, 10**400} <= set(HUGE)
    assert {raw.text for raw in RAW} >= {"NaN", "Infinity", "-Infinity"}
