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
STATE_DTYPES: Final = {
    "SGLANG_MAMBA_CONV_DTYPE": "bfloat16",
    "SGLANG_DSV4_COMPRESS_STATE_DTYPE": "float32",
}
"""Variables without a flag, and what SGLang takes where they are not set."""


def fields_of(
    arguments: Any,  # noqa: ANN401 - a ServerArgs
    environment: Mapping[str, str],
) -> dict[str, str]:
    """By name. ConfigError for what SGLang can be set to and no name can hold. The states' dtypes
    are of every pool: keys and values above a state are computed from it."""
    _check(arguments)
    return {
        "dtype": str(arguments.dtype),
        "quantization": str(arguments.quantization),
        "kv_cache_dtype": str(arguments.kv_cache_dtype),
        # SGLang's own order; where neither says, the checkpoint does.
        "state_dtype": environment.get("SGLANG_MAMBA_SSM_DTYPE", str(arguments.mamba_ssm_dtype)),
        **{name: environment.get(name, default) for name, default in STATE_DTYPES.items()},
        "overrides": _canonical(str(arguments.json_model_override_args)),
        "context_length": str(arguments.context_length),
        "device": str(arguments.device),
        "attention_backend": str(arguments.attention_backend),
        "model_impl": str(arguments.model_impl),
        "speculative": str(arguments.speculative_algorithm),
    }


def state_fields(host: Any) -> dict[str, str]:  # noqa: ANN401 - a MambaPoolHost
    """How the bytes of its pages are meant, which the pages do not say. AttributeError of another
    pool."""
    return {
        "temporal_dtype": str(host.temporal_dtype),
        "conv_dtype": str(host.conv_dtype),
        "slot_dtypes": " ".join(str(buffer.dtype) for buffer in host.slot_state_buffers),
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
