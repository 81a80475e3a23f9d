"""DeepSeek's FP8 rows as data: the byte counts of its own kernels, field by field."""

import pytest

from stratakv.core.errors import ConfigError
from stratakv.spec.derive import spec_of
from stratakv.spec.groups import CacheSpec
from stratakv.spec.row_format import (
    fp8_rows,
    in_rows,
    index_key_row,
    latent_row,
    shared_latent_row,
)
from tests.unit.test_spec_derive import LLAMA, V4

V32 = {
    "model_type": "deepseek_v32", "num_hidden_layers": 2, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "index_head_dim": 128, "layer_types": ["indexed_attention"] * 2,
}  # fmt: skip
V4_ROPE = {**V4, "qk_rope_head_dim": 64}


def fields(row) -> list[tuple[str, int, str, int]]:
    return [(field.name, field.elements, field.dtype, field.bytes) for field in row.fields]


def test_a_latent_of_v32_has_656_bytes():
    row = latent_row(512, 64)
    assert row.row_bytes == 656
    assert fields(row) == [
        ("values", 512, "float8_e4m3fn", 512), ("scales", 4, "float32", 16),
        ("rope", 64, "bfloat16", 128),
    ]  # fmt: skip


def test_a_latent_of_v4_has_584_bytes():
    row = shared_latent_row(512, 64)
    assert row.row_bytes == 584
    assert fields(row) == [
        ("values", 448, "float8_e4m3fn", 448), ("rope", 64, "bfloat16", 128),
        ("scales", 7, "float8_e8m0fnu", 7), ("padding", 1, "uint8", 1),
    ]  # fmt: skip


def test_an_index_key_has_132_bytes():
    assert index_key_row(128).row_bytes == 132
    assert [name for name, *_ in fields(index_key_row(128))] == ["values", "scales"]


def test_a_started_tile_has_a_scale_and_a_full_row_no_padding():
    assert latent_row(513, 64).fields[1].elements == 5
    assert index_key_row(129).row_bytes == 129 + 8
    odd = shared_latent_row(11, 3)  # 8 values, 3 x 2 bytes, 1 scale
    assert (odd.fields[-1].name, odd.fields[-1].bytes, odd.row_bytes) == ("padding", 1, 16)
    whole = shared_latent_row(8 * 64 + 64, 64)
    assert [field.name for field in whole.fields] == ["values", "rope", "scales"]
    assert whole.row_bytes % 8 == 0


def rows_of(spec: CacheSpec) -> dict[str, dict[str, tuple[int, str]]]:
    return {g.name: {b.name: (b.row_bytes, b.dtype) for b in g.buffers} for g in spec.groups}


def test_a_spec_in_fp8_has_these_rows_and_its_other_buffers_as_they_were():
    plain = spec_of(V4_ROPE, page_tokens=128, dtype="bfloat16")
    packed = in_rows(plain, fp8_rows(plain, V4_ROPE))
    rows, before = rows_of(packed), rows_of(plain)
    assert rows["anchor"] == {
        "c4": (584, "uint8"), "c4_index_k": (132, "uint8"), "c128": (584, "uint8"),
    }  # fmt: skip
    assert rows["swa"]["latent"] == (584, "uint8")
    assert rows["open"] == before["open"]
    for name in ("c4_overlap", "c4_index_overlap"):
        assert rows["swa"][name] == before["swa"][name]
    for there, here in zip(plain.groups, packed.groups, strict=True):
        assert (there.retention, there.id) == (here.retention, here.id)
        for old, new in zip(there.buffers, here.buffers, strict=True):
            assert (old.layers, old.rows_per_page) == (new.layers, new.rows_per_page)
    assert packed.digest != plain.digest
    v32 = spec_of(V32, page_tokens=64, dtype="bfloat16")
    assert rows_of(in_rows(v32, fp8_rows(v32, V32)))["anchor"] == {
        "latent": (656, "uint8"), "index_k": (132, "uint8"),
    }  # fmt: skip


def test_layers_of_another_size_have_rows_of_their_own():
    own = {"1": {"kv_lora_rank": 256, "index_head_dim": 64}}
    config = {**V32, "per_layer_config": own}
    spec = spec_of(config, page_tokens=64, dtype="bfloat16")
    formats = fp8_rows(spec, config)
    assert {name: row.row_bytes for name, row in formats.items()} == {
        "latent": 512 + 4 * 4 + 2 * 64, "latent.1": 256 + 2 * 4 + 2 * 64,
        "index_k": 128 + 4, "index_k.1": 64 + 4,
    }  # fmt: skip
    assert {b.name: b.row_shape for b in in_rows(spec, formats).groups[0].buffers} == {
        name: (row.row_bytes,) for name, row in formats.items()
    }


def test_a_model_without_such_rows_is_refused():
    spec = spec_of(LLAMA, page_tokens=16, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"--rows fp8: .* 'llama' has none; allowed is plain"):
        fp8_rows(spec, LLAMA)
