"""The identity of a model in memory: every byte of it, and every number that its modules hold.

Owns what of a module counts. Agrees with no identity of a directory. Must not read files.
"""

import json
from collections.abc import Iterator
from typing import Final, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from stratakv.core.tensor_lines import TensorLine, lines_digest

FORMAT: Final = b"stratakv-model-in-memory-1"
"""To be changed whenever our own arithmetic changes: every page is another then."""
ARITHMETIC: Final = f"transformers {transformers_version}"
"""Whose code runs the model: other code is another model."""
_NAMES: Final = frozenset({"name_or_path", "_name_or_path"})
_NOT_COMPUTED_WITH: Final = _NAMES | {"training", "gradient_checkpointing"}


def module_identity(module: PreTrainedModel, dtype: str) -> bytes:
    """32 bytes over the config, and over the class, the parameters, the buffers, those that are not
    saved too, and the plain attributes of every module within."""
    config = module.config.to_dict()
    said = json.dumps(
        {name: value for name, value in config.items() if name not in _NAMES},
        sort_keys=True,
        default=str,
    )
    head = (FORMAT, dtype.encode(), ARITHMETIC.encode(), said.encode(), *_plain(module))
    return lines_digest(head, _tensors(module))


def tensor_line(name: str, tensor: torch.Tensor) -> TensorLine:
    """Of every byte of a tensor, as it would be stored."""
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return TensorLine.of(name, str(tensor.dtype), tensor.shape, plain)


def _tensors(module: nn.Module) -> Iterator[TensorLine]:
    for name, tensor in module.named_parameters(remove_duplicate=False):
        yield tensor_line(f"parameter {name}", tensor)
    for name, tensor in module.named_buffers(remove_duplicate=False):
        yield tensor_line(f"buffer {name}", tensor)
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                yield tensor_line(f"attribute {path}.{name}", value)


def _plain(module: nn.Module) -> Iterator[bytes]:
    """Every module's path, class and attributes that are plain data: scales, sizes, epsilons."""
    for path, part in module.named_modules():
        kind = type(part)
        yield f"{path} {kind.__module__}.{kind.__qualname__}".encode()
        for name, value in sorted(vars(part).items()):
            if not name.startswith("_") and name not in _NOT_COMPUTED_WITH and _is_plain(value):
                yield f"{name} {value!r}".encode()


def _is_plain(value: object) -> bool:
    match value:
        case None | bool() | int() | float() | str() | torch.dtype():
            return True
        case tuple() | list():
            return all(map(_is_plain, cast("tuple[object, ...]", value)))
        case dict():
            found = cast("dict[object, object]", value)
            return all(map(_is_plain, found)) and all(map(_is_plain, found.values()))
        case _:
            return False
