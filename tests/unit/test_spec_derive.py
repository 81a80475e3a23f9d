"""How layers become groups and buffers, and what is refused instead of guessed."""

import re

import pytest

from stratakv.core.errors import ConfigError
from stratakv.core.ids import LayerId
from stratakv.engine.huggingface.model_facts import plain_config
from stratakv.spec.derive import check_composite, default_page_tokens, shared_layers, spec_of
from stratakv.spec.groups import CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepChunk, KeepLive, KeepWindow
from stratakv.spec.support import key_value_places, refusal
from tests.fixtures.tiny_configs import tiny_config

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64,
    "head_dim": 16,
}  # fmt: skip
LLAMA = {"model_type": "llama", **SIZES}
GEMMA = {
    "model_type": "gemma3_text", **SIZES, "sliding_window": 512,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
}  # fmt: skip
V4 = {
    "model_type": "deepseek_v4", "num_hidden_layers": 3, "head_dim": 512, "index_head_dim": 128,
    "sliding_window": 128,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "layer_types": [SLIDING, "compressed_sparse_attention", "heavily_compressed_attention"],
}  # fmt: skip
MAMBA = {
    "model_type": "mamba2", "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16,
    "state_size": 20, "n_groups": 1, "conv_kernel": 4,
}  # fmt: skip


def derive(config: dict[str, object], page_tokens: int = 16) -> CacheSpec:
    return spec_of(config, page_tokens=page_tokens, dtype="bfloat16")


def shape_of(group: CacheGroup) -> dict[str, tuple[tuple[int, ...], int, tuple[int, ...]]]:
    return {b.name: (tuple(b.layers), b.rows_per_page, b.row_shape) for b in group.buffers}


def test_full_attention_is_the_anchor_alone() -> None:
    (anchor,) = derive(LLAMA).groups
    assert (anchor.id, anchor.name, anchor.retention) == (0, "anchor", KeepAll())
    assert shape_of(anchor) == dict.fromkeys(("k", "v"), ((0, 1, 2, 3), 16, (2, 16)))


def test_a_window_is_a_group_of_its_own_layers() -> None:
    anchor, swa = derive(GEMMA).groups
    assert (swa.id, swa.name, swa.retention) == (1, "swa", KeepWindow(512))
    assert {b.layers for b in anchor.buffers} == {(1, 3)}
    assert {b.layers for b in swa.buffers} == {(0, 2)}


def test_sliding_layers_alone_leave_an_anchor_without_bytes() -> None:
    anchor, swa = derive({**LLAMA, "model_type": "mistral", "sliding_window": 64}).groups
    assert (anchor.retention, anchor.buffers, anchor.page_bytes) == (KeepAll(), (), 0)
    assert len(swa.buffers) == 2


def test_state_layers_alone_leave_an_anchor_without_bytes() -> None:
    anchor, state = derive(MAMBA).groups
    assert anchor.buffers == ()
    assert (state.name, state.retention) == ("state", KeepBoundary())
    assert shape_of(state) == {"conv": ((0, 1), 1, (168, 4)), "recurrent": ((0, 1), 1, (8, 16, 20))}
    assert [b.dtype for b in state.buffers] == ["bfloat16", "float32"]


def test_a_snapshots_bytes_do_not_depend_on_the_page_size() -> None:
    small, large = derive(MAMBA, page_tokens=1), derive(MAMBA, page_tokens=64)
    assert small.groups[1].page_bytes == large.groups[1].page_bytes


def test_two_windows_are_two_groups_in_the_order_of_their_size() -> None:
    config = {**GEMMA, "per_layer_config": {"0": {"sliding_window": 1024}}}
    groups = derive(config).groups
    assert [(g.id, g.name) for g in groups] == [(0, "anchor"), (1, "swa.512"), (2, "swa.1024")]
    assert groups[2].buffers[0].layers == (0,)


def test_layers_of_another_shape_are_buffers_of_the_same_group() -> None:
    config = {**LLAMA, "per_layer_config": {"01": {"head_dim": 32}, "03": {"head_dim": 32}}}
    spec = derive(config)
    assert shape_of(spec.groups[0]) == {
        "k": ((0, 2), 16, (2, 16)), "v": ((0, 2), 16, (2, 16)),
        "k.1": ((1, 3), 16, (2, 32)), "v.1": ((1, 3), 16, (2, 32)),
    }  # fmt: skip
    places = key_value_places(spec)
    assert {layer: (p.key.name, p.value.name) for layer, p in places.items()} == {
        0: ("k", "v"), 1: ("k.1", "v.1"), 2: ("k", "v"), 3: ("k.1", "v.1"),
    }  # fmt: skip
    assert refusal(spec) is None


