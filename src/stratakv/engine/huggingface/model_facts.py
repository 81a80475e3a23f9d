"""What a Hugging Face configuration says of a model, before any weight is read.

Owns the reading of a model directory's configuration. Must not load weights: a model that cannot be
served, or not with these settings, must be refused in a second, not after hundreds of gigabytes.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from stratakv.core.choices import check_choice, check_model_directory
from stratakv.core.errors import ConfigError
from stratakv.spec.derive import check_composite
from stratakv.spec.model_config import stable_positions
from stratakv.spec.model_facts import ModelFacts
from stratakv.spec.support import time_steps_of

_UNREADABLE: Final = (
    ValueError, OSError, KeyError, RuntimeError, AttributeError, TypeError, StrictDataclassError,
)  # fmt: skip
"""What Hugging Face raises for fields of a config.json that mean nothing to it."""
DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ENDLESS_POSITIONS: Final = 2**20
"""Length that we serve of a model which has no positions; a state alone knows no end."""


def read_facts(path: Path, dtype: str = "auto") -> ModelFacts:
    """Of a model directory; ConfigError where there is none, or for a dtype. Where ``dtype`` is
    "auto" and the configuration names none, the weights may turn out to have another than the one
    given here."""
    config, dtype = _read(path, dtype)
    if not sorted(path.glob("*.safetensors")):
        raise ConfigError(f"MODEL {path}: no *.safetensors in it; allowed is a directory with some")
    if reason := _other_weights(path, config):
        raise ConfigError(f"MODEL {path}: {reason}")
    with _naming(path):
        return facts_of(config, dtype)


def _other_weights(path: Path, config: PretrainedConfig) -> str | None:
    """Why Hugging Face's loader would read weights of which the model's identity knows nothing
    (``core.identity.checkpoint``); None where it would not."""
    if (path / "adapter_config.json").exists():
        return "there is an adapter_config.json in it; allowed is a model alone, and --lora DIR"
    if sorted(path.glob("shard-*-model-*-of-*.safetensors")):
        return "its weights are a distributed checkpoint; allowed is what save_pretrained writes"
    if config.to_dict().get("transformers_weights") is not None or type(config).extra_files:
        return "its config names files of weights; allowed is a model.safetensors.index.json"
    return None


@contextmanager
def _naming(path: Path) -> Generator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"MODEL {path}: {error}") from None


def read_planned(path: Path, dtype: str = "auto") -> tuple[ModelFacts, str | None]:
    """Of a directory that need not have weights, and why the checkpoint could not be served with
    what surrounds its text part; None where that is no reason. ConfigError as in ``read_facts``."""
    config, dtype = _read(path, dtype)
    with _naming(path):
        facts = _text_facts(config, dtype)
    try:
        check_composite(config.model_type, config.get_text_config(decoder=True).model_type)
    except ConfigError as error:
        return facts, str(error)
    return facts, None


def _read(path: Path, dtype: str) -> tuple[PretrainedConfig, str]:
    """The configuration, and the dtype where it is "auto"."""
    check_choice("--dtype", dtype, (*DTYPES, "auto"))
    check_model_directory("MODEL", path)
    try:
        config = cast(
            "PretrainedConfig",
            AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False),
        )
    except _UNREADABLE as error:
        raise ConfigError(f"MODEL {path}: not a causal LM that loads: {error}") from error
    if dtype == "auto":
        named = [name for name, known in DTYPES.items() if known == config.dtype]
        dtype = named[0] if named else "float32"
    return config, dtype


def facts_of(config: PretrainedConfig, dtype: str) -> ModelFacts:
    """ConfigError where it names no vocabulary, or positions that are no number, and for a model
    with more than text that is not proven as a whole."""
    part = config.get_text_config(decoder=True)
    check_composite(config.model_type, part.model_type)
    return _text_facts(config, dtype)


def _text_facts(config: PretrainedConfig, dtype: str) -> ModelFacts:
    text = plain_config(config.get_text_config(decoder=True))
    positions = text.get("max_position_embeddings", ENDLESS_POSITIONS)
    vocab = text.get("vocab_size")
    if not isinstance(positions, int) or not isinstance(vocab, int):
        kind = config.model_type
        raise ConfigError(
            f"{kind} names no max_position_embeddings or vocab_size; allowed are whole numbers"
        )
    if positions < 1 or vocab < 1:
        raise ConfigError(
            f"max_position_embeddings {positions}, vocab_size {vocab}: allowed is 1 and more"
        )
    return ModelFacts(
        config=text,
        max_positions=min(positions, stable_positions(text) or positions),
        vocab_size=vocab,
        dtype=dtype,
        time_steps=time_steps_of(text),
    )


def plain_config(text: PretrainedConfig) -> dict[str, object]:
    """``to_dict()``, with the usual names beside a family's own: GPT-2's ``n_layer`` is
    ``num_hidden_layers`` too."""
    config: dict[str, object] = text.to_dict()
    usual = {name: config[own] for name, own in text.attribute_map.items() if own in config}
    return usual | config
