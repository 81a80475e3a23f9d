"""The derived spec against the tensors that Hugging Face's own cache holds, family by family.

A tiny random bf16 model of each family runs a short prefill; every layer's shapes, dtypes and bytes
must be those of the spec, and the spec must name no layer that caches nothing.
"""

from collections.abc import Mapping
from math import prod

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DummyLayer, DynamicSlidingWindowLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from stratakv.core.ids import LayerId
from stratakv.spec.derive import shared_layers, spec_of
from stratakv.spec.families import FAMILIES
from stratakv.spec.groups import BufferSpec, CacheSpec
from stratakv.spec.retention import KeepBoundary, KeepChunk, KeepWindow, Retention
from stratakv.spec.support import refusal

TOKENS = 21
PAGE = 16
WINDOW = {"sliding_window": 8}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

# Sizes differ from each other wherever they can: head_dim is not hidden / heads, key heads are not
# query heads, so that a field that is read in another's place gives another shape.
BASE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
MOE = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "shared_expert_intermediate_size": 32,
}  # fmt: skip
MLA = {
    "q_lora_rank": 32, "kv_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 8, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
INDEX = {"index_n_heads": 4, "index_head_dim": 18, "index_topk": 8}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "linear_conv_kernel_dim": 3,
}  # fmt: skip
BAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 20, "mamba_n_groups": 2,
    "mamba_d_conv": 3, "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip


def types(*names: str) -> dict[str, object]:
    return {"layer_types": list(names), "num_hidden_layers": len(names)}