def test_every_attention_layer_has_one_place() -> None:
    places = key_value_places(derive(GEMMA))
    assert {layer: place.group for layer, place in places.items()} == {0: 1, 1: 0, 2: 1, 3: 0}
    assert key_value_places(derive(MAMBA)) == {}


def test_a_chunk_is_no_window() -> None:
    config = {
        **LLAMA, "model_type": "llama4_text", "attention_chunk_size": 8192,
        "layer_types": ["chunked_attention"] * 3 + [FULL],
    }  # fmt: skip
    assert derive(config).groups[1].retention == KeepChunk(8192)
    assert derive(config).groups[1].name == "chunk"


def test_deepseek_v4_is_the_designs_table() -> None:
    anchor, swa, live = derive(V4, page_tokens=128).groups
    assert shape_of(anchor) == {
        "c4": ((1,), 32, (512,)), "c4_index_k": ((1,), 32, (128,)), "c128": ((2,), 1, (512,)),
    }  # fmt: skip
    assert swa.retention == KeepWindow(128)
    assert shape_of(swa) == {
        "latent": ((0, 1, 2), 128, (512,)),
        "c4_overlap": ((1,), 1, (2, 4, 512)),
        "c4_index_overlap": ((1,), 1, (2, 4, 128)),
    }
    assert (live.name, live.retention) == ("open", KeepLive())
    assert shape_of(live) == {
        "c4_open": ((1,), 1, (2, 4, 1024)), "c4_index_open": ((1,), 1, (2, 4, 256)),
        "c128_open": ((2,), 1, (2, 128, 512)),
    }  # fmt: skip
    # The figures that were worked out from the model's own code: per token and layer.
    tokens = {b.name: b.page_bytes / 128 for b in anchor.buffers}
    assert tokens["c4"] + tokens["c4_index_k"] == 320
    assert tokens["c128"] == 8


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"sliding_window": None}, 0),
        ({"sliding_window": 64}, 4),
        ({"sliding_window": 64, "use_sliding_window": False}, 0),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, 1),
        ({"sliding_window": 64, "layer_types": [SLIDING, FULL, FULL, FULL]}, 1),
    ],
)
def test_a_family_that_names_no_layer_types_slides_as_its_fields_say(
    config: dict[str, object], count: int
) -> None:
    spec = derive({**LLAMA, "model_type": "qwen2", **config})
    sliding = [g for g in spec.groups if g.retention == KeepWindow(64)]
    assert sum(len(g.buffers[0].layers) for g in sliding) == count
    assert len(spec.groups) == (2 if count else 1)


def test_key_heads_and_head_size_have_the_familys_defaults() -> None:
    config = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "head_dim")}
    assert derive(config).groups[0].buffers[0].row_shape == (8, 8)


def test_layers_without_attention_own_nothing() -> None:
    config = {
        "model_type": "nemotron_h", **SIZES,
        "layers_block_type": ["moe", "attention", "mlp", "moe"],
    }  # fmt: skip
    (anchor,) = derive(config).groups
    assert anchor.buffers[0].layers == (1,)


