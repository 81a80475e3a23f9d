"""What of vLLM's configuration decides the bytes of a page.

Owns the refusals of what cannot be identified, and what is read in a form of its own; all else goes
into names as it is (``whole_settings``). Must not import vLLM.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from stratakv.connect.namespace import processing_field
from stratakv.connect.native_code import compiler_fields, host_compiler_fields
from stratakv.connect.remote_code import directory_of, refuse_code_elsewhere, refuse_named_code
from stratakv.connect.vllm_harmless import BINDING, CHECKPOINTS, PLUGINS, SETTINGS, VARIABLES
from stratakv.connect.whole_settings import (
    flat_settings,
    plugin_fields,
    setting_fields,
)
from stratakv.connect.whole_variables import variable_fields
from stratakv.core.errors import ConfigError

HASHES: Final = ("sha256", "sha256_cbor")
"""Whose block hashes nobody can make collide, and which are the same after a restart."""
FORMATS: Final = ("auto", "hf", "safetensors", "fastsafetensors")
"""Of ``--load-format``: those that read the checkpoint's safetensors."""
PLACES: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version"})
"""What a Hugging Face configuration has of where it lies, and not of what it computes."""


def fields_of(
    config: Any,  # noqa: ANN401 - a VllmConfig
    kv_cache: Any,  # noqa: ANN401 - a KVCacheConfig
    environment: Mapping[str, str],
    registered: Collection[str],
) -> dict[str, str]:
    """By name: every setting and variable but those known to decide nothing. ``registered``:
    variables that vLLM knows. ConfigError for what vLLM can be set to and no name can hold."""
    _check(config)
    groups = [
        [sorted(group.layer_names), repr(group.kv_cache_spec)] for group in kv_cache.kv_cache_groups
    ]
    model, settings = config.model_config, flat_settings(config, _harmless(config), CHECKPOINTS)
    for name, value in settings.items():
        if name.rpartition(".")[2] in CHECKPOINTS and value is not None:
            found = cast("Any", value).to_dict()
            refuse_named_code(f"MODEL {model.model}: {name}", found)
            settings[name] = settings_text(found)
        if name.rpartition(".")[2] == "hf_config_path" and value is not None:
            check_config_path(str(value))
    return {
        **setting_fields(settings, ()),
        **variable_fields(environment, registered, "VLLM_", VARIABLES),
        **compiler_fields(environment),
        **host_compiler_fields(environment),
        **plugin_fields(*PLUGINS),
        **processing_field("--tokenizer", str(model.tokenizer), str(model.model)),
        "hash": str(config.cache_config.prefix_caching_hash_algo),
        "groups": json.dumps(groups),
    }


def _harmless(config: Any) -> Mapping[str, frozenset[str]]:  # noqa: ANN401 - a VllmConfig
    if str(config.device_config.device_type) != "cpu":
        return SETTINGS
    return {**SETTINGS, "ParallelConfig": SETTINGS["ParallelConfig"] - BINDING}


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
            # vLLM's own arithmetic: drafting keeps some tokens before the window.
            kept = spec.sliding_window - 1 + spec.extra_retained_tokens
            return int(max(spec.sliding_window, kept))
        case "ChunkedLocalAttentionSpec":
            return int(spec.attention_chunk_size)
        case "MambaSpec":
            return 1
        case _:
            return None


def settings_text(settings: Mapping[str, object]) -> str:
    """A Hugging Face configuration, without where it lies."""
    return json.dumps(_without_places(settings), sort_keys=True, default=repr)


def check_config_path(name: str) -> None:
    """ConfigError where a configuration beside the model's is no directory of this machine, or
    names code that lies elsewhere."""
    flag = "--hf-config-path"
    refuse_code_elsewhere(flag, directory_of(flag, name))


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


def _check(config: Any) -> None:  # noqa: ANN401 - a VllmConfig
    """Refuse what no name could tell apart."""
    drafting = config.speculative_config
    loading = (config.load_config, drafting and drafting.draft_load_config)
    refuse(
        lora=config.lora_config is not None,
        formats=[str(one.load_format) for one in loading if one is not None],
        algorithm=str(config.cache_config.prefix_caching_hash_algo),
    )


def refuse(*, lora: bool, formats: Sequence[str], algorithm: str) -> None:
    """ConfigError for what no name could tell apart."""
    if lora:
        raise ConfigError(
            "--enable-lora: vLLM names an adapter's pages by its name and path, not by its "
            "weights; allowed is a server without adapters"
        )
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(
                f"--load-format {name}: allowed are {', '.join(FORMATS)}, which "
                "read the checkpoint's safetensors"
            )
    if algorithm not in HASHES:
        raise ConfigError(
            f"--prefix-caching-hash-algo {algorithm}: allowed are {', '.join(HASHES)}"
        )
