"""What one layer of each kind keeps: shapes worked out by hand from Hugging Face's modules.

No two sizes of a configuration are alike, so that no field can stand in for another.
"""

from typing import Final

import pytest

from stratakv.core.errors import ConfigError
from stratakv.spec.derive import spec_of
from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import KeepAll, KeepChunk, KeepWindow

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
PAGE = 16
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "hidden_size": 24}
ONE, THREE = {**HEADS, "num_hidden_layers": 1}, {**HEADS, "num_hidden_layers": 3}
MLA = {"kv_lora_rank": 7, "qk_rope_head_dim": 2}
INDEXED = {"model_type": "glm_moe_dsa", "layer_types": ["indexed_attention"] * 2, **MLA}

BAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 6, "mamba_n_groups": 2, "mamba_d_state": 5,
    "mamba_d_conv": 3,
}  # fmt: skip
MAMBA2_BY_FAMILY = {
    "bamba": {**THREE, **BAMBA},
    "falcon_h1": {**ONE, **BAMBA},
    "granitemoehybrid": {**HEADS, **BAMBA, "layer_types": [LINEAR]},
    "nemotron_h": {
        **HEADS, "layers_block_type": ["mamba"], "mamba_num_heads": 4, "mamba_head_dim": 6,
        "n_groups": 2, "ssm_state_size": 5, "conv_kernel": 3,
    },
    "zamba2": {
        **HEADS, "layers_block_type": ["mamba"], "n_mamba_heads": 4, "mamba_headdim": 6,
        "mamba_ngroups": 2, "mamba_d_state": 5, "mamba_d_conv": 3, "attention_head_dim": 11,
    },
    "mamba2": {
        "num_hidden_layers": 1, "num_heads": 4, "head_dim": 6, "n_groups": 2, "state_size": 5,
        "conv_kernel": 3,
    },
}  # fmt: skip

