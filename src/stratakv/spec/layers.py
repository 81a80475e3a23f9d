"""What one layer of each kind keeps, read from its configuration field by field.

Owns which field says what. A layer type that a family does not have is refused, never guessed. Must
not know which family a layer is of (``families``), nor put layers together (``derive``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import TypeAlias

from stratakv.core.errors import ConfigError
from stratakv.core.ids import LayerId
from stratakv.spec.kinds import (
    LayerBuffer,
    PageFormat,
    compressed,
    index_keys,
    key_value,
    latent,
    open_block,
    overlap,
    shared_latent_window,
    state,
)
from stratakv.spec.model_config import ModelConfig
from stratakv.spec.retention import KeepChunk, KeepWindow, Retention

Buffers: TypeAlias = tuple[LayerBuffer, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its number, its type, and the configuration that holds for it."""

    id: LayerId
    type: str
    config: ModelConfig


Attention: TypeAlias = Callable[[Layer, Retention, PageFormat], Buffers]
State: TypeAlias = Callable[[Layer, PageFormat], Buffers]


def unknown_layer_type(layer: Layer, known: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"model type {layer.config.model_type!r}: layer {layer.id} has the layer type "
        f"{layer.type!r}; allowed are {', '.join(known)}"
    )


def positive(layer: Layer, field: str) -> int:
    """Tokens of a window, a chunk, or a convolution's width."""
    value = layer.config.integer(field)
    if value < 1:
        raise layer.config.fault(field, "at least 1")
    return value


# --- what attention keeps ------------------------------------------------------------------------


def head_sizes(config: ModelConfig, head_dim_field: str = "head_dim") -> tuple[int, int]:
    """(key heads, head size)."""
    query_heads = config.integer("num_attention_heads")
    heads = config.integer("num_key_value_heads", query_heads)
    if config.has(head_dim_field):
        return heads, config.integer(head_dim_field)
    return heads, config.integer("hidden_size") // query_heads


def heads(layer: Layer, rule: Retention, page: PageFormat) -> Buffers:
    kv_heads, head_dim = head_sizes(layer.config)
    return key_value(rule, page, heads=kv_heads, head_dim=head_dim)


def mimo_heads(layer: Layer, rule: Retention, page: PageFormat) -> Buffers:
    """MiMo-V2: narrower values, and twice the key heads in its sliding layers."""
    kv_heads, head_dim = head_sizes(layer.config)
    if layer.type == "sliding_attention":
        kv_heads *= 2
    value_dim = layer.config.integer("v_head_dim")
    return key_value(rule, page, heads=kv_heads, head_dim=head_dim, value_dim=value_dim)


def zamba_heads(layer: Layer, rule: Retention, page: PageFormat) -> Buffers:
    kv_heads, head_dim = head_sizes(layer.config, "attention_head_dim")
    return key_value(rule, page, heads=kv_heads, head_dim=head_dim)


def dbrx_heads(layer: Layer, rule: Retention, page: PageFormat) -> Buffers:
    _, head_dim = head_sizes(layer.config)
    kv_heads = layer.config.section("attn_config").integer("kv_n_heads")
    return key_value(rule, page, heads=kv_heads, head_dim=head_dim)


def bigcode_heads(layer: Layer, rule: Retention, page: PageFormat) -> Buffers:
    kv_heads, head_dim = head_sizes(layer.config)
    alone = layer.config.fields.get("multi_query") is True
    return key_value(rule, page, heads=1 if alone else kv_heads, head_dim=head_dim)


def mla(layer: Layer, rule: Retention, page: PageFormat) -> Buffers:
    rank = layer.config.integer("kv_lora_rank")
    return (latent(rule, page, rank=rank, rope_dim=layer.config.integer("qk_rope_head_dim")),)


def indexed_mla(layer: Layer, rule: Retention, page: PageFormat) -> Buffers:
    """MLA with an indexer; a "shared" layer reuses the selection of the layer before it."""
    roles = layer.config.items("indexer_types") if layer.config.has("indexer_types") else ()
    kept = mla(layer, rule, page)
    if roles and layer.id >= len(roles):
        raise layer.config.fault("indexer_types", "a list with an entry for each layer")
    if roles and roles[layer.id] == "shared":
        return kept
    return (*kept, index_keys(page, dim=layer.config.integer("index_head_dim")))


# --- what a state layer keeps --------------------------------------------------------------------


def gated_delta(layer: Layer, page: PageFormat) -> Buffers:
    """Gated DeltaNet: conv over queries, keys and values; one matrix per value head."""
    config = layer.config
    key_dim, value_dim = (
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
    )
    value_heads = config.integer("linear_num_value_heads")
    channels = 2 * config.integer("linear_num_key_heads") * key_dim + value_heads * value_dim
    conv = (channels, positive(layer, "linear_conv_kernel_dim"))
    return state(page, conv=conv, recurrent=(value_heads, key_dim, value_dim))


