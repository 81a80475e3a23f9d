"""Which model types are known, and what each of their layers keeps.

Owns the reading of a Hugging Face text configuration, field by field. A model type or layer type
that is not here is refused by name, never guessed: a wrong row shape would be served as wrong
tokens. Must not put layers together (``derive``). Every entry is checked in tests against the
tensors that Hugging Face's cache really holds.

Source: transformers 5.23, ``cache_utils.get_layer_types_and_kwargs`` and the modeling files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

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
from stratakv.spec.retention import KeepAll, KeepChunk, KeepWindow, Retention

Buffers: TypeAlias = tuple[LayerBuffer, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its number, its type, and the configuration that holds for it."""

    id: LayerId
    type: str
    config: ModelConfig


LayerTypes: TypeAlias = Callable[[ModelConfig], tuple[str, ...]]
Attention: TypeAlias = Callable[[Layer, Retention, PageFormat], Buffers]
State: TypeAlias = Callable[[Layer, PageFormat], Buffers]


@dataclass(frozen=True, slots=True)
class Family:
    """``layer_types`` names every layer's type; ``keep`` says what one layer caches."""

    layer_types: LayerTypes
    keep: Callable[[Layer, PageFormat], Buffers]


LEGACY_LAYER_TYPES: Final = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
}
"""Old names that Hugging Face renames on loading."""


def unknown_layer_type(layer: Layer) -> ConfigError:
    return ConfigError(
        f"model type {layer.config.model_type!r}: layer {layer.id} has the layer type "
        f"{layer.type!r}, which this release does not know for it"
    )


# --- which type each layer has -------------------------------------------------------------------


def declared(field: str = "layer_types") -> LayerTypes:
    """The configuration lists them; Hugging Face always writes the list for these families."""

    def types(config: ModelConfig) -> tuple[str, ...]:
        names = tuple(str(name) for name in config.items(field))
        return tuple(LEGACY_LAYER_TYPES.get(name, name) for name in names)

    return types


def inferred(config: ModelConfig) -> tuple[str, ...]:
    """Listed, or told from the fields as ``get_layer_types_and_kwargs`` tells them."""
    if config.has("layer_types"):
        return declared()(config)
    first_window_layer = config.integer("max_window_layers", 0)
    types: list[str] = []
    for layer in range(config.integer("num_hidden_layers")):
        own = config.layer(LayerId(layer))
        slides = own.has("sliding_window") and own.fields.get("use_sliding_window") is not False
        if slides and layer >= first_window_layer:
            types.append("sliding_attention")
        elif own.has("attention_chunk_size"):
            types.append("chunked_attention")
        else:
            types.append("full_attention")
    return tuple(types)


def uniform(layer_type: str) -> LayerTypes:
    """Every layer alike."""

    def types(config: ModelConfig) -> tuple[str, ...]:
        return (layer_type,) * config.integer("num_hidden_layers")

    return types


def bamba_types(config: ModelConfig) -> tuple[str, ...]:
    full = config.items("attn_layer_indices") if config.has("attn_layer_indices") else ()
    layers = range(config.integer("num_hidden_layers"))
    return tuple("full_attention" if i in full else "linear_attention" for i in layers)


# --- what attention keeps ------------------------------------------------------------------------


def head_sizes(config: ModelConfig, head_dim_field: str = "head_dim") -> tuple[int, int]:
    """(key heads, head size)."""
    query_heads = config.integer("num_attention_heads")
    default = 0 if config.has(head_dim_field) else config.integer("hidden_size") // query_heads
    heads = config.integer("num_key_value_heads", query_heads)
    return heads, config.integer(head_dim_field, default)


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


def mla(layer: Layer, rule: Retention, page: PageFormat) -> Buffers:
    rank = layer.config.integer("kv_lora_rank")
    return (latent(rule, page, rank=rank, rope_dim=layer.config.integer("qk_rope_head_dim")),)


def indexed_mla(layer: Layer, rule: Retention, page: PageFormat) -> Buffers:
    """MLA with an indexer; a "shared" layer reuses the selection of the layer before it."""
    roles = layer.config.items("indexer_types") if layer.config.has("indexer_types") else ()
    kept = mla(layer, rule, page)
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
    conv = (channels, config.integer("linear_conv_kernel_dim"))
    return state(page, conv=conv, recurrent=(value_heads, key_dim, value_dim))


def kimi_delta(layer: Layer, page: PageFormat) -> Buffers:
    """Kimi Delta Attention: queries, keys and values alike."""
    count, dim = layer.config.integer("linear_num_heads"), layer.config.integer("linear_head_dim")
    conv = (3 * count * dim, layer.config.integer("linear_conv_kernel_dim"))
    return state(page, conv=conv, recurrent=(count, dim, dim))


def short_conv(layer: Layer, page: PageFormat) -> Buffers:
    conv = (layer.config.integer("hidden_size"), layer.config.integer("conv_L_cache"))
    return state(page, conv=conv, recurrent=None)


