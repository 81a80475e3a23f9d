"""What a server with selected rows on the host decides before it serves, and what it logs."""

import logging
import re
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratakv.assembly import sizing
from stratakv.assembly.models import build_engine
from stratakv.assembly.sizing import ANY_AMOUNT, offload_bytes, planned, size, spec_for
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.core.units import format_bytes
from stratakv.sparse.hot_buffer import HotBuffers, HotBufferShape
from stratakv.spec.budget import (
    FILLING_PAGES,
    ExpectedLoad,
    device_bytes,
    device_pages,
    spilled_pages,
)
from stratakv.spec.offload import indexers, selected_group
from tests.fixtures.deepseek_v32 import wrapped

PAGE, BUFFER, CHUNK = 8, 48, 32
SETTINGS = {
    "page_tokens": PAGE, "sparse_offload": True, "device_buffer_size": BUFFER,
    "chunk_tokens": CHUNK, "max_model_len": 256, "chat_tokens": 200, "max_running": 4,
    "device_memory": "256KiB",
}  # fmt: skip


def spec():
    return spec_for(wrapped("small").facts, EngineConfig(**SETTINGS))


def load(**changed):
    usual = {"max_running": 4, "max_model_len": 256, "chunk_tokens": CHUNK, "chat_tokens": 200}
    return ExpectedLoad(**usual | {"buffer_rows": BUFFER} | changed)


def test_a_spilled_request_holds_its_buffer_and_what_is_not_on_the_host_yet():
    selected = spec().groups[1]
    assert spilled_pages(selected, load(), PAGE) == 6 + 1 + FILLING_PAGES
    assert spilled_pages(selected, load(), PAGE, CHUNK) == 6 + 4 + FILLING_PAGES
    assert spilled_pages(selected, load(buffer_rows=41), PAGE, 9) == 6 + 2 + FILLING_PAGES


