"""What --sparse-offload cannot go with is refused at once, by the flag that is wrong."""

from dataclasses import replace

import pytest

from stratakv.assembly.sizing import buffer_rows, spec_for
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.spec.groups import Home
from tests.fixtures.deepseek_v32 import wrapped


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache": "device"}, "--cache device"),
        ({"write_policy": "write-back"}, "--write-policy write-back"),
        ({"device_buffer_size": 0}, "--device-buffer-size 0"),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(sparse_offload=True, **settings)


def test_a_buffer_needs_offload():
    with pytest.raises(ConfigError, match="allowed with --sparse-offload"):
        EngineConfig(device_buffer_size=64)


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
