"""A Hugging Face causal LM, loaded from a directory or taken over from memory.

Owns what the rest of the engine asks about a model: config, limits, stop tokens, a fingerprint of
its weights. Must not know pages; it only points the model at ``paged_attention``.
"""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from stratakv.core.errors import ConfigError
from stratakv.engine.attention import ATTENTION
from stratakv.engine.fingerprint import directory_fingerprint, module_fingerprint

DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class HuggingFaceModel:
    """``config``: the text decoder's, as plain data. ``eos_ids``: may be empty. ``max_positions``:
    longest sequence, in tokens, that its positions cover. ``dtype``: a key of ``DTYPES``.
    ``fingerprint``: 32 bytes; other weights, another config or another dtype give others."""

    module: PreTrainedModel
    config: Mapping[str, object]
    eos_ids: tuple[int, ...]
    max_positions: int
    vocab_size: int
    dtype: str
    device: torch.device
    fingerprint: bytes


def load_model(path: Path, dtype: str = "auto", device: torch.device = CPU) -> HuggingFaceModel:
    """Load safetensors weights from a local directory; never asks a network.

    dtype: a key of ``DTYPES`` or "auto", the config's own. Hugging Face shows a progress bar.
    Raises ConfigError for a directory that is not there or holds no causal LM, and for a dtype.
    """
    if dtype not in (*DTYPES, "auto"):
        raise ConfigError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)}, auto")
    if not (path / "config.json").is_file():
        raise ConfigError(f"--model {path}: not a directory with a Hugging Face config.json")
    if not sorted(path.glob("*.safetensors")):
        raise ConfigError(f"--model {path}: no *.safetensors; other weight formats are not read")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        loaded = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=DTYPES.get(dtype, "auto"),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (ValueError, OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"--model {path}: not a causal LM that loads: {error}") from error
    module, info = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise ConfigError(f"--model {path}: not a whole causal LM; its weights lack {missing}")
    module.to(device)  # pyright: ignore[reportArgumentType]
    return _adopt(module, directory_fingerprint(path, _dtype_name(module)))


def wrap(module: PreTrainedModel) -> HuggingFaceModel:
    """Take over a model in memory: from here on it runs only under a ``ModelRunner``."""
    return _adopt(module, module_fingerprint(module, _dtype_name(module)))


def _adopt(module: PreTrainedModel, fingerprint: bytes) -> HuggingFaceModel:
    name = type(module).__name__
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise ConfigError(f"--model: {name} is not a causal LM that takes logits_to_keep")
    _own_config(module)
    module.set_attn_implementation(ATTENTION)
    text = module.config.get_text_config(decoder=True)
    if text._attn_implementation != ATTENTION:  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        raise ConfigError(f"--model: {name} has attention of its own that cannot be replaced")
    config: dict[str, object] = text.to_dict()
    positions, vocab = config.get("max_position_embeddings"), config.get("vocab_size")
    if not isinstance(positions, int) or not isinstance(vocab, int):
        raise ConfigError(f"--model: {name} names no max_position_embeddings or vocab_size")
    return HuggingFaceModel(
        module=module.eval(),
        config=config,
        eos_ids=_eos_ids(module, config),
        max_positions=positions,
        vocab_size=vocab,
        dtype=_dtype_name(module),
        device=module.device,
        fingerprint=fingerprint,
    )


def _own_config(module: PreTrainedModel) -> None:
    """Copy the config that all submodules hold: another model may hold the same object, and setting
    the attention writes to it."""
    copies: dict[int, object] = {}
    for part in module.modules():
        config = vars(part).get("config")
        if isinstance(config, PretrainedConfig):
            part.config = copy.deepcopy(config, copies)  # pyright: ignore[reportArgumentType]


def _dtype_name(module: PreTrainedModel) -> str:
    for name, dtype in DTYPES.items():
        if module.dtype == dtype:
            return name
    raise ConfigError(f"--dtype: weights are {module.dtype}, must be one of {', '.join(DTYPES)}")


def _eos_ids(module: PreTrainedModel, config: Mapping[str, object]) -> tuple[int, ...]:
    """Stop tokens: the generation config's if it has any, else the model's."""
    ids: object = module.generation_config.eos_token_id
    ids = config.get("eos_token_id") if ids is None else ids
    match ids:
        case int():
            return (ids,)
        case list():
            return tuple(cast("list[int]", ids))
        case _:
            return ()
