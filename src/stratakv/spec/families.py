"""Which model types are known, and of which type each of their layers is.

Owns the table. A model type or layer type that is not here is refused by name, never guessed: a
wrong row shape would be served as wrong tokens. Must not know a shape (``layers``), nor put layers
together (``derive``). Every entry is checked in tests against the tensors that Hugging Face's cache
really holds, and ``docs/families.md`` says which run exactly.

Source: transformers 5.23, ``cache_utils.get_layer_types_and_kwargs`` and the modeling files.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from stratakv.core.ids import LayerId
from stratakv.spec.kinds import PageFormat
from stratakv.spec.layers import (
    Attention,
    Buffers,
    Layer,
    State,
    bigcode_heads,
    block_tokens,
    chunk_of,
    dbrx_heads,
    deepseek_v4,
    gated_delta,
    heads,
    indexed_mla,
    jamba_state,
    kimi_delta,
    mamba,
    mamba2,
    mimo_heads,
    mla,
    short_conv,
    unknown_layer_type,
    window_of,
    zamba_heads,
    zamba_state,
)
from stratakv.spec.model_config import ModelConfig
from stratakv.spec.retention import KeepAll
from stratakv.spec.time_steps import ReadTimeSteps, limited, limited_below, unbounded

LayerTypes: TypeAlias = Callable[[ModelConfig], tuple[str, ...]]
_STATELESS: Final = (
    "full_attention", "indexed_attention", "sliding_attention", "chunked_attention",
    "dummy", "moe", "mlp",
)  # fmt: skip
_STATES: Final = ("linear_attention", "conv", "hybrid")


def _any_page(_: ModelConfig) -> int:
    return 1


@dataclass(frozen=True, slots=True)
class Family:
    """``layer_types`` names every layer's type; ``keep`` says what one layer caches. ``steps``:
    Hugging Face's code forgets a state that several tokens meet at once, so it is continued one
    token at a time. ``page_unit``: what a page's tokens must be a multiple of. ``time_steps``:
    bounds that Hugging Face's code applies in chunks and leaves out in steps of one token."""

    layer_types: LayerTypes
    keep: Callable[[Layer, PageFormat], Buffers]
    steps: bool = False
    page_unit: Callable[[ModelConfig], int] = _any_page
    time_steps: ReadTimeSteps = unbounded


LEGACY_LAYER_TYPES: Final = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
}
"""Old names that Hugging Face renames on loading."""


# --- which type each layer has -------------------------------------------------------------------


def declared(field: str = "layer_types") -> LayerTypes:
    """The configuration lists them; Hugging Face always writes the list for these families."""

    def types(config: ModelConfig) -> tuple[str, ...]:
        names = tuple(str(name) for name in config.items(field))
        return tuple(LEGACY_LAYER_TYPES.get(name, name) for name in names)

    return types


def inferred(config: ModelConfig) -> tuple[str, ...]:
    """Listed, or derived from the fields as ``get_layer_types_and_kwargs`` does."""
    return _inferred(config, 0)


def qwen_types(config: ModelConfig) -> tuple[str, ...]:
    """Qwen 2 and 3: lower layers are full. Others name ``max_window_layers`` and do not use it."""
    return _inferred(config, config.integer("max_window_layers", 0))


def _inferred(config: ModelConfig, first_window_layer: int) -> tuple[str, ...]:
    if config.has("layer_types"):
        return declared()(config)
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


def twice(config: ModelConfig) -> tuple[str, ...]:
    """LongCat: two blocks of attention in each of its layers."""
    return ("full_attention",) * (2 * config.integer("num_layers"))


def periodic(config: ModelConfig) -> tuple[str, ...]:
    """Jamba: attention once a period, a state in the other layers."""
    period, offset = config.integer("attn_layer_period"), config.integer("attn_layer_offset")
    layers = range(config.integer("num_hidden_layers"))
    return tuple("full_attention" if i % period == offset else "linear_attention" for i in layers)


# --- a layer by its type -------------------------------------------------------------------------


