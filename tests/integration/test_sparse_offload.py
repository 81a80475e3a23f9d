"""Requests whose selected rows are on the host say what they would say with all on the device.

Pages of both tiers that nobody owns are NaN, and ``drain`` checks that every page has one owner. An
engine of the same model without offload, whose device holds everything, says what is right.
"""

import pytest

from stratakv.core.errors import RequestError
from stratakv.core.ids import RequestId
from tests.engines import (
    all_free,
    computing,
    drain,
    evict_device,
    greedy,
    on_host,
    on_storage,
    retract_youngest,
    run,
    tokens_of,
)
from tests.fixtures.deepseek_v32 import random_tokens
from tests.offloading import (
    ANSWER,
    CASES,
    PROMPTS,
    SMALL,
    CountedRows,
    answers,
    by_name,
    levels,
    rows_of,
    spilled,
    submit,
)
from tests.storage_cases import PATIENT, Shelf, attach_backend, format_of

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
    prompt = PROMPTS[0]
    with SMALL.engine(24, selected=selected) as parts:
        answers([prompt], parts)
        evict_device(parts)
        asked = greedy("again", prompt, ANSWER)
        outputs = run(parts, asked)["again"]
        assert tokens_of(outputs) == SMALL.right(tuple(prompt))[0]
        whole = (len(prompt) - 1) // PAGE * PAGE
        assert outputs[0].cached == on_host(parts.spec, whole)


@pytest.mark.parametrize("selected", [None, 60])
def test_a_prefix_comes_from_a_store_after_a_restart_spilled_or_not(selected):
    prompt, settings = PROMPTS[0], {"selected": selected, **PATIENT}
    form = format_of(SMALL.spec(24))
    shelf = Shelf(form, 1 << 30)
    for name, ways in (("first", (0, 0)), ("second", (0, 1))):
        with SMALL.engine(24, **settings) as parts:
            attach_backend(parts, shelf)
            outputs = run(parts, greedy(name, prompt, ANSWER))[name]
            assert tokens_of(outputs) == SMALL.right(tuple(prompt))[0]
            whole = (len(prompt) - 1) // PAGE * PAGE * ways[1]
            assert outputs[0].cached == on_storage(parts.spec, whole)
            parts.cache.progress.settle()


@pytest.mark.parametrize("after", range(1, 16, 2))
def test_a_retracted_request_answers_as_without_a_retraction(after):
    some = rows_of(PROMPTS[:3])
    with SMALL.engine(24, selected=2 * SMALL.least(24)) as parts:
        submit(parts, some)
        outputs = []
        for step in range(3 * after):
            outputs += parts.engine.step()
            if step % after == after - 1 and len(computing(parts)) > 1:
                retract_youngest(parts)
                parts.engine.check()
        outputs += drain(parts)
        assert list(map(tokens_of, by_name(outputs, 3))) == SMALL.right(*some)


@pytest.mark.parametrize("after", range(14))
def test_an_abort_in_any_phase_leaves_nothing_behind(after):
    some = rows_of(PROMPTS[:4])
    with SMALL.engine(24, selected=2 * SMALL.least(24)) as parts:
        submit(parts, some)
        outputs = []
        for _ in range(after):
            outputs += parts.engine.step()
            parts.engine.check()
        parts.engine.abort(RequestId("0"))
        parts.engine.abort(RequestId("2"))
        parts.engine.check()
        outputs += drain(parts)
        found = by_name(outputs, 4)
        for at in (1, 3):
            assert tokens_of(found[at]) == SMALL.right(*some)[at]
        assert parts.cache.progress.flush()
        assert all_free(parts)


@pytest.mark.parametrize("host", levels(range(13, 60), (13, 16, 19, 25, 34, 46, 58)))
def test_a_full_host_is_waited_for_and_fails_nobody(host):
    some = rows_of(PROMPTS[:5])
    with SMALL.engine(24, selected=2 * SMALL.least(24), host=host) as parts:
        assert answers(some, parts) == SMALL.right(*some)
        assert parts.cache.progress.flush()
        assert all_free(parts)


def test_a_request_longer_than_either_tier_is_refused():
    with (
        SMALL.engine(24, selected=SMALL.least(24), host=9) as parts,
        pytest.raises(RequestError, match="selected"),
    ):
        parts.engine.submit(greedy("long", PROMPTS[0], ANSWER + 60))