CONFIGS: dict[str, dict[str, object]] = {
    "llama": {}, "mistral": WINDOW, "ministral3": {}, "mixtral": MOE, "gemma": {}, "granite": {},
    "granitemoe": MOE, "glm": {}, "glm4": {}, "seed_oss": {}, "arcee": {}, "ernie4_5": {},
    "smollm3": {}, "olmoe": {**MOE, "head_dim": 16}, "olmo": {}, "olmo2": {}, "cohere": {},
    "starcoder2": WINDOW,
    "phi3": WINDOW, "minimax_m2": MOE, "glm4_moe": {**MOE, "first_k_dense_replace": 1},
    "qwen2": {**WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": MOE, "qwen3_moe": {**MOE, **WINDOW, "use_sliding_window": True},
    "ministral": {**WINDOW, **types(SLIDING, FULL, SLIDING, FULL)},
    "gemma2": WINDOW,
    "gemma3_text": {**WINDOW, **types(SLIDING, SLIDING, FULL)},
    "gemma3n_text": {
        **WINDOW, **types(SLIDING, FULL, SLIDING, SLIDING, FULL), "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
        "intermediate_size": [48] * 5, "activation_sparsity_pattern": [0.0] * 5,
    },
    "gemma4_text": {
        **WINDOW, **types(SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL),
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8, "global_head_dim": 32, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gpt_oss": {**MOE, **WINDOW, **types(SLIDING, FULL, SLIDING, FULL)},
    "cohere2": {**WINDOW, **types(SLIDING, SLIDING, SLIDING, FULL)},
    "olmo3": {**WINDOW, **types(SLIDING, FULL)},
    "exaone4": {**WINDOW, **types(SLIDING, FULL)},
    "afmoe": {**MOE, **WINDOW, **types(SLIDING, FULL)},
    "mimo_v2_flash": {**MOE, **WINDOW, **types(FULL, SLIDING, SLIDING), "v_head_dim": 12},
    "llama4_text": {
        **MOE, **types("chunked_attention", FULL), "attention_chunk_size": 8,
        "intermediate_size_mlp": 64, "moe_layers": [1], "no_rope_layers": [1, 0],
    },
    "deepseek_v2": {**MLA, **MOE}, "deepseek_v3": {**MLA, **MOE}, "glm4_moe_lite": {**MLA, **MOE},
    "deepseek_v32": {**MLA, **MOE, **INDEX},
    "glm_moe_dsa": {**MLA, **MOE, **INDEX, "indexer_types": ["full", "shared", "full", "shared"]},
    "deepseek_v4": {
        **MOE, **INDEX, **WINDOW, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 32,
        "o_groups": 2, "o_lora_rank": 16, "hc_mult": 2, "num_hash_layers": 1,
        "partial_rotary_factor": 0.25, "index_head_dim": 16,
        "compress_rates": {
            "compressed_sparse_attention": 4, "heavily_compressed_attention": 16,
        },
        **types(SLIDING, "heavily_compressed_attention", "compressed_sparse_attention"),
    },
    "qwen3_next": {**DELTA, **MOE, **types(LINEAR, LINEAR, FULL)},
    "qwen3_5_text": {**DELTA, **types(LINEAR, LINEAR, FULL)},
    "qwen3_5_moe_text": {**DELTA, **MOE, **types(LINEAR, LINEAR, FULL)},
    "olmo_hybrid": {**DELTA, **types(LINEAR, LINEAR, FULL)},
    "kimi_linear": {
        **MLA, **MOE, **types(LINEAR, FULL), "linear_num_heads": 4, "linear_head_dim": 16,
        "linear_conv_kernel_dim": 3,
    },
    "nemotron_h": {
        **MOE, "layers_block_type": ["mamba", "moe", "attention", "mamba"], "mamba_num_heads": 8,
        "mamba_head_dim": 12, "ssm_state_size": 20, "n_groups": 2, "chunk_size": 16,
        "conv_kernel": 3, "moe_shared_expert_intermediate_size": 32,
    },
    "falcon_h1": {**BAMBA, "mamba_d_ssm": 128},
    "bamba": {**BAMBA, "attn_layer_indices": [3]},
    "granitemoehybrid": {
        **MOE, **BAMBA, "shared_intermediate_size": 48,
        **types("mamba", "mamba", "attention"),
    },
    "zamba2": {
        "mamba_d_state": 20, "mamba_ngroups": 2, "n_mamba_heads": 8, "mamba_headdim": 16,
        "mamba_d_conv": 3, "chunk_size": 16, "num_mem_blocks": 1, "adapter_rank": 8,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_key_value_heads": 4,
        "head_dim": None,
    },
    "mamba2": {
        "num_heads": 8, "head_dim": 16, "state_size": 20, "n_groups": 2, "chunk_size": 16,
        "conv_kernel": 3, "expand": 2,
    },
    "lfm2": {**types("conv", "conv", FULL), "conv_L_cache": 5},
    "lfm2_moe": {**MOE, **types("conv", "conv", FULL), "conv_L_cache": 5, "num_dense_layers": 1},
    "lfm3": {**types("conv", FULL), "conv_L_cache": 5},
}  # fmt: skip


def config_of(family: str) -> PreTrainedConfig:
    fields = {**BASE, **CONFIGS[family]}
    return CONFIG_MAPPING[family](**{k: v for k, v in fields.items() if v is not None})


def prefill(config: PreTrainedConfig) -> DynamicCache:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    cache = DynamicCache(config=config)
    name = "cache_params" if config.model_type == "mamba2" else "past_key_values"
    with torch.no_grad():
        model(torch.randint(3, 60, (1, TOKENS)), **{name: cache}, use_cache=True)
    return cache


def buffers_of(spec: CacheSpec, layer: int) -> dict[str, tuple[BufferSpec, Retention]]:
    return {
        buffer.name: (buffer, group.retention)
        for group in spec.groups
        for buffer in group.buffers
        if layer in buffer.layers
    }


def torch_dtype(buffer: BufferSpec) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[buffer.dtype]


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def held(layer: object, *names: str) -> dict[str, torch.Tensor]:
    """The tensors among a cache layer's attributes; states are in dicts by number."""
    values = {name: vars(layer).get(name) for name in names}
    values = {n: v.get(0) if isinstance(v, dict) else v for n, v in values.items()}
    return {n: v for n, v in values.items() if isinstance(v, torch.Tensor) and v.numel()}


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"deepseek_v4"}))
def test_spec_is_what_hugging_face_caches(family: str) -> None:
    config = config_of(family)
    spec = spec_of(config.to_dict(), page_tokens=PAGE, dtype="bfloat16")
    cache = prefill(config)
    assert len(cache.layers) == config.num_hidden_layers
    for index, layer in enumerate(cache.layers):
        kept = buffers_of(spec, index)
        states = held(layer, "conv_states", "recurrent_states")
        rows = held(layer, "keys", "values", "indexer_keys")
        assert bool(kept) == bool(states or rows), f"layer {index}: {type(layer).__name__}"

        in_state = {n: b for n, (b, rule) in kept.items() if rule == KeepBoundary()}
        assert [b.row_shape for b in in_state.values()] == [t.shape[1:] for t in states.values()]
        assert [torch_dtype(b) for b in in_state.values()] == [t.dtype for t in states.values()]
        assert sum(b.layer_bytes for b in in_state.values()) == bytes_of(states)

        in_tokens = {n: b for n, (b, rule) in kept.items() if rule != KeepBoundary()}
        tokens = rows["keys"].shape[-2] if rows else 1
        assert sum(b.layer_bytes for b in in_tokens.values()) * tokens == bytes_of(rows) * PAGE
        if "k" in in_tokens:
            assert in_tokens["k"].row_shape == (rows["keys"].shape[1], rows["keys"].shape[3])
            assert in_tokens["v"].row_shape == (rows["values"].shape[1], rows["values"].shape[3])
        assert all(torch_dtype(b) == torch.bfloat16 for b in in_tokens.values())

        rules = {rule for _, rule in kept.values()} - {KeepBoundary()}
        sizes = {rule.tokens for rule in rules if isinstance(rule, KeepWindow | KeepChunk)}
        slides = isinstance(layer, DynamicSlidingWindowLayer)
        assert sizes == ({layer.sliding_window} if slides else set())


