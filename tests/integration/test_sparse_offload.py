"""Requests whose selected rows are on the host say what they would say with all on the device.

Pages of both tiers that nobody owns are NaN, and ``drain`` checks that every page has one owner. An
engine of the same model without offload, whose device holds everything, says what is right.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest

from stratakv.assembly.device import CPU
from stratakv.assembly.sizing import spec_for
from stratakv.core.config import EngineConfig
from stratakv.core.errors import RequestError
from stratakv.core.ids import RequestId
from stratakv.transfer.cpu import DEFAULT_COPIER
from stratakv.transfer.host_rows import CpuHostRows
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
from tests.fixtures.deepseek_v32 import random_tokens, wrapped
from tests.storage_cases import PATIENT, Shelf, attach_backend, format_of

PAGE, LONGEST, CHUNK = 8, 160, 24
TOP_K = {"small": 24, "glm": 24, "groups": 17}
BUFFERS = (24, 32, 56)
PROMPTS = [random_tokens(seed, 60 + 13 * seed % 37) for seed in range(20)]
ANSWER = 20
STAGING = -(-CHUNK // PAGE) + 2
PLAIN = {
    "page_tokens": PAGE, "max_running": 6, "max_model_len": LONGEST, "chunk_tokens": CHUNK,
    "step_tokens": 64, "reserve_tokens": ANSWER, "load_back_threshold": 1,
}  # fmt: skip


@cache
def model(name):
    return wrapped(name)


def config(buffer=None, **settings):
    offload = {} if buffer is None else {"sparse_offload": True, "device_buffer_size": buffer}
    return EngineConfig(**PLAIN | offload | settings)


def least(buffer):
    """Device pages that one spilled request needs."""
    return -(-buffer // PAGE) + STAGING


class CountedRows(CpuHostRows):
    """Counts what is read on the host, in rows of decoding requests and in pages of chunks."""

    rows = pages_read = 0

    def load(self, layer, device, host):
        CountedRows.rows += len(host)
        super().load(layer, device, host)

    def pages(self, layer, pages):
        CountedRows.pages_read += len(pages)
        return super().pages(layer, pages)


COUNTED = replace(CPU, host_rows=CountedRows)


@contextmanager
def offloading(
    name, buffer, selected=None, host=200, device=200, copier=DEFAULT_COPIER, **settings
):
    """``selected``: device pages of the group whose home is the host; None: for one request."""
    pages = (device, least(buffer) if selected is None else selected)
    CountedRows.rows = CountedRows.pages_read = 0
    with small_engine(
        model(name), config(buffer, **settings), pages, (400, host), copier, device_kind=COUNTED
    ) as parts:
        yield parts


@cache
def right(name, *prompts, answer=ANSWER, longest=LONGEST):
    """What each prompt is answered without offload, one after the other on a cold cache."""
    plain = config(max_model_len=longest)
    with small_engine(model(name), plain, (300,), (0,)) as parts:
        return [
            tokens_of(run(parts, greedy(str(at), prompt, answer))[str(at)])
            for at, prompt in enumerate(prompts)
        ]


def answers(name, prompts, parts, first=0, answer=ANSWER):
    """All at once."""
    asked = [greedy(f"{first + at}", prompt, answer) for at, prompt in enumerate(prompts)]
    found = run(parts, *asked)
    return [tokens_of(found[prompt.id]) for prompt in asked]


def rows_of(prompts):
    return tuple(tuple(prompt) for prompt in prompts)


def spilled(parts):
    """Requests that were spilled as they ran."""
    return parts.cache.tiers.pools.counters.snapshot()["spilled"]


def submit(parts, prompts):
    for at, prompt in enumerate(prompts):
        parts.engine.submit(greedy(str(at), prompt, ANSWER))


def by_name(outputs, count):
    found = [[] for _ in range(count)]
    for output in outputs:
        found[int(output.request)].append(output)
    return found


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("name", ["small", "glm"])
def test_answers_are_those_without_offload_whatever_the_buffer(name, buffer):
    some = rows_of(PROMPTS[:6])
    with offloading(name, buffer) as parts:
        assert answers(name, some, parts) == right(name, *some)
        again = answers(name, some, parts, first=100)
        assert again == right(name, *some), "from cached pages"
        assert CountedRows.pages_read
        if buffer < 56:  # a larger one makes room for some that are resident
            assert CountedRows.rows


def test_a_buffer_may_be_nearly_as_long_as_the_context():
    some = rows_of([random_tokens(3, 310)])
    settings = {"max_model_len": 340, "chunk_tokens": 8}
    with offloading("small", 280, selected=38, **settings) as parts:
        assert answers("small", some, parts) == right("small", *some, longest=340)
        assert CountedRows.rows


def test_nothing_is_read_on_the_host_while_there_is_room():
    some = rows_of(PROMPTS[:6])
    with offloading("small", 32, selected=200) as parts:
        assert answers("small", some, parts) == right("small", *some)
        assert not CountedRows.rows + CountedRows.pages_read + spilled(parts)


def test_who_runs_on_the_device_alone_is_spilled_for_those_who_wait():
    some = rows_of(random_tokens(seed, 120) for seed in range(4))
    with offloading("small", 24, selected=24) as parts:
        assert answers("small", some, parts) == right("small", *some)
        assert spilled(parts)
        assert CountedRows.rows


def test_twenty_conversations_go_on_where_they_were():
    chats = [list(prompt[:40]) for prompt in PROMPTS]
    with offloading("small", 32, selected=30) as parts:
        for turn in range(3):
            asked = rows_of(chats)
            found = answers("small", asked, parts, first=100 * turn, answer=6)
            assert found == right("small", *asked, answer=6)
            chats = [
                [*chat, *answer, *random_tokens(50 + turn, 9)]
                for chat, answer in zip(chats, found, strict=True)
            ]
        assert CountedRows.rows


@pytest.mark.parametrize("selected", [None, 60])
def test_a_prefix_comes_from_the_host_spilled_or_not(selected):
    prompt = PROMPTS[0]
    with offloading("small", 24, selected=selected) as parts:
        answers("small", [prompt], parts)
        evict_device(parts)
        asked = greedy("again", prompt, ANSWER)
        outputs = run(parts, asked)["again"]
        assert tokens_of(outputs) == right("small", tuple(prompt))[0]
        whole = (len(prompt) - 1) // PAGE * PAGE
        assert outputs[0].cached == on_host(parts.spec, whole)


@pytest.mark.parametrize("selected", [None, 60])
def test_a_prefix_comes_from_a_store_after_a_restart_spilled_or_not(selected):
    prompt, settings = PROMPTS[0], {"selected": selected, **PATIENT}
    form = format_of(spec_for(model("small").facts, config(24)))
    shelf = Shelf(form, 1 << 30)
    for name, ways in (("first", (0, 0)), ("second", (0, 1))):
        with offloading("small", 24, **settings) as parts:
            attach_backend(parts, shelf)
            outputs = run(parts, greedy(name, prompt, ANSWER))[name]
            assert tokens_of(outputs) == right("small", tuple(prompt))[0]
            whole = (len(prompt) - 1) // PAGE * PAGE * ways[1]
            assert outputs[0].cached == on_storage(parts.spec, whole)
            parts.cache.progress.settle()


@pytest.mark.parametrize("after", range(1, 16, 2))
def test_a_retracted_request_answers_as_without_a_retraction(after):
    some = rows_of(PROMPTS[:3])
    with offloading("small", 24, selected=2 * least(24)) as parts:
        submit(parts, some)
        outputs = []
        for step in range(3 * after):
            outputs += parts.engine.step()
            if step % after == after - 1 and len(computing(parts)) > 1:
                retract_youngest(parts)
                parts.engine.check()
        outputs += drain(parts)
        assert list(map(tokens_of, by_name(outputs, 3))) == right("small", *some)


@pytest.mark.parametrize("after", range(14))
def test_an_abort_in_any_phase_leaves_nothing_behind(after):
    some = rows_of(PROMPTS[:4])
    with offloading("small", 24, selected=2 * least(24)) as parts:
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
            assert tokens_of(found[at]) == right("small", *some)[at]
        assert parts.cache.progress.flush()
        assert all_free(parts)


@pytest.mark.parametrize("host", [13, 16, 19, 25, 34, 46, 58])
def test_a_full_host_is_waited_for_and_fails_nobody(host):
    some = rows_of(PROMPTS[:5])
    with offloading("small", 24, selected=2 * least(24), host=host) as parts:
        assert answers("small", some, parts) == right("small", *some)
        assert parts.cache.progress.flush()
        assert all_free(parts)


def test_a_request_longer_than_either_tier_is_refused():
    with (
        offloading("small", 24, selected=least(24), host=9) as parts,
        pytest.raises(RequestError, match="selected"),
    ):
        parts.engine.submit(greedy("long", PROMPTS[0], ANSWER + 60))