def standard(
    layer_types: LayerTypes,
    attention: Attention,
    state_of: State | None = None,
    time_steps: ReadTimeSteps = unbounded,
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
                states = () if state_of is None else _STATES
                raise unknown_layer_type(layer, (*_STATELESS, *states))

    return Family(layer_types, keep, time_steps=time_steps)


# --- the table -----------------------------------------------------------------------------------

_INFERRED: Final = (
    "apertus", "arcee", "aria_text", "biogpt", "bitnet", "cohere", "ernie4_5", "ernie4_5_moe",
    "flex_olmo", "gemma", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox", "granite", "granitemoe",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3",
    "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama", "minimax_m2",
    "ministral3", "mistral", "mixtral", "nanochat", "olmo", "olmo2", "olmoe", "opt", "persimmon",
    "phi", "phi3", "phimoe", "qwen2_moe", "qwen3_moe", "seed_oss", "smollm3", "solar_open",
    "starcoder2",
)  # fmt: skip
_DECLARED: Final = (
    "afmoe", "beam", "cohere2", "cohere2_moe", "cohere_compass_text", "cwm", "dots1", "exaone4",
    "exaone_moe", "flint", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text",
    "gemma4_unified_text", "gpt_oss", "granite_swa", "granitemoe_swa", "kolibri1", "laguna",
    "llama4_text", "mellum", "minimax_m3_vl_text", "ministral", "modernbert-decoder", "olmo3",
    "vaultgemma",
)  # fmt: skip
_DELTA: Final = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
_MLA: Final = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
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

_MAMBA: Final = replace(standard(uniform("linear_attention"), heads, mamba), steps=True)

FAMILIES: Final[dict[str, Family]] = {
    **dict.fromkeys(_INFERRED, standard(inferred, heads)),
    **dict.fromkeys(("qwen2", "qwen3"), standard(qwen_types, heads)),
    **dict.fromkeys(_DECLARED, standard(declared(), heads)),
    **dict.fromkeys(_DELTA, standard(declared(), heads, gated_delta)),
    **dict.fromkeys(_MLA, standard(inferred, mla)),
    **dict.fromkeys(_INDEXED, standard(declared(), indexed_mla)),
    **dict.fromkeys(_CONV, standard(declared(), heads, short_conv)),
    "mimo_v2_flash": standard(declared(), mimo_heads),
    "longcat_flash": standard(twice, mla),
    "dbrx": standard(inferred, dbrx_heads),
    "gpt_bigcode": standard(inferred, bigcode_heads),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), standard(declared(), mla, kimi_delta)),
    "nemotron_h": standard(declared("layers_block_type"), heads, _NEMOTRON_STATE, limited_below),
    "zamba2": standard(declared("layers_block_type"), zamba_heads, _ZAMBA_STATE, limited_below),
    "granitemoehybrid": standard(declared(), heads, _BAMBA_STATE, limited),
    "bamba": standard(bamba_types, heads, _BAMBA_STATE, limited),
    "falcon_h1": standard(uniform("hybrid"), heads, _BAMBA_STATE, limited),
    "mamba2": standard(uniform("linear_attention"), heads, _MAMBA2_STATE, limited),
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "zamba": replace(standard(declared("layers_block_type"), zamba_heads, zamba_state), steps=True),
    "jamba": replace(standard(periodic, heads, jamba_state), steps=True),
    "deepseek_v4": Family(declared(), deepseek_v4, page_unit=block_tokens),
}
"""By ``model_type`` of the text configuration."""

NOT_CACHED: Final = {
    "recurrent_gemma": "Hugging Face keeps its states in the modules, where no cache can hold them",
}
"""Model types that cannot be known, with the reason."""

COMPOSITES: Final = {
    "fuyu": "persimmon",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "got_ocr2": "qwen2",
    "llama4": "llama4_text",
    "moss_transcribe_diarize": "qwen3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Checkpoints with images or sound beside a text part, whose prompts of text alone are served: the
whole checkpoint's ``model_type`` and its text part's. Each is proven as a whole, from its
directory (``test_composites``)."""

NOT_PROVEN: Final = {"gemma3n": "without timm, which no test has, its vision part cannot be built"}
"""Composites that could not be tried as a whole, with the reason."""