def test_deepseek_v4_holds_each_tensor_of_hugging_face_once() -> None:
    config = config_of("deepseek_v4")
    spec = spec_of(config.to_dict(), page_tokens=PAGE, dtype="bfloat16")
    local, heavy, sparse = prefill(config).layers
    row = {b.name: b.row_shape for g in spec.groups for b in g.buffers}
    rows = {b.name: b.rows_per_page for g in spec.groups for b in g.buffers}

    for layer in (local, heavy, sparse):
        # Hugging Face holds the one vector twice, as key and as value.
        assert torch.equal(layer.keys, layer.values)
        assert row["latent"] == (layer.keys.shape[3],)
    assert row["c16"] == heavy.compressed_kv["compressor"].shape[2:]
    assert heavy.compressed_kv["compressor"].shape[1] == TOKENS // PAGE * rows["c16"]
    assert row["c16_open"] == (2, 16, heavy.buffer_kv["compressor"].shape[2])
    for name, part in (("c4", "compressor"), ("c4_index", "indexer")):
        entries = "c4" if part == "compressor" else "c4_index_k"
        assert row[entries] == sparse.compressed_kv[part].shape[2:]
        assert sparse.compressed_kv[part].shape[1] == TOKENS // (PAGE // rows[entries])
        assert row[f"{name}_overlap"] == (2, *sparse.overlap_kv[part].shape[1:])
        assert sparse.overlap_gate[part].shape == sparse.overlap_kv[part].shape
        assert row[f"{name}_open"] == (2, 4, sparse.buffer_kv[part].shape[2])
    assert {b.dtype for g in spec.groups for b in g.buffers} == {"bfloat16"}
    assert [g.name for g in spec.groups] == ["anchor", "swa", "open"]


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_a_cache_own_no_bytes_and_name_the_owner(family: str) -> None:
    config = config_of(family)
    shared = shared_layers(config.to_dict())
    dummies = [
        i for i, la in enumerate(DynamicCache(config=config).layers) if isinstance(la, DummyLayer)
    ]
    assert sorted(shared) == dummies
    modes = config.kv_sharing_modes
    for reader, owner in shared.items():
        assert modes[owner] == "store"
        assert config.layer_types[owner] == config.layer_types[reader]
        assert not buffers_of(spec_of(config.to_dict(), page_tokens=4, dtype="float32"), reader)


def test_no_layer_shares_where_the_family_does_not() -> None:
    assert shared_layers(config_of("llama").to_dict()) == {}


def test_pages_of_hugging_faces_float32_model_are_twice_as_large() -> None:
    fields = config_of("gemma3_text").to_dict()
    half, full = (spec_of(fields, page_tokens=PAGE, dtype=d) for d in ("bfloat16", "float32"))
    assert [2 * g.page_bytes for g in half.groups] == [g.page_bytes for g in full.groups]


SERVED = {
    "llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "mistral", "llama4_text", "mimo_v2_flash",
}  # fmt: skip
REFUSED = {
    "mamba2": "state groups (state)", "qwen3_next": "state groups (state)", "lfm2": "state groups",
    "deepseek_v3": "latent attention (anchor: latent)", "kimi_linear": "latent attention",
    "deepseek_v32": "latent attention",
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(SERVED))
def test_engine_accepts_key_value_attention(family: str) -> None:
    assert refusal(spec_of(config_of(family).to_dict(), page_tokens=PAGE, dtype="bfloat16")) is None


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_engine_refuses_the_rest_with_the_reason(family: str) -> None:
    reason = refusal(spec_of(config_of(family).to_dict(), page_tokens=PAGE, dtype="bfloat16"))
    assert reason is not None
    assert REFUSED[family] in reason
    assert "the engine does not run them yet" in reason


def test_bytes_per_token_of_a_known_checkpoint() -> None:
    """Llama 3.1 8B in bf16: 32 layers x 2 x 8 heads x 128 x 2 bytes = 128 KiB per token."""
    fields = {
        "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "hidden_size": 4096,
    }  # fmt: skip
    spec = spec_of(fields, page_tokens=64, dtype="bfloat16")
    assert spec.groups[0].page_bytes == 64 * 128 * 1024
    assert prod(spec.groups[0].buffers[0].row_shape) == 8 * 128
    assert spec.groups[0].buffers[0].layers == tuple(LayerId(i) for i in range(32))