@given(size=st.integers(60_000, 5_000_000), chat=st.integers(1, 2000), rows=st.integers(24, 400))
def test_there_are_buffers_for_whoever_has_room_for_index_keys(size, chat, rows):
    made, wanted = spec(), load(chat_tokens=chat, buffer_rows=rows)
    try:
        kept, selected = device_pages(made, size, wanted)
    except ConfigError:
        return
    assert device_bytes(made, (kept, selected)) <= size
    group = made.groups[selected_group(made)]
    decoding = spilled_pages(group, wanted, PAGE)
    prefilling = spilled_pages(group, wanted, PAGE, CHUNK)
    others = max(0, kept // ceil(chat / PAGE) - 1)
    assert selected == kept or selected >= prefilling + others * decoding
    assert selected <= max(kept, prefilling)


def test_a_longer_conversation_leaves_more_of_the_device_to_index_keys():
    short, long = (device_pages(spec(), 500_000, load(chat_tokens=n)) for n in (100, 1000))
    assert long[0] > short[0]
    assert long[1] < short[1]


def test_a_larger_buffer_takes_from_index_keys():
    small, large = (device_pages(spec(), 500_000, load(buffer_rows=n)) for n in (24, 96))
    assert small[0] > large[0]
    assert small[1] < large[1]


def test_the_log_says_for_two_lengths_from_where_on_it_pays(caplog):
    caplog.set_level(logging.INFO)
    build_engine(wrapped("small"), EngineConfig(**SETTINGS)).close()
    lines = [one for one in caplog.messages if one.startswith("--sparse-offload: ")]
    assert len(lines) == 3
    assert lines[2].startswith(
        "--sparse-offload: tables of buffers and the context of a prompt take "
    )
    assert lines[0].startswith("--sparse-offload: 200 tokens each: ")
    assert lines[1].startswith("--sparse-offload: 256 tokens each: ")
    assert all("which pays above" in line and "what is short is" in line for line in lines[:2])


def test_one_line_where_a_conversation_is_as_long_as_a_request_may_be(caplog):
    caplog.set_level(logging.INFO)
    build_engine(wrapped("small"), EngineConfig(**SETTINGS | {"chat_tokens": 300})).close()
    assert [one for one in caplog.messages if one.startswith("--sparse-offload: 256 tokens each")]
    assert sum(one.startswith("--sparse-offload: ") for one in caplog.messages) == 2


def test_without_it_nothing_is_logged(caplog):
    caplog.set_level(logging.INFO)
    plain = {"sparse_offload": False, "device_buffer_size": None}
    build_engine(wrapped("small"), EngineConfig(**SETTINGS | plain)).close()
    assert not [one for one in caplog.messages if one.startswith("--sparse-offload")]


def test_tables_of_buffers_are_counted_before_the_host_tier(monkeypatch):
    made, facts = spec(), wrapped("small").facts
    monkeypatch.setattr(sizing, "free_host_bytes", lambda: 1 << 20)
    (few, many) = (
        size(
            facts,
            EngineConfig(**SETTINGS | {"max_running": n, "step_tokens": 99}),
            device_free=ANY_AMOUNT,
        )
        for n in (1, 64)
    )
    taken = sum(
        (a - b) * group.host_stride_bytes
        for a, b, group in zip(few.host, many.host, made.groups, strict=True)
    )
    tables = 63 * (256 + 1) * 2 + 63 * indexers(made) * BUFFER * 6
    assert taken == pytest.approx(tables * 4 / 5, abs=2 * made.groups[1].host_stride_bytes)


def test_a_gpu_has_room_for_tables_of_buffers_beside_its_tier():
    facts, tier = wrapped("small").facts, 1 << 20
    config = EngineConfig(**SETTINGS | {"device": "cuda", "device_memory": f"{tier}B"})
    found = size(facts, config, device_free=ANY_AMOUNT)
    taken = device_bytes(found.spec, found.device)
    enough = taken + found.beside_bytes
    assert size(facts, config, device_free=enough).device == found.device
    message = f"^--device-memory .*, and {re.escape(format_bytes(taken - 1))} are free on the dev"
    with pytest.raises(ConfigError, match=message):
        size(facts, config, device_free=enough - 1)


def test_the_rows_of_a_spilled_prompt_are_counted_twice_for_one_layer():
    """As they are read, and in their order."""
    tables = HotBuffers.bytes_of(BUFFER, indexers(spec()), 4, 256)
    latent = 4 * (20 + 8)
    assert offload_bytes(spec(), load()) == tables + 2 * 256 * latent


@given(
    entries=st.integers(8, 64), plans=st.integers(1, 5), rows=st.integers(1, 5),
    most=st.integers(64, 500),
)  # fmt: skip
def test_tables_take_what_is_counted_for_them(entries, plans, rows, most):
    shape = HotBufferShape(entries=entries, page_rows=1, top_k=8)
    made = HotBuffers(shape, plans, rows, most)
    assert made.table_bytes == HotBuffers.bytes_of(entries, plans, rows, most)


@pytest.mark.parametrize("host", [{"host_memory": "64B"}, {"host_ratio": 0.001}])
def test_too_little_host_memory_is_refused_and_none_is_not_offered(host):
    with pytest.raises(ConfigError, match=r"too little for one page of group .*; allowed is more$"):
        build_engine(wrapped("small"), EngineConfig(**SETTINGS, **host))


@pytest.mark.parametrize("host", [{"host_memory": "0"}, {"host_ratio": 0.0}])
def test_a_host_of_nothing_is_refused(host):
    with pytest.raises(ConfigError, match="there is no host memory; allowed with some"):
        build_engine(wrapped("small"), EngineConfig(**SETTINGS, **host))


def test_a_host_of_less_than_a_request_bounds_what_a_request_may_be():
    made = spec()
    (_, selected) = made.groups
    host = 2 * 12 * sum(group.host_stride_bytes for group in made.groups)
    asked = {"max_model_len": None, "host_memory": f"{host}B", "device_memory": "64KiB"}
    sizes = planned(made, wrapped("small").facts, EngineConfig(**SETTINGS | asked))
    here, there = sizes.device[selected.id], sizes.host[selected.id]
    assert sizes.max_model_len == PAGE * min(sizes.device[0], max(here, there))
    with pytest.raises(ConfigError, match=r"--max-model-len 256: .* allowed is that or less"):
        planned(
            made, wrapped("small").facts, EngineConfig(**SETTINGS | asked | {"max_model_len": 256})
        )
