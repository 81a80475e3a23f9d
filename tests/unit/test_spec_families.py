"""The derived spec against the tensors that Hugging Face's own cache holds, family by family.

A tiny random bf16 model of each family runs a short prefill; every layer's shapes, dtypes and bytes
must be those of the spec, and the spec must name no layer that caches nothing.
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from math import prod

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DummyLayer, DynamicSlidingWindowLayer

from stratakv.core.ids import LayerId
from stratakv.engine.huggingface.model_facts import plain_config
from stratakv.spec.derive import shared_layers, spec_of
from stratakv.spec.families import FAMILIES
from stratakv.spec.groups import BufferSpec, CacheSpec
from stratakv.spec.retention import KeepBoundary, KeepChunk, KeepWindow, Retention
from stratakv.spec.support import refusal
from tests.fixtures.tiny_configs import tiny_config

TOKENS = 53
PAGE = 16
# Among the sizes of the engine's own four, head_dim is hidden / heads: here they must differ.
UNLIKE = {family: {"head_dim": 24} for family in ("llama", "qwen3", "gemma3_text", "gpt_oss")}


def config_of(family: str) -> PreTrainedConfig:
    return tiny_config(family, **UNLIKE.get(family, {}))


def prefill(config: PreTrainedConfig) -> DynamicCache:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    cache = DynamicCache(config=config)
    taken = inspect.signature(model.forward).parameters
    name = "cache_params" if "cache_params" in taken else "past_key_values"
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
    spec = spec_of(plain_config(config), page_tokens=PAGE, dtype="bfloat16")
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
    spec = spec_of(plain_config(config), page_tokens=PAGE, dtype="bfloat16")
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
    shared = shared_layers(plain_config(config))
    dummies = [
        i for i, la in enumerate(DynamicCache(config=config).layers) if isinstance(la, DummyLayer)
    ]
    assert sorted(shared) == dummies
    modes = config.kv_sharing_modes
    for reader, owner in shared.items():
        assert modes[owner] == "store"
        assert config.layer_types[owner] == config.layer_types[reader]
        assert not buffers_of(spec_of(plain_config(config), page_tokens=4, dtype="float32"), reader)


def test_no_layer_shares_where_the_family_does_not() -> None:
    assert shared_layers(plain_config(config_of("llama"))) == {}


def test_pages_of_hugging_faces_float32_model_are_twice_as_large() -> None:
    fields = plain_config(config_of("gemma3_text"))
    half, full = (spec_of(fields, page_tokens=PAGE, dtype=d) for d in ("bfloat16", "float32"))
    assert [2 * g.page_bytes for g in half.groups] == [g.page_bytes for g in full.groups]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_engine_runs_every_family_that_can_be_derived(family: str) -> None:
    spec = spec_of(plain_config(config_of(family)), page_tokens=PAGE, dtype="bfloat16")
    assert refusal(spec) is None


def test_engine_refuses_what_it_does_not_run_with_the_reason() -> None:
    spec = spec_of(plain_config(config_of("llama")), page_tokens=PAGE, dtype="bfloat16")
    (anchor,) = spec.groups
    odd = replace(anchor.buffers[0], name="c7_summary")
    reason = refusal(replace(spec, groups=(replace(anchor, buffers=(odd,)),)))
    assert reason is not None
    assert "c7_summary of group anchor" in reason
    two = (odd, replace(odd, name="a_sketch"), anchor.buffers[1])
    reason = refusal(replace(spec, groups=(replace(anchor, buffers=two),)))
    assert str(reason).startswith("buffers a_sketch, c7_summary of group anchor are derived")
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
