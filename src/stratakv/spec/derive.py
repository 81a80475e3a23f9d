"""From a model's configuration to its ``CacheSpec``.

Owns the putting together: layers of one retention rule become one group, alike layers one buffer.
Must not know a family (``families``) or a shape (``layers``, ``kinds``), nor import torch or
transformers.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final, assert_never

from stratakv.core.choices import check_choice, check_count
from stratakv.core.errors import ConfigError
from stratakv.core.ids import GroupId, LayerId
from stratakv.spec.families import COMPOSITES, FAMILIES, NOT_CACHED, NOT_PROVEN, Family
from stratakv.spec.groups import DTYPE_BYTES, BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.kinds import LayerBuffer, PageFormat
from stratakv.spec.layers import Layer
from stratakv.spec.model_config import ModelConfig
from stratakv.spec.retention import (
    KeepAll,
    KeepBoundary,
    KeepChunk,
    KeepLive,
    KeepWindow,
    Retention,
)

DEFAULT_PAGE_TOKENS: Final = 64
_SERVED: Final = sorted(FAMILIES.keys() - NOT_CACHED.keys())
_WHOLE: Final = f"allowed with images or sound beside text are {', '.join(sorted(COMPOSITES))}"


def default_page_tokens(config: Mapping[str, object]) -> int:
    """Tokens of a page by default: 64, or the least that is more and that the model can
    have. 128 for DeepSeek-V4, which compresses up to 128 tokens to one row; larger pages would
    only make its checkpoints larger. config: as for ``spec_of``."""
    model = ModelConfig(config)
    unit = family_of(model).page_unit(model)
    return -(-DEFAULT_PAGE_TOKENS // unit) * unit


def spec_of(config: Mapping[str, object], *, page_tokens: int, dtype: str) -> CacheSpec:
    """The cache of a causal language model.

    config: ``to_dict()`` of its Hugging Face text configuration. dtype: of its activations, as in
    ``DTYPE_BYTES``. Group 0 keeps every page and may own no bytes; then come windows and chunks by
    size, then states. ConfigError names a model type, layer type, field or flag that it cannot
    honour.
    """
    check_count("--page-tokens", page_tokens)
    check_choice("--dtype", dtype, sorted(DTYPE_BYTES))
    model = ModelConfig(config)
    family = family_of(model)
    unit = family.page_unit(model)
    if page_tokens % unit:
        raise ConfigError(
            f"--page-tokens {page_tokens}: this model compresses up to {unit} tokens to one row, "
            f"and a page ends where no row is half filled: allowed are multiples of {unit}"
        )
    page = PageFormat(page_tokens, dtype)
    kept: dict[Retention, list[tuple[LayerId, LayerBuffer]]] = {KeepAll(): []}
    for layer in layers_of(model, family):
        for buffer in family.keep(layer, page):
            kept.setdefault(buffer.retention, []).append((layer.id, buffer))
    if not any(kept.values()):
        raise ConfigError(
            f"model type {model.model_type!r}: no layer caches anything; allowed is a model of "
            "which at least one layer does"
        )
    rules = sorted(kept, key=group_order)
    return CacheSpec(
        page_tokens=page_tokens,
        groups=tuple(
            CacheGroup(
                id=GroupId(index),
                name=name,
                retention=rule,
                buffers=merge_buffers(kept[rule]),
            )
            for index, (name, rule) in enumerate(zip(group_names(rules), rules, strict=True))
        ),
    )


def shared_layers(config: Mapping[str, object]) -> dict[LayerId, LayerId]:
    """Layers that own no bytes and read another's instead: {reader: owner}.

    Gemma 3n and 4: each of the last ``num_kv_shared_layers`` layers reads the last layer of its own
    type before them.
    """
    model = ModelConfig(config)
    types = family_of(model).layer_types(model)
    owners = len(types) - model.integer("num_kv_shared_layers", 0)
    last: dict[str, LayerId] = {name: LayerId(i) for i, name in enumerate(types[:owners])}
    readers = {LayerId(i): types[i] for i in range(owners, len(types))}
    for reader, name in readers.items():
        if name not in last:
            raise ConfigError(
                f"model type {model.model_type!r}: layer {reader} shares the cache of a "
                f"{name!r} layer, but none of the layers before {owners} is one; allowed is a "
                "num_kv_shared_layers that leaves one of each type"
            )
    return {reader: last[name] for reader, name in readers.items()}


def family_of(model: ModelConfig) -> Family:
    """Refuses a type that is not in the table, and a model that is not causal."""
    if model.model_type in NOT_CACHED:
        reason = NOT_CACHED[model.model_type]
        raise ConfigError(
            f"model type {model.model_type!r} cannot be served: {reason}; allowed are those that "
            "docs/families.md calls exact"
        )
    family = FAMILIES.get(model.model_type)
    if family is None:
        raise ConfigError(
            f"model type {model.model_type!r} is not known; allowed are {', '.join(_SERVED)}"
        )
    if model.fields.get("use_bidirectional_attention") in (True, "all"):
        raise ConfigError(
            f"model type {model.model_type!r}: use_bidirectional_attention makes a token's cache "
            "depend on later tokens, so no prefix of it can be reused; allowed is false, or no "
            "such field"
        )
    if not model.fields.get("is_causal", True):
        raise ConfigError(
            f"model type {model.model_type!r}: is_causal {model.fields['is_causal']!r}: a token's "
            "cache would depend on later tokens, so no prefix of it could be reused; allowed is "
            "true, or no such field"
        )
    return family


def check_composite(model_type: str, text_type: str) -> None:
    """ConfigError where a checkpoint of ``model_type`` has a text part of another type, and the
    two together are not proven. A known text part proves nothing: what surrounds it may change
    masks, positions or embeddings."""
    if model_type == text_type or COMPOSITES.get(model_type) == text_type:
        return
    if reason := NOT_PROVEN.get(model_type):
        raise ConfigError(
            f"model type {model_type!r} cannot be served as a whole: {reason}; {_WHOLE}"
        )
    raise ConfigError(
        f"model type {model_type!r} cannot be served: at most its text part, {text_type!r}, is "
        f"proven; {_WHOLE}"
    )


def layers_of(model: ModelConfig, family: Family) -> list[Layer]:
    """Every layer of the model; those that share another's cache have the type "dummy"."""
    types = family.layer_types(model)
    if len(types) != model.integer("num_hidden_layers", len(types)):
        raise model.fault("num_hidden_layers", f"{len(types)}, the number of layer types")
    shared = shared_layers(model.fields)
    ids = [LayerId(index) for index in range(len(types))]
    return [
        Layer(layer, "dummy" if layer in shared else types[layer], model.layer(layer))
        for layer in ids
    ]


