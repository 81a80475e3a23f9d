"""LoRA adapters of one model: read from PEFT directories, checked, and kept beside the model.

Owns the way from a directory to weights on the model's device, and the digest that stands for an
adapter in page keys. Must not run anything (``lora_hooks``).
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from stratakv.core.errors import ConfigError
from stratakv.core.identity.digests import TensorDigest, digest_of
from stratakv.core.identity.revision import REVISION
from stratakv.engine.huggingface.lora_config import LoraConfig, read_config
from stratakv.engine.huggingface.module_identity import tensor_line

FILE: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
DOWN: Final = ".lora_A.weight"
UP: Final = ".lora_B.weight"
FORMAT: Final = b"stratakv-lora-3"

Tensors = Mapping[str, torch.Tensor]


MADE_FOR_IT: Final = "allowed is an adapter that was made for this model"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraWeights:
    """What one linear layer gets beside its own product: ``scale * (x @ down.T) @ up.T``.

    ``down`` [rank, in_features], ``up`` [out_features, rank], in the model's dtype and device.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """``digest``: 32 bytes over every module path, scale and weight as stored; the name is no part
    of it, so that the same adapter under two names has the same pages. ``weights``: by path."""

    name: str
    digest: bytes
    weights: Mapping[str, LoraWeights]


def check_directories(directories: Mapping[str, Path]) -> None:
    """Refuse what a directory alone gives away, before a model is loaded. Raises ConfigError."""
    for name, directory in directories.items():
        with _naming(name, directory):
            read_config(directory)
            _weights_file(directory)


def load_adapters(
    model: nn.Module, output: nn.Module | None, directories: Mapping[str, Path]
) -> tuple[Adapter, ...]:
    """Load every directory for ``model``, whose output layer is ``output``; name -> directory.

    Adapters with one digest share their tensors. ConfigError names the flag, the directory and what
    is wrong with it.
    """
    found: dict[bytes, Adapter] = {}
    adapters: list[Adapter] = []
    for name, directory in directories.items():
        with _naming(name, directory):
            adapter = _load(model, output, name, directory)
        adapters.append(replace(found.setdefault(adapter.digest, adapter), name=name))
    return tuple(adapters)


@contextmanager
def _naming(name: str, directory: Path) -> Generator[None]:
    """Puts the flag before a ConfigError's text."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"--lora {name}={directory}: {error}") from None


def _weights_file(directory: Path) -> Path:
    file = directory / FILE
    if not file.is_file():
        raise ConfigError(f"no {FILE}; allowed is a directory with one")
    return file


def _load(model: nn.Module, output: nn.Module | None, name: str, directory: Path) -> Adapter:
    config = read_config(directory)
    try:
        # Not mapped: what runs, and what the digest is of, stays when the file does not.
        tensors = dict(sorted(load(_weights_file(directory).read_bytes()).items()))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{FILE} cannot be read ({error}); allowed is PEFT's") from None
    pairs = _pairs(tensors)
    modules = dict(model.named_modules())
    _check_targets(config, modules, output, set(pairs))
    weights: dict[str, LoraWeights] = {}
    scales: list[bytes] = []
    lines: list[TensorDigest] = []
    for path, (down, up) in sorted(pairs.items()):
        base = modules[path]
        assert isinstance(base, nn.Linear)
        _check_shapes(path, base, config.rank_of(path), down, up)
        scale = config.scale_of(path)
        scales.append(f"{path} {scale.hex()}".encode())
        lines += (tensor_line(path + DOWN, down), tensor_line(path + UP, up))
        like = base.weight
        weights[path] = LoraWeights(
            down=down.to(like.device, like.dtype), up=up.to(like.device, like.dtype), scale=scale
        )
    digest = digest_of((FORMAT, REVISION, *scales), lines)
    return Adapter(name=name, digest=digest, weights=weights)


def _pairs(tensors: Tensors) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The two factors of every module, by its path in the model."""
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        for end in (DOWN, UP):
            if key.startswith(PREFIX) and key.endswith(end):
                path = key.removeprefix(PREFIX).removesuffix(end)
                halves.setdefault(path, {})[end] = tensor
                break
        else:
            raise ConfigError(f"{FILE} holds {key}: allowed are factors of linear layers")
    lonely = [path for path, half in halves.items() if len(half) != 2]
    if lonely:
        raise ConfigError(f"{FILE} holds one factor for {_some(lonely)}: allowed are both")
    if not halves:
        raise ConfigError(f"{FILE} is empty; allowed are factors of linear layers")
    return {path: (half[DOWN], half[UP]) for path, half in halves.items()}


def _check_targets(
    config: LoraConfig,
    modules: Mapping[str, nn.Module],
    output: nn.Module | None,
    paths: set[str],
) -> None:
    """The weights must be for exactly the modules that the config names in this model."""
    if foreign := sorted(paths - modules.keys()):
        raise ConfigError(f"the model has no {_some(foreign)}; {MADE_FOR_IT}")
    for path in sorted(paths):
        # A subclass may read its weight where no hook sees it.
        if type(modules[path]) is not nn.Linear:
            raise ConfigError(f"{path} is {type(modules[path]).__name__}: allowed is nn.Linear")
        if modules[path] is output:
            raise ConfigError(f"{path} is the output layer: allowed are the layers below it")
        if "experts" in path.split("."):
            raise ConfigError(f"{path} is of an expert: allowed are layers that see every token")
    if config.all_linear:
        wanted = {
            path
            for path, module in modules.items()
            if isinstance(module, nn.Linear) and module is not output
        }
        wanted = {path for path in wanted if not config.is_excluded(path)}
    else:
        wanted = {path for path in modules if config.is_target(path)}
    if lacking := sorted(wanted - paths):
        raise ConfigError(f"it has no weights for {_some(lacking)}; {MADE_FOR_IT}")
    if extra := sorted(paths - wanted):
        raise ConfigError(f"it has weights for {_some(extra)}: allowed is what its config targets")


def _check_shapes(
    path: str, base: nn.Linear, rank: int, down: torch.Tensor, up: torch.Tensor
) -> None:
    wanted = ((rank, base.in_features), (base.out_features, rank))
    found = (tuple(down.shape), tuple(up.shape))
    if found != wanted:
        raise ConfigError(f"{path} has factors {found[0]}, {found[1]}: allowed are {wanted}")
    for factor in (down, up):
        if not factor.is_floating_point():
            raise ConfigError(f"{path} has a factor of {factor.dtype}: allowed are floats")


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return paths[0] + more