def test_a_shared_layer_without_an_owner_is_refused() -> None:
    config = {**GEMMA, "model_type": "gemma4_text", "num_kv_shared_layers": 3}
    with pytest.raises(ConfigError, match="layer 1 shares the cache of a 'full_attention' layer"):
        shared_layers(config)
    owners = shared_layers({**config, "num_kv_shared_layers": 2})
    assert owners == {LayerId(2): LayerId(0), LayerId(3): LayerId(1)}


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "family": ({**LLAMA, "model_type": "rwkv"}, r"'rwkv' is not known; allowed are .*llama"),
    "composite": ({**LLAMA, "model_type": "gemma3"}, "'gemma3' is not known"),
    "no family": ({}, "model_type must be a string, got None"),
    "layer type": (
        {**GEMMA, "layer_types": [FULL, FULL, "wavelet_attention", FULL]},
        "'gemma3_text': layer 2 has the layer type 'wavelet_attention'",
    ),
    "state in a family without one": (
        {**GEMMA, "layer_types": [FULL, FULL, FULL, "linear_attention"]}, "'linear_attention'",
    ),
    "v4 layer type": (
        {**V4, "compress_rates": {}, "layer_types": [FULL] * 3}, "'deepseek_v4'.*'full_attention'",
    ),
    "no block": (
        {**V4, "compress_rates": {"compressed_sparse_attention": 0}}, "compress_rates must be a",
    ),
    "types left out": (
        {k: v for k, v in GEMMA.items() if k != "layer_types"}, "layer_types must be a list",
    ),
    "length": ({**GEMMA, "num_hidden_layers": 5}, "num_hidden_layers must be 4, the number of"),
    "field": ({**LLAMA, "num_attention_heads": None}, "num_attention_heads must be an integer"),
    "boolean": ({**LLAMA, "head_dim": True}, "head_dim must be an integer, got True"),
    "window": ({**GEMMA, "sliding_window": 0}, "sliding_window must be at least 1, got 0"),
    "no window": ({**GEMMA, "sliding_window": None}, "sliding_window must be an integer, got None"),
    "no convolution": ({**MAMBA, "conv_kernel": 0}, "conv_kernel must be at least 1, got 0"),
    "empty row": ({**LLAMA, "head_dim": 0}, r"shape \(2, 0\) has no bytes"),
    "not causal": ({**GEMMA, "is_causal": False}, "'gemma3_text': is_causal False: .*; allowed is"),
    "causal is nothing": ({**GEMMA, "is_causal": None}, "is_causal None"),
    "encoder": ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "encoder of all": ({**GEMMA, "use_bidirectional_attention": "all"}, "'gemma3_text': use_bidir"),
    "states outside": ({**LLAMA, "model_type": "recurrent_gemma"}, "keeps its states in the mod"),
    "no cache": ({**MAMBA, "num_hidden_layers": 0}, "no layer caches anything"),
    "compressed page": (V4, r"--page-tokens 16: .* allowed are multiples of 128"),
    "page of its smaller blocks": (
        {**V4, "layer_types": [SLIDING, *["compressed_sparse_attention"] * 2]},
        r"--page-tokens 16: .* a page ends where no row is half filled.* multiples of 128",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_is_not_known_is_refused_by_name(case: str) -> None:
    config, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as refused:
        derive(config)
    assert re.search("allowed|must be", str(refused.value)), "what may it be?"


def test_a_page_has_64_tokens_or_what_the_models_blocks_ask_for() -> None:
    assert [default_page_tokens(config) for config in (LLAMA, GEMMA, MAMBA)] == [64] * 3
    assert default_page_tokens(V4) == 128
    small = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 48}
    assert default_page_tokens({**V4, "compress_rates": small}) == 96
    assert default_page_tokens({**V4, "compress_rates": {"compressed_sparse_attention": 1}}) == 64
    for page_tokens in (128, 256, 1280):
        assert derive(V4, page_tokens).page_tokens == page_tokens


def test_bidirectional_images_leave_text_as_it_is() -> None:
    assert derive({**GEMMA, "use_bidirectional_attention": "vision"}) == derive(GEMMA)


@pytest.mark.parametrize(
    ("whole", "text"), [("gemma3", "gemma3_text"), ("fuyu", "persimmon"), ("llama", "llama")]
)
def test_a_proven_composite_and_a_model_of_text_alone_are_served(whole: str, text: str) -> None:
    check_composite(whole, text)


@pytest.mark.parametrize(
    ("whole", "text", "words"),
    [
        ("gemma3", "llama", "'gemma3' cannot be served: at most its text part, 'llama'"),
        ("llava", "llama", "'llava' cannot be served: at most its text part, 'llama', is proven"),
        ("llava", "llama", "allowed with images or sound beside text are fuyu, gemma3, gemma4"),
        ("gemma3n", "gemma3n_text", "'gemma3n' cannot be served as a whole: without timm"),
    ],
)
def test_a_known_text_part_proves_nothing_about_the_whole(
    whole: str, text: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_composite(whole, text)


def test_flags_are_named() -> None:
    with pytest.raises(ConfigError, match="--page-tokens 0"):
        derive(LLAMA, page_tokens=0)
    with pytest.raises(ConfigError, match=r"--dtype int4: allowed are bfloat16, float16"):
        spec_of(LLAMA, page_tokens=16, dtype="int4")


def test_bidirectional_attention_over_images_alone_is_served() -> None:
    assert derive({**GEMMA, "use_bidirectional_attention": "vision"}).groups


def test_roles_of_fewer_layers_than_there_are_are_refused() -> None:
    config = plain_config(tiny_config("glm_moe_dsa"))
    config["indexer_types"] = list(config["indexer_types"])[:1]
    with pytest.raises(ConfigError, match="indexer_types must be a list with an entry for each"):
        spec_of(config, page_tokens=16, dtype="float32")
