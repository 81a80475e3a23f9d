"""What of SGLang's configuration decides the bytes of a page.

Owns the list of fields, and the refusals of what cannot be identified. Reads SGLang's configuration
objects by their public names; must not import SGLang.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stratakv.core.errors import ConfigError

FORMATS: Final = ("auto", "safetensors")
"""Of ``--load-format``: those that read the checkpoint's safetensors."""
OWN: Final = frozenset({
    "backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold",
    "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
})  # fmt: skip
"""What of the back end's configuration is SGLang's own."""


def fields_of(arguments: Any) -> dict[str, str]:  # noqa: ANN401 - a ServerArgs
    """By name. ConfigError for what SGLang can be set to and no name can hold."""
    _check(arguments)
    return {
        "dtype": str(arguments.dtype),
        "quantization": str(arguments.quantization),
        "kv_cache_dtype": str(arguments.kv_cache_dtype),
        "state_dtype": str(arguments.mamba_ssm_dtype),
        "overrides": _canonical(str(arguments.json_model_override_args)),
        "context_length": str(arguments.context_length),
        "device": str(arguments.device),
        "attention_backend": str(arguments.attention_backend),
        "model_impl": str(arguments.model_impl),
        "speculative": str(arguments.speculative_algorithm),
    }


def shard_fields(config: Any) -> dict[str, str]:  # noqa: ANN401 - a HiCacheStorageConfig
    """Which part of a page a rank has; the rank itself is in the key."""
    return {
        "tensor_parallel": str(config.tp_size),
        "pipeline_parallel": f"{config.pp_rank} of {config.pp_size}",
        "context_parallel": f"{config.attn_cp_rank} of {config.attn_cp_size}",
        "decode_context_parallel": f"{config.dcp_rank} of {config.dcp_size}",
        "replicated": str(config.is_mla_model),
        "heads": f"{config.tp_lcm_size} {config.should_split_heads}",
        "logical_page": str(config.logical_page_size),
    }


def model_paths(arguments: Any) -> list[str]:  # noqa: ANN401 - a ServerArgs
    """What fills the pages: the model, and a draft model that has weights of its own."""
    names = [arguments.model_path, arguments.speculative_draft_model_path]
    return list(dict.fromkeys(str(name) for name in names if name is not None))


def own_settings(extra: Mapping[str, object]) -> dict[str, object]:
    """What of the back end's configuration is ours."""
    found = {name: value for name, value in extra.items() if name not in OWN}
    if "timeout_s" in found:
        raise ConfigError(
            "--hicache-storage-backend-extra-config timeout_s: allowed are SGLang's own "
            "prefetch_timeout_base and prefetch_timeout_per_ki_token"
        )
    return found


def _canonical(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text


def _check(arguments: Any) -> None:  # noqa: ANN401 - a ServerArgs
    if arguments.enable_lora or arguments.lora_paths:
        raise ConfigError(
            "--enable-lora: SGLang names an adapter's pages by its name, not by its weights; "
            "allowed is a server without adapters"
        )
    if arguments.load_format not in FORMATS:
        raise ConfigError(
            f"--load-format {arguments.load_format}: allowed are {', '.join(FORMATS)}, which read "
            "the checkpoint's safetensors"
        )
    if not Path(arguments.model_path).is_dir():
        raise ConfigError(
            f"MODEL {arguments.model_path}: allowed is the directory of a checkpoint; one from a "
            "hub is named by where it was downloaded to"
        )
