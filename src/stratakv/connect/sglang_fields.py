"""What of SGLang's configuration decides the bytes of a page.

Owns the refusals of what cannot be identified, and what is read in a form of its own; all else goes
into names as it is (``whole_settings``). Must not import SGLang.
"""

import json
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from stratakv.connect.namespace import processing_field
from stratakv.connect.native_code import compiler_fields, host_compiler_fields
from stratakv.connect.remote_code import refuse_named_code
from stratakv.connect.sglang_harmless import (
    EXTERNAL_CODE,
    GRAPH_SIZES,
    PLUGINS,
    SETTINGS,
    VARIABLES,
)
from stratakv.connect.whole_settings import (
    code_field,
    plugin_fields,
    setting_fields,
)
from stratakv.connect.whole_variables import variable_fields
from stratakv.core.errors import ConfigError

FORMATS: Final = ("auto", "safetensors")
"""Of ``--load-format``: those that read the checkpoint's safetensors."""
OWN: Final = frozenset({
    "backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold",
    "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
})  # fmt: skip
"""What of the back end's configuration is SGLang's own."""
OVERRIDES: Final = "json_model_override_args"
GRAPHS: Final = "cuda_graph_config"


def fields_of(
    settings: Mapping[str, Any],
    environment: Mapping[str, str],
    registered: Collection[str],
) -> dict[str, str]:
    """By name: every setting and variable but those known to decide nothing. ``settings``: that
    are in effect, not only what was given. ``registered``: variables that SGLang knows. ConfigError
    for what SGLang can be set to and no name can hold."""
    check_settings(settings)
    model = str(settings["model_path"])
    known: dict[str, object] = {**settings}
    if isinstance(overrides := settings[OVERRIDES], str):
        known[OVERRIDES] = _canonical(overrides)
    if isinstance(graphs := settings.get(GRAPHS), Mapping):
        known[GRAPHS] = {name: _without_sizes(phase) for name, phase in graphs.items()}
    return {
        **setting_fields(known, SETTINGS),
        **variable_fields(environment, registered, "SGLANG_", VARIABLES),
        **compiler_fields(environment),
        **host_compiler_fields(environment),
        **plugin_fields(*PLUGINS),
        **code_field(_external_code(environment)),
        **processing_field("--tokenizer-path", str(settings["tokenizer_path"] or model), model),
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


def model_paths(settings: Mapping[str, Any]) -> list[str]:
    """What fills the pages: the model, and a draft model that has weights of its own."""
    names = [settings["model_path"], settings["speculative_draft_model_path"]]
    return list(dict.fromkeys(str(name) for name in names if name is not None))


def _external_code(environment: Mapping[str, str]) -> list[str]:
    """Directories of packages whose models are used in place of SGLang's."""
    found: list[str] = []
    for where in EXTERNAL_CODE:
        if not (name := environment.get(where)):
            continue
        spec = find_spec(name)
        if spec is None or spec.submodule_search_locations is None:
            raise ConfigError(f"{where} {name}: allowed is a package")
        found += spec.submodule_search_locations
    return found


def _canonical(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _without_sizes(phase: object) -> object:
    if not isinstance(phase, Mapping):
        return phase
    return {name: value for name, value in phase.items() if name not in GRAPH_SIZES}


def check_settings(settings: Mapping[str, Any]) -> None:
    """ConfigError for what no name could hold."""
    if settings["enable_lora"] or settings["lora_paths"]:
        raise ConfigError(
            "--enable-lora: SGLang names an adapter's pages by its name, not by its weights; "
            "allowed is a server without adapters"
        )
    if settings["load_format"] not in FORMATS:
        raise ConfigError(
            f"--load-format {settings['load_format']}: allowed are {', '.join(FORMATS)}, which "
            "read the checkpoint's safetensors"
        )
    draft = settings["speculative_draft_load_format"]
    if draft is not None and draft not in FORMATS:
        raise ConfigError(
            f"--speculative-draft-load-format {draft}: allowed are {', '.join(FORMATS)}"
        )
    if isinstance(overrides := settings[OVERRIDES], str):
        refuse_named_code("--json-model-override-args", _canonical(overrides))
    if not Path(settings["model_path"]).is_dir():
        raise ConfigError(
            f"MODEL {settings['model_path']}: allowed is the directory of a checkpoint; one from a "
            "hub is named by where it was downloaded to"
        )
