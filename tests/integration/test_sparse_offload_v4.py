"""DeepSeek-V4 whose indexed entries are on the host says what it says with all on the device.

Pages of both tiers that nobody owns are NaN, and ``drain`` checks that every page has one owner. An
engine of the same model without offload says what is right.
"""

from contextlib import contextmanager
from functools import cache

import pytest

from stratakv.assembly.sizing import buffer_rows, spec_for
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError, RequestError
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
    small_engine,
    tokens_of,
)
from tests.fixtures.deepseek_v4 import NARROW, TWICE, adopted, config_of
from tests.fixtures.deepseek_v32 import random_tokens
from tests.integration.test_sparse_offload import COUNTED, CountedRows, by_name, rows_of, spilled
from tests.storage_cases import PATIENT, Shelf, attach_backend, format_of

PAGE, PAGE_ROWS, LONGEST, CHUNK = 16, 4, 224, 48
ANSWER = 20
BUFFERS = (8, 16, 24)
"""Entries, of four tokens each; an indexer selects 8."""
STAGING = -(-CHUNK // PAGE) + 2
PROMPTS = [random_tokens(seed, 90 + 13 * seed % 61) for seed in range(20)]
PLAIN = {
    "page_tokens": PAGE, "max_running": 6, "max_model_len": LONGEST, "chunk_tokens": CHUNK,
    "step_tokens": 96, "reserve_tokens": ANSWER, "load_back_threshold": 1,
}  # fmt: skip
PLENTY = 100


def config(buffer=None, **settings):
    offload = {} if buffer is None else {"sparse_offload": True, "device_buffer_size": buffer}
    return EngineConfig(**PLAIN | offload | settings)


def least(buffer):
    """Device pages that one spilled request needs."""
    return -(-buffer // PAGE_ROWS) + STAGING


@contextmanager
def offloading(buffer, selected=None, host=PLENTY, seed=TWICE, **settings):
    """``selected``: device pages of the group whose home is the host; None: for one request."""
    device = (PLENTY, least(buffer) if selected is None else selected, PLENTY, 8)
    CountedRows.rows = CountedRows.pages_read = 0
    with small_engine(
        adopted(seed), config(buffer, **settings), device, (200, host, 200, 8), device_kind=COUNTED
    ) as parts:
        yield parts


@cache
def right(*prompts, answer=ANSWER, longest=LONGEST, seed=TWICE):
    """What each prompt is answered without offload, one after the other on a cold cache."""
    plain = config(max_model_len=longest)
    with small_engine(adopted(seed), plain, (300, 300, 8), (0, 0, 0)) as parts:
        return [
            tokens_of(run(parts, greedy(str(at), prompt, answer))[str(at)])
            for at, prompt in enumerate(prompts)
        ]


def answers(prompts, parts, first=0, answer=ANSWER):
    """All at once."""
    asked = [greedy(f"{first + at}", prompt, answer) for at, prompt in enumerate(prompts)]
    found = run(parts, *asked)
    return [tokens_of(found[prompt.id]) for prompt in asked]


def submit(parts, prompts):
    for at, prompt in enumerate(prompts):
        parts.engine.submit(greedy(str(at), prompt, ANSWER))


@pytest.mark.parametrize("seed", [TWICE, NARROW])
@pytest.mark.parametrize("buffer", BUFFERS)
def test_answers_are_those_without_offload_whatever_the_buffer(buffer, seed):
    some = rows_of(PROMPTS[:6])
    with offloading(buffer, seed=seed) as parts:
        assert answers(some, parts) == right(*some, seed=seed)
        again = answers(some, parts, first=100)
        assert again == right(*some, seed=seed), "from cached pages"
        if buffer < 24:  # a larger one makes room for all of a request
            assert CountedRows.pages_read
            assert CountedRows.rows


def test_prompts_shorter_than_a_block_decode_beside_a_spilled_one():
    """What pads their entries must be written, wherever the other's are: it has a page whose first
    entry is not there yet when one of them begins at its every step."""
    some = rows_of([random_tokens(31, 158), *([token] for token in range(16))])
    with offloading(8, selected=least(8) + 4) as parts:
        parts.engine.submit(greedy("0", some[0], ANSWER))
        outputs = []
        for at, short in enumerate(some[1:], 1):
            outputs += parts.engine.step()
            parts.engine.submit(greedy(str(at), short, 4))
        found = by_name([*outputs, *drain(parts)], len(some))
        assert tokens_of(found[0]) == right(some[0])[0]
        assert [tokens_of(one) for one in found[1:]] == right(*some[1:], answer=4)
        assert CountedRows.rows


def test_a_buffer_may_be_nearly_as_long_as_the_context():
    some = rows_of([random_tokens(3, 400)])
    settings = {"max_model_len": 440, "chunk_tokens": 16}
    with offloading(88, selected=25, **settings) as parts:
        assert answers(some, parts) == right(*some, longest=440)
        assert CountedRows.rows


def test_nothing_is_read_on_the_host_while_there_is_room():
    some = rows_of(PROMPTS[:6])
    with offloading(16, selected=PLENTY) as parts:
        assert answers(some, parts) == right(*some)
        assert not CountedRows.rows + CountedRows.pages_read + spilled(parts)


def test_who_runs_on_the_device_alone_is_spilled_for_those_who_wait():
    some = rows_of(random_tokens(seed, 190) for seed in range(4))
    with offloading(8, selected=20) as parts:
        assert answers(some, parts) == right(*some)
        assert spilled(parts)
        assert CountedRows.rows


def test_twenty_conversations_go_on_where_they_were():
    chats = [list(prompt[:70]) for prompt in PROMPTS]
    with offloading(16, selected=24) as parts:
        for turn in range(3):
            asked = rows_of(chats)
            found = answers(asked, parts, first=100 * turn, answer=6)
            assert found == right(*asked, answer=6)
            chats = [
                [*chat, *answer, *random_tokens(50 + turn, 19)]
                for chat, answer in zip(chats, found, strict=True)
            ]
        assert CountedRows.rows


@pytest.mark.parametrize("selected", [None, 60])
def test_a_prefix_comes_from_the_host_spilled_or_not(selected):
    prompt = PROMPTS[0]
    with offloading(8, selected=selected) as parts:
        answers([prompt], parts)
        evict_device(parts)
        asked = greedy("again", prompt, ANSWER)
        outputs = run(parts, asked)["again"]
        assert tokens_of(outputs) == right(tuple(prompt))[0]
        assert outputs[0].cached == on_host(parts.spec, (len(prompt) - 1) // PAGE * PAGE)


@pytest.mark.parametrize("selected", [None, 60])
def test_a_prefix_comes_from_a_store_after_a_restart_spilled_or_not(selected):
    prompt, settings = PROMPTS[0], {"selected": selected, **PATIENT}
    form = format_of(spec_for(adopted(TWICE).facts, config(8)))
    shelf = Shelf(form, 1 << 30)
    for name, stored in (("first", 0), ("second", 1)):
        with offloading(8, **settings) as parts:
            attach_backend(parts, shelf)
            outputs = run(parts, greedy(name, prompt, ANSWER))[name]
            assert tokens_of(outputs) == right(tuple(prompt))[0]
            whole = (len(prompt) - 1) // PAGE * PAGE * stored
            assert outputs[0].cached == on_storage(parts.spec, whole)
            parts.cache.progress.settle()


@pytest.mark.parametrize("after", range(1, 16, 2))
def test_a_retracted_request_answers_as_without_a_retraction(after):
    some = rows_of(PROMPTS[:3])
    with offloading(8, selected=2 * least(8)) as parts:
        submit(parts, some)
        outputs = []
        for step in range(3 * after):
            outputs += parts.engine.step()
            if step % after == after - 1 and len(computing(parts)) > 1:
                retract_youngest(parts)
                parts.engine.check()
        outputs += drain(parts)
        assert list(map(tokens_of, by_name(outputs, 3))) == right(*some)


@pytest.mark.parametrize("after", range(0, 14, 2))
def test_an_abort_in_any_phase_leaves_nothing_behind(after):
    some = rows_of(PROMPTS[:4])
    with offloading(8, selected=2 * least(8)) as parts:
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
            assert tokens_of(found[at]) == right(*some)[at]
        assert parts.cache.progress.flush()
        assert all_free(parts)


@pytest.mark.parametrize("host", range(11, 44, 4))
def test_a_full_host_is_waited_for_and_fails_nobody(host):
    some = rows_of(PROMPTS[:5])
    with offloading(8, selected=2 * least(8), host=host) as parts:
        assert answers(some, parts) == right(*some)
        assert parts.cache.progress.flush()
        assert all_free(parts)


def test_a_request_longer_than_either_tier_is_refused():
    with (
        offloading(8, selected=least(8), host=7) as parts,
        pytest.raises(RequestError, match="selected"),
    ):
        parts.engine.submit(greedy("long", PROMPTS[0], ANSWER + 60))


def test_only_indexed_entries_leave_the_anchor():
    spec = spec_for(adopted(TWICE).facts, config(8))
    found = [[buffer.name for buffer in group.buffers] for group in spec.groups]
    assert found[:2] == [["c4_index_k", "c16"], ["c4"]]
    assert [group.at_home_on_host for group in spec.groups] == [False, True, False, False]


def test_a_model_without_an_indexer_is_refused():
    fields = config_of(TWICE).to_dict()
    kinds = ["sliding_attention", "heavily_compressed_attention", "sliding_attention"]
    facts = type("Facts", (), {"config": {**fields, "layer_types": kinds}})
    with pytest.raises(ConfigError, match="no layer of this deepseek_v4 has an indexer"):
        buffer_rows(facts, config(8))