def kimi_delta(layer: Layer, page: PageFormat) -> Buffers:
    """Kimi Delta Attention: queries, keys and values alike."""
    count, dim = layer.config.integer("linear_num_heads"), layer.config.integer("linear_head_dim")
    conv = (3 * count * dim, positive(layer, "linear_conv_kernel_dim"))
    return state(page, conv=conv, recurrent=(count, dim, dim))


def short_conv(layer: Layer, page: PageFormat) -> Buffers:
    conv = (layer.config.integer("hidden_size"), positive(layer, "conv_L_cache"))
    return state(page, conv=conv, recurrent=None)


def mamba(layer: Layer, page: PageFormat) -> Buffers:
    """The first Mamba: no heads, one state per channel."""
    channels = layer.config.integer("intermediate_size")
    conv = (channels, positive(layer, "conv_kernel"))
    return state(page, conv=conv, recurrent=(channels, layer.config.integer("state_size")))


def jamba_state(layer: Layer, page: PageFormat) -> Buffers:
    channels = layer.config.integer("mamba_expand") * layer.config.integer("hidden_size")
    conv = (channels, positive(layer, "mamba_d_conv"))
    return state(page, conv=conv, recurrent=(channels, layer.config.integer("mamba_d_state")))


def zamba_state(layer: Layer, page: PageFormat) -> Buffers:
    """The first Mamba again, with its channels split into heads."""
    channels = layer.config.integer("mamba_expand") * layer.config.integer("hidden_size")
    count = layer.config.integer("n_mamba_heads")
    recurrent = (count, channels // count, layer.config.integer("mamba_d_state"))
    return state(page, conv=(channels, positive(layer, "mamba_d_conv")), recurrent=recurrent)


def mamba2(*, count: str, dim: str, groups: str, size: str, kernel: str) -> State:
    """Mamba-2, by the names that a family gives its five sizes."""

    def kept(layer: Layer, page: PageFormat) -> Buffers:
        config = layer.config
        head_count, head_dim = config.integer(count), config.integer(dim)
        state_size = config.integer(size)
        channels = head_count * head_dim + 2 * config.integer(groups) * state_size
        conv = (channels, positive(layer, kernel))
        return state(page, conv=conv, recurrent=(head_count, head_dim, state_size))

    return kept


# --- windows, chunks and DeepSeek-V4 -------------------------------------------------------------


def window_of(layer: Layer) -> KeepWindow:
    """Hugging Face keeps one token less, what the next query sees beside itself: the same pages
    at every page boundary unless the window is one more than a multiple of the page."""
    return KeepWindow(positive(layer, "sliding_window"))


def chunk_of(layer: Layer) -> KeepChunk:
    return KeepChunk(positive(layer, "attention_chunk_size"))


def block_tokens(config: ModelConfig) -> int:
    """DeepSeek-V4: tokens after which no compressed block of any layer is open."""
    rates = config.section("compress_rates")
    sizes = [rates.integer(name) for name in rates.fields]
    if any(size < 1 for size in sizes):
        raise config.fault("compress_rates", "a dict of numbers from 1 up")
    return lcm(*sizes)


def deepseek_v4(layer: Layer, page: PageFormat) -> Buffers:
    """A local window in every layer; compressed entries of 4 or 128 tokens beside it."""
    config, window = layer.config, window_of(layer).tokens
    dim = config.integer("head_dim")
    local = shared_latent_window(page, window=window, dim=dim)
    if layer.type == "sliding_attention":
        return (local,)
    both = ("heavily_compressed_attention", "compressed_sparse_attention")
    if layer.type not in both:
        raise unknown_layer_type(layer, ("sliding_attention", *both))
    if layer.type not in config.section("compress_rates").fields:
        raise config.fault("compress_rates", f"a dict with a number for {layer.type}")
    ratio = config.section("compress_rates").integer(layer.type)
    name = f"c{ratio}"
    entries = compressed(page, name=name, ratio=ratio, dim=dim)
    if layer.type == "heavily_compressed_attention":
        return (local, entries, open_block(page, name=f"{name}_open", ratio=ratio, dim=dim))
    index_dim, index = config.integer("index_head_dim"), f"{name}_index"
    return (
        local,
        entries,
        compressed(page, name=f"{index}_k", ratio=ratio, dim=index_dim),
        overlap(page, name=f"{name}_overlap", window=window, ratio=ratio, dim=dim),
        overlap(page, name=f"{index}_overlap", window=window, ratio=ratio, dim=index_dim),
        # Two series of entries overlap, so an open block holds both of their projections.
        open_block(page, name=f"{name}_open", ratio=ratio, dim=2 * dim),
        open_block(page, name=f"{index}_open", ratio=ratio, dim=2 * index_dim),
    )