Kept = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""By buffer: the layers and the shape of a row."""


def derive(config: dict[str, object]) -> CacheSpec:
    return spec_of(config, page_tokens=PAGE, dtype="float16")


def kept(config: dict[str, object]) -> list[Kept]:
    """Of every group."""
    groups = derive(config).groups
    sizes = [size for group in groups for b in group.buffers for size in b.row_shape]
    assert {type(size) for size in sizes} == {int}
    return [{b.name: (tuple(b.layers), b.row_shape) for b in group.buffers} for group in groups]


def both(layers: tuple[int, ...], *row: int) -> Kept:
    """Keys and values of one shape."""
    return {"k": (layers, row), "v": (layers, row)}


# --- what attention keeps ------------------------------------------------------------------------

ATTENTION: Final[dict[str, tuple[dict[str, object], Kept]]] = {
    "grouped heads": ({"model_type": "llama", **ONE}, both((0,), 3, 10)),
    "no key heads of their own": (
        {"model_type": "llama", **ONE, "num_key_value_heads": None}, both((0,), 6, 10),
    ),
    "head size from the model's": (
        {"model_type": "llama", **ONE, "head_dim": None}, both((0,), 3, 24 // 6),
    ),
    "head size and no hidden size": (
        {"model_type": "llama", **ONE, "hidden_size": None}, both((0,), 3, 10),
    ),
    "dbrx": (
        {
            "model_type": "dbrx", "num_attention_heads": 6, "hidden_size": 24,
            "num_hidden_layers": 1, "attn_config": {"kv_n_heads": 2},
        },
        both((0,), 2, 4),
    ),
    "multi-query": ({"model_type": "gpt_bigcode", **ONE, "multi_query": True}, both((0,), 1, 10)),
    "multi-head": ({"model_type": "gpt_bigcode", **ONE, "multi_query": False}, both((0,), 3, 10)),
    "zamba": (
        {
            "model_type": "zamba", **HEADS, "attention_head_dim": 11,
            "layers_block_type": ["full_attention"],
        },
        both((0,), 3, 11),
    ),
    "latent": ({"model_type": "deepseek_v3", "num_hidden_layers": 1, **MLA},
        {"latent": ((0,), (9,))}),
    "two latents a layer": (
        {"model_type": "longcat_flash", "num_layers": 2, **MLA}, {"latent": ((0, 1, 2, 3), (9,))},
    ),
    "indexed": (
        {**INDEXED, "index_head_dim": 5},
        {"latent": ((0, 1), (9,)), "index_k": ((0, 1), (5,))},
    ),
    "indexer shared": (
        {**INDEXED, "index_head_dim": 5, "indexer_types": ["full", "shared"]},
        {"latent": ((0, 1), (9,)), "index_k": ((0,), (5,))},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_keeps_these_rows(case: str) -> None:
    config, rows = ATTENTION[case]
    assert kept(config) == [rows]


def test_sliding_layers_of_mimo_have_twice_the_key_heads_and_all_have_narrower_values() -> None:
    config = {
        "model_type": "mimo_v2_flash", **HEADS, "v_head_dim": 8, "sliding_window": 40,
        "layer_types": [FULL, SLIDING],
    }  # fmt: skip
    assert kept(config) == [
        {"k": ((0,), (3, 10)), "v": ((0,), (3, 8))},
        {"k": ((1,), (6, 10)), "v": ((1,), (6, 8))},
    ]


def test_a_list_of_indexers_names_every_layer() -> None:
    with pytest.raises(ConfigError, match="indexer_types must be a list with an entry for each"):
        derive({**INDEXED, "index_head_dim": 5, "indexer_types": ["full"]})


# --- what a state layer keeps --------------------------------------------------------------------


def state(*layers: int, conv: tuple[int, int], recurrent: tuple[int, ...]) -> Kept:
    return {"conv": (layers, conv), "recurrent": (layers, recurrent)}


STATES: Final[dict[str, tuple[dict[str, object], Kept]]] = {
    # Queries and keys of 2 heads of 16, values of 4 heads of 12: one convolution over all.
    "gated delta": (
        {
            "model_type": "qwen3_next", "layer_types": [LINEAR], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
            "linear_conv_kernel_dim": 3,
        },
        state(0, conv=(2 * 32 + 48, 3), recurrent=(4, 16, 12)),
    ),
    "kimi delta": (
        {
            "model_type": "kimi_linear", "layer_types": [LINEAR], "linear_num_heads": 3,
            "linear_head_dim": 5, "linear_conv_kernel_dim": 2,
        },
        state(0, conv=(45, 2), recurrent=(3, 5, 5)),
    ),
    "short convolution": (
        {"model_type": "lfm2", "layer_types": ["conv"], "hidden_size": 24, "conv_L_cache": 3},
        {"conv": ((0,), (24, 3))},
    ),
    "mamba": (
        {
            "model_type": "falcon_mamba", "num_hidden_layers": 2, "intermediate_size": 20,
            "conv_kernel": 4, "state_size": 6,
        },
        state(0, 1, conv=(20, 4), recurrent=(20, 6)),
    ),
    "zamba": (
        {
            "model_type": "zamba", "layers_block_type": ["mamba"], "hidden_size": 24,
            "mamba_expand": 2, "n_mamba_heads": 4, "mamba_d_conv": 3, "mamba_d_state": 6,
        },
        state(0, conv=(48, 3), recurrent=(4, 12, 6)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_a_state_layer_keeps_one_snapshot(case: str) -> None:
    config, rows = STATES[case]
    assert kept(config) == [{}, rows]
    _, group = derive(config).groups
    assert {b.name: (b.rows_per_page, b.dtype) for b in group.buffers} == {
        name: (1, "float32" if name == "recurrent" else "float16") for name in rows
    }


@pytest.mark.parametrize("family", sorted(MAMBA2_BY_FAMILY))
def test_mamba_2_has_the_same_five_sizes_by_any_familys_names(family: str) -> None:
    """4 heads of 6 and 2 groups of a state of 5: 24 channels, and 2 x 2 x 5 for B and C."""
    *_, rows = kept({"model_type": family, **MAMBA2_BY_FAMILY[family]})
    assert {name: shape for name, (_, shape) in rows.items()} == {
        "conv": (44, 3), "recurrent": (4, 6, 5),
    }  # fmt: skip


# --- which type each layer has -------------------------------------------------------------------


def test_jamba_has_attention_once_a_period() -> None:
    config = {
        "model_type": "jamba", **HEADS, "num_hidden_layers": 7, "attn_layer_period": 3,
        "attn_layer_offset": 1, "mamba_expand": 2, "mamba_d_conv": 4, "mamba_d_state": 6,
    }  # fmt: skip
    assert kept(config) == [
        both((1, 4), 3, 10),
        state(0, 2, 3, 5, 6, conv=(48, 4), recurrent=(48, 6)),
    ]


def test_bamba_has_attention_where_it_is_listed() -> None:
    config = {"model_type": "bamba", **THREE, **BAMBA}
    assert [set(rows) for rows in kept(config)] == [set(), {"conv", "recurrent"}]
    mixed = kept({**config, "attn_layer_indices": [1]})
    assert mixed[0] == both((1,), 3, 10)
    assert mixed[1]["conv"] == ((0, 2), (44, 3))


def test_each_layer_of_falcon_h1_has_attention_and_a_state() -> None:
    anchor, snapshot = kept({"model_type": "falcon_h1", **THREE, **BAMBA})
    assert anchor == both((0, 1, 2), 3, 10)
    assert snapshot["recurrent"][0] == (0, 1, 2)


@pytest.mark.parametrize(
    ("old", "new"),
    [("mamba", LINEAR), ("attention", FULL), ("deepseek_sparse_attention", "indexed_attention")],
)
def test_old_names_of_layer_types_mean_the_new_ones(old: str, new: str) -> None:
    fields = {**HEADS, **BAMBA, **MLA, "index_head_dim": 5}
    family = "glm_moe_dsa" if new == "indexed_attention" else "granitemoehybrid"
    here, there = (
        kept({"model_type": family, **fields, "layer_types": [name]}) for name in (old, new)
    )
    assert here == there


def test_a_layer_slides_or_has_chunks_as_its_own_configuration_says() -> None:
    config = {
        "model_type": "mistral", **THREE, "sliding_window": 40, "attention_chunk_size": 32,
        "per_layer_config": {
            "1": {"sliding_window": None},
            "2": {"sliding_window": None, "attention_chunk_size": None},
        },
    }  # fmt: skip
    spec = derive(config)
    rules = {group.retention: group.buffers[0].layers for group in spec.groups}
    assert rules == {KeepAll(): (2,), KeepWindow(40): (0,), KeepChunk(32): (1,)}


def test_lower_layers_of_qwen_are_full_and_others_ignore_the_field() -> None:
    config = {**THREE, "sliding_window": 40, "max_window_layers": 2}
    for family, sliding in (("qwen2", (2,)), ("qwen3", (2,)), ("mistral", (0, 1, 2))):
        window = derive({"model_type": family, **config}).groups[1]
        assert (family, window.buffers[0].layers) == (family, sliding)


@pytest.mark.parametrize("name", ["moe", "mlp", "dummy"])
def test_a_layer_without_attention_keeps_nothing(name: str) -> None:
    config = {"model_type": "nemotron_h", **HEADS, "layers_block_type": [name, FULL]}
    assert kept(config) == [both((1,), 3, 10)]


@pytest.mark.parametrize("name", [LINEAR, "conv", "hybrid"])
def test_a_family_without_states_has_no_state_layer(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'gemma2': layer 0 has the layer type '{name}'"):
        derive({"model_type": "gemma2", **HEADS, "layer_types": [name]})


def test_the_least_window_is_one_token() -> None:
    config = {"model_type": "mistral", **ONE, "sliding_window": 1}
    assert derive(config).groups[1].retention == KeepWindow(1)
    with pytest.raises(ConfigError, match="sliding_window must be at least 1, got 0"):
        derive({**config, "sliding_window": 0})
