"""What --sparse-offload cannot go with is refused at once, by the flag that is wrong."""

from dataclasses import replace

import pytest

from stratakv.assembly.sizing import buffer_rows, spec_for
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.core.server_checks import check_together
from stratakv.sparse.hot_buffer import MOST_ENTRIES
from stratakv.spec.groups import Home
from tests.fixtures.deepseek_v32 import wrapped
from tests.hit_cases import engine_model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache": "device"}, "--cache device"),
        ({"write_policy": "write-back"}, "--write-policy write-back"),
        ({"device_buffer_size": 0}, "--device-buffer-size 0"),
        ({"approximate_pages": 4, "device": "cuda"}, "--approximate-pages: --device cuda"),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(sparse_offload=True, **settings)


def test_a_gpu_reads_rows_that_an_indexer_selects():
    assert EngineConfig(sparse_offload=True, device="cuda").sparse_offload


@pytest.mark.parametrize("settings", [{"device_buffer_size": 64}, {"approximate_pages": 4}])
def test_what_is_of_offload_needs_it(settings):
    with pytest.raises(ConfigError, match="allowed with --sparse-offload"):
        EngineConfig(**settings)


def test_pages_that_are_selected_are_of_one_server_on_one_rank():
    for settings in ({"approximate_pages": 2}, {"approximate_pages": 4, "tp": 2}):
        with pytest.raises(ConfigError, match="--approximate-pages"):
            EngineConfig(sparse_offload=True, **settings)
    engine = EngineConfig(sparse_offload=True, approximate_pages=4)
    check_together(engine, ServerConfig())
    with pytest.raises(ConfigError, match="hands over no bounds"):
        check_together(engine, ServerConfig(role="prefill"))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_keys_and_values_leave_the_anchor_where_bounds_stay(family):
    facts = engine_model(family).facts
    made = [
        spec_for(facts, EngineConfig(sparse_offload=True, page_tokens=8, approximate_pages=pages))
        for pages in (4, 5)
    ]
    anchor, selected, *_ = made[0].groups
    assert [(one.name, one.rows_per_page) for one in anchor.buffers] == [("bounds4", 1)]
    assert (selected.home, [one.name for one in selected.buffers]) == (Home.HOST, ["k", "v"])
    assert anchor.page_bytes * 4 == selected.page_bytes / 2, "two rows for eight"
    assert made[0].digest != made[1].digest, "what other pages have seen is another cache"


def test_bounds_are_for_models_without_an_indexer_that_keep_keys_and_values():
    config = EngineConfig(sparse_offload=True, approximate_pages=4)
    with pytest.raises(ConfigError, match="selects its rows itself"):
        spec_for(wrapped("small").facts, config)
    with pytest.raises(ConfigError, match="no keys and values of its whole context"):
        spec_for(engine_model("deepseek_v3").facts, config)


def test_a_buffer_holds_the_pages_that_a_query_sees():
    facts, settings = engine_model("llama").facts, {"sparse_offload": True, "page_tokens": 8}
    assert buffer_rows(facts, EngineConfig(**settings, approximate_pages=4)) == 64
    most = 8 * MOST_ENTRIES
    config = EngineConfig(**settings, approximate_pages=4, device_buffer_size=most)
    assert buffer_rows(facts, config) == most
    with pytest.raises(ConfigError, match="a step selects 32 rows"):
        spec_for(facts, replace(config, device_buffer_size=31))


def test_a_buffer_holds_a_selection():
    config = EngineConfig(sparse_offload=True, device_buffer_size=23)
    with pytest.raises(ConfigError, match="a step selects 24 rows"):
        spec_for(wrapped("small").facts, config)


@pytest.mark.parametrize(("page", "most"), [(16, 32752), (64, 32704), (1, 32767)])
def test_a_buffer_has_no_more_positions_than_its_tables_can_name(page, most):
    facts = wrapped("small").facts
    settings = {"sparse_offload": True, "page_tokens": page}
    assert buffer_rows(facts, EngineConfig(**settings, device_buffer_size=most)) == most
    for rows in (most + 1, 10**11):
        config = EngineConfig(**settings, device_buffer_size=rows)
        with pytest.raises(ConfigError, match=f"size {rows}: with .* allowed is {most} or less"):
            spec_for(facts, config)


def test_selected_rows_leave_the_anchor():
    spec = spec_for(wrapped("small").facts, EngineConfig(sparse_offload=True))
    anchor, selected = spec.groups
    assert [buffer.name for buffer in anchor.buffers] == ["index_k"]
    assert (selected.home, [buffer.name for buffer in selected.buffers]) == (Home.HOST, ["latent"])


def test_a_model_that_selects_nothing_is_refused():
    facts = replace(wrapped("small").facts, config={"model_type": "llama"})
    with pytest.raises(ConfigError, match="selects no rows"):
        buffer_rows(facts, EngineConfig(sparse_offload=True))