def merge_buffers(kept: Sequence[tuple[LayerId, LayerBuffer]]) -> tuple[BufferSpec, ...]:
    """Alike layers share a buffer; where layers differ, the second kind of ``k`` is ``k.1``."""
    layers: dict[LayerBuffer, list[LayerId]] = {}
    for layer, buffer in kept:
        layers.setdefault(buffer, []).append(layer)
    seen: dict[str, int] = {}
    merged: list[BufferSpec] = []
    for buffer, owners in layers.items():
        variant = seen[buffer.name] = seen.get(buffer.name, -1) + 1
        merged.append(
            BufferSpec(
                name=f"{buffer.name}.{variant}" if variant else buffer.name,
                layers=tuple(owners),
                rows_per_page=buffer.rows_per_page,
                row_shape=buffer.row_shape,
                dtype=buffer.dtype,
            )
        )
    return tuple(merged)


def group_order(rule: Retention) -> tuple[int, int]:
    """The anchor first, since the spec demands it; the rest in a fixed order of our choice."""
    match rule:
        case KeepAll():
            return 0, 0
        case KeepWindow(tokens):
            return 1, tokens
        case KeepChunk(tokens):
            return 2, tokens
        case KeepBoundary():
            return 3, 0
        case KeepLive():
            return 4, 0
        case _:
            assert_never(rule)


def group_names(rules: Sequence[Retention]) -> list[str]:
    """ "anchor", "swa", "chunk", "state", "open"; two windows are "swa.512" and "swa.4096"."""
    stems = ("anchor", "swa", "chunk", "state", "open")
    names: list[str] = []
    for kind, same in groupby(rules, key=lambda rule: group_order(rule)[0]):
        sizes = [group_order(rule)[1] for rule in same]
        several = len(sizes) > 1
        names += [f"{stems[kind]}.{size}" if several else stems[kind] for size in sizes]
    return names
