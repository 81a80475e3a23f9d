"""What of vLLM's configuration decides the bytes of a page.

Owns the list of fields, and the refusals of what cannot be identified. Reads vLLM's configuration
objects by their public names; must not import vLLM.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stratakv.core.errors import ConfigError

HASHES: Final = ("sha256", "sha256_cbor")
"""Whose block hashes nobody can make collide, and which are the same after a restart."""
FORMATS: Final = ("auto", "hf", "safetensors", "fastsafetensors")
"""Of ``--load-format``: those that read the checkpoint's safetensors."""
PLACES: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version"})
"""What a Hugging Face configuration has of where it lies, and not of what it computes."""


def fields_of(config: Any, kv_cache: Any) -> dict[str, str]:  # noqa: ANN401 - vLLM's classes
    """By name; of a ``VllmConfig`` and a ``KVCacheConfig``. ConfigError for what vLLM can be set to
    and no name can hold."""
    _check(config)
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    groups = [
        [sorted(group.layer_names), repr(group.kv_cache_spec)] for group in kv_cache.kv_cache_groups
    ]
    return {
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "max_model_len": str(model.max_model_len),
        "model_config": settings_text(model.hf_config.to_dict()),
        "device": str(config.device_config.device_type),
        "cache_dtype": str(cache.cache_dtype),
        "mamba_cache": f"{cache.mamba_cache_dtype} {cache.mamba_ssm_cache_dtype} "
        f"{cache.mamba_cache_mode}",
        "hash": str(cache.prefix_caching_hash_algo),
        "groups": json.dumps(groups),
        "tensor_parallel": str(parallel.tensor_parallel_size),
        "pipeline_parallel": str(parallel.pipeline_parallel_size),
        "prefill_context_parallel": str(parallel.prefill_context_parallel_size),
        "decode_context_parallel": str(parallel.decode_context_parallel_size),
        "world": str(parallel.world_size),
        "speculative": _speculative(config),
    }


def layout_of(offloading: Any, row_bytes: int) -> dict[str, str]:  # noqa: ANN401 - vLLM's class
    """How a row of the host tier is laid out; of an ``OffloadingConfig``."""
    return {
        "kv_dtype": offloading.model.dtype,
        "row_bytes": str(row_bytes),
        "worker_bytes": str(offloading.worker_kv_bytes_per_block),
        "blocks_per_chunk": str(offloading.cache.blocks_per_chunk),
        "tokens_per_hash": str(offloading.cache.tokens_per_hash),
        "tokens_per_block": str([group.tokens_per_block for group in offloading.groups]),
        "group_ids": str([group.group_id for group in offloading.groups]),
        "kv_cache_layout": str(offloading.kv_cache_layout),
        "replicated": str(offloading.replicated_layout),
        "canonical": str(offloading.canonical_layout),
    }


def model_directories(config: Any) -> Sequence[str]:  # noqa: ANN401 - a VllmConfig
    """What fills the pages: the model, and a draft model that has weights of its own."""
    names = [str(config.model_config.model)]
    speculative = config.speculative_config
    if speculative is not None and speculative.draft_model_config is not None:
        names.append(str(speculative.draft_model_config.model))
    return list(dict.fromkeys(names))


def trailing_tokens(spec: Any) -> int | None:  # noqa: ANN401 - a KVCacheSpec
    """How many of the last tokens attention of these layers reads; None: all. A state is one."""
    match type(spec).__name__:
        case "SlidingWindowSpec":
            return int(spec.sliding_window)
        case "ChunkedLocalAttentionSpec":
            return int(spec.attention_chunk_size)
        case "MambaSpec":
            return 1
        case _:
            return None


def settings_text(settings: Mapping[str, object]) -> str:
    """A Hugging Face configuration, without where it lies."""
    return json.dumps(_without_places(settings), sort_keys=True, default=repr)


def weights_directory(name: str) -> Path:
    """Of a model as vLLM names it; ConfigError where that is no directory of this machine."""
    path = Path(name)
    if not path.is_dir():
        raise ConfigError(
            f"MODEL {name}: allowed is the directory of a checkpoint; one from a hub is named "
            "by where it was downloaded to"
        )
    return path


def _without_places(value: object) -> object:
    match value:
        case dict():
            return {
                str(name): _without_places(part)
                for name, part in value.items()
                if name not in PLACES
            }
        case list() | tuple():
            return [_without_places(part) for part in value]
        case _:
            return value


def _speculative(config: Any) -> str:  # noqa: ANN401 - a VllmConfig
    speculative = config.speculative_config
    if speculative is None:
        return ""
    return f"{speculative.method} {speculative.num_speculative_tokens}"


def _check(config: Any) -> None:  # noqa: ANN401 - a VllmConfig
    """Refuse what no name could tell apart."""
    if config.lora_config is not None:
        raise ConfigError(
            "--enable-lora: vLLM names an adapter's pages by its name and path, not by its "
            "weights; allowed is a server without adapters"
        )
    load_format = str(config.load_config.load_format)
    if load_format not in FORMATS:
        raise ConfigError(
            f"--load-format {load_format}: allowed are {', '.join(FORMATS)}, which read the "
            "checkpoint's safetensors"
        )
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    if algorithm not in HASHES:
        raise ConfigError(
            f"--prefix-caching-hash-algo {algorithm}: allowed are {', '.join(HASHES)}"
        )