def mamba2(*, count: str, dim: str, groups: str, size: str, kernel: str) -> State:
    """Mamba-2, by the names that a family gives its five sizes."""

    def kept(layer: Layer, page: PageFormat) -> Buffers:
        config = layer.config
        head_count, head_dim = config.integer(count), config.integer(dim)
        state_size = config.integer(size)
        channels = head_count * head_dim + 2 * config.integer(groups) * state_size
        conv = (channels, config.integer(kernel))
        return state(page, conv=conv, recurrent=(head_count, head_dim, state_size))

    return kept


# --- a layer by its type -------------------------------------------------------------------------


def standard(
    layer_types: LayerTypes, attention: Attention, state_of: State | None = None
) -> Family:
    """A family whose layer types mean what Hugging Face's cache takes them to mean."""

    def keep(layer: Layer, page: PageFormat) -> Buffers:
        match layer.type:
            case "full_attention" | "indexed_attention":
                return attention(layer, KeepAll(), page)
            case "sliding_attention":
                return attention(layer, window_of(layer), page)
            case "chunked_attention":
                return attention(layer, chunk_of(layer), page)
            case "linear_attention" | "conv" if state_of is not None:
                return state_of(layer, page)
            case "hybrid" if state_of is not None:
                return attention(layer, KeepAll(), page) + state_of(layer, page)
            case "dummy" | "moe" | "mlp":
                return ()
            case _:
                raise unknown_layer_type(layer)

    return Family(layer_types, keep)


def positive(layer: Layer, field: str) -> int:
    tokens = layer.config.integer(field)
    if tokens < 1:
        raise layer.config.fault(field, "at least 1")
    return tokens


def window_of(layer: Layer) -> KeepWindow:
    """Hugging Face keeps one token less, what the next query sees beside itself: the same pages
    at every page boundary unless the window is one more than a multiple of the page."""
    return KeepWindow(positive(layer, "sliding_window"))


def chunk_of(layer: Layer) -> KeepChunk:
    return KeepChunk(positive(layer, "attention_chunk_size"))


def deepseek_v4(layer: Layer, page: PageFormat) -> Buffers:
    """A local window in every layer; compressed entries of 4 or 128 tokens beside it."""
    config, window = layer.config, window_of(layer).tokens
    dim = config.integer("head_dim")
    local = shared_latent_window(page, window=window, dim=dim)
    if layer.type == "sliding_attention":
        return (local,)
    if layer.type not in ("heavily_compressed_attention", "compressed_sparse_attention"):
        raise unknown_layer_type(layer)
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


# --- the table -----------------------------------------------------------------------------------

_INFERRED: Final = (
    "arcee", "cohere", "ernie4_5", "gemma", "glm", "glm4", "glm4_moe", "granite", "granitemoe",
    "llama", "minimax_m2", "ministral3", "mistral", "mixtral", "olmo", "olmo2", "olmoe", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
_DECLARED: Final = (
    "afmoe", "cohere2", "exaone4", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text",
    "gpt_oss", "llama4_text", "ministral", "olmo3",
)  # fmt: skip
_DELTA: Final = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
_MLA: Final = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
_INDEXED: Final = ("deepseek_v32", "glm_moe_dsa")
_CONV: Final = ("lfm2", "lfm2_moe", "lfm3")

_BAMBA_STATE: Final = mamba2(
    count="mamba_n_heads", dim="mamba_d_head", groups="mamba_n_groups",
    size="mamba_d_state", kernel="mamba_d_conv",
)  # fmt: skip
_NEMOTRON_STATE: Final = mamba2(
    count="mamba_num_heads", dim="mamba_head_dim", groups="n_groups",
    size="ssm_state_size", kernel="conv_kernel",
)  # fmt: skip
_ZAMBA_STATE: Final = mamba2(
    count="n_mamba_heads", dim="mamba_headdim", groups="mamba_ngroups",
    size="mamba_d_state", kernel="mamba_d_conv",
)  # fmt: skip
_MAMBA2_STATE: Final = mamba2(
    count="num_heads", dim="head_dim", groups="n_groups", size="state_size", kernel="conv_kernel",
)  # fmt: skip

FAMILIES: Final[dict[str, Family]] = {
    **dict.fromkeys(_INFERRED, standard(inferred, heads)),
    **dict.fromkeys(_DECLARED, standard(declared(), heads)),
    **dict.fromkeys(_DELTA, standard(declared(), heads, gated_delta)),
    **dict.fromkeys(_MLA, standard(inferred, mla)),
    **dict.fromkeys(_INDEXED, standard(declared(), indexed_mla)),
    **dict.fromkeys(_CONV, standard(declared(), heads, short_conv)),
    "mimo_v2_flash": standard(declared(), mimo_heads),
    "kimi_linear": standard(declared(), mla, kimi_delta),
    "nemotron_h": standard(declared("layers_block_type"), heads, _NEMOTRON_STATE),
    "zamba2": standard(declared("layers_block_type"), zamba_heads, _ZAMBA_STATE),
    "granitemoehybrid": standard(declared(), heads, _BAMBA_STATE),
    "bamba": standard(bamba_types, heads, _BAMBA_STATE),
    "falcon_h1": standard(uniform("hybrid"), heads, _BAMBA_STATE),
    "mamba2": standard(uniform("linear_attention"), heads, _MAMBA2_STATE),
    "deepseek_v4": Family(declared(), deepseek_v4),
}
"""By ``model_type`` of the text configuration."""
