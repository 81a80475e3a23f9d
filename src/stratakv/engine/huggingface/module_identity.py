"""The identity of a model in memory: every byte of it, and every value that its modules hold.

Owns what of a module counts. Agrees with no identity of a directory. Must not read files.
"""

import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from stratakv.core.identity.digests import TensorDigest, digest_of
from stratakv.core.identity.revision import REVISION
from stratakv.engine.huggingface.module_code import CodeWalk, is_of_code, warn_of
from stratakv.engine.huggingface.precision import computed_on, modes, releases

FORMAT: Final = b"stratakv-model-in-memory-3"
_NAMES: Final = frozenset({"name_or_path", "_name_or_path"})
_NOT_COMPUTED_WITH: Final = _NAMES | {
    "training", "gradient_checkpointing",
    # nn.Module's own: what matters of it are its forward hooks.
    "_non_persistent_buffers_set", "_is_full_backward_hook", "_backward_hooks",
    "_backward_pre_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs", "_load_state_dict_post_hooks", "_load_state_dict_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks",
}  # fmt: skip
_NOT_IN_TENSORS: Final = frozenset({"_is_hf_initialized"})  # a mark of the loader's
_HOOKS: Final = frozenset({"_forward_hooks", "_forward_pre_hooks"})
_NOT_IN_CONFIGS: Final = _NAMES | {
    "_commit_hash",
    "architectures",  # which a save writes down; the module's class is identified itself
    "_attn_implementation_internal",  # which the engine sets
    "_attn_implementation_autoset",
}
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
Container: TypeAlias = (
    list[object] | tuple[object, ...] | set[object] | frozenset[object] | dict[object, object]
)
_CONTAINERS: Final = frozenset({list, tuple, set, frozenset, dict, OrderedDict, torch.Size})
"""Others of their kind have code of their own, which may answer otherwise."""
_TENSORS: Final = (torch.Tensor, nn.Parameter, nn.Buffer)


def module_identity(module: PreTrainedModel, dtype: str) -> bytes:
    """32 bytes over the config, and over the class, the parameters, the buffers, those that are not
    saved too, and the attributes of every module within, whatever they are called and in which
    containers they lie. Of a model that holds what cannot be identified (a forward hook, a function
    or an object that is not of ``CODE``) they are new each time: it shares no page with any
    other."""
    walk = _Walk()
    walk.code.model(module)
    how = (dtype, *releases(), *modes(), *computed_on(module.device, module.dtype))
    head = [FORMAT, REVISION, *map(str.encode, how), *walk.of(module.config, "config")]
    head += walk.of(module, "model")
    head.append(walk.code.digest())
    walk.unidentified += walk.code.foreign
    if walk.unidentified:
        warn_of(walk.unidentified)
        head.append(secrets.token_bytes(32))
    return digest_of(head, walk.lines)


def tensor_line(name: str, tensor: torch.Tensor) -> TensorDigest:
    """Of every byte of a tensor, as it would be stored."""
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return TensorDigest.of(name, str(tensor.dtype), tensor.shape, plain)


class _Walk:
    """Describes what lies in a value, in parts of which none can be taken for another: whatever
    holds others states first how many. What is reached again is given by its number. ``lines``: the
    tensors; ``unidentified``: where something is that two models may hold alike and compute
    otherwise."""

    def __init__(self) -> None:
        self.lines: list[TensorDigest] = []
        self.unidentified: list[str] = []
        self.code = CodeWalk()
        self._met: dict[int, tuple[int, object]] = {}

    def of(self, value: object, path: str) -> Iterator[bytes]:
        kind = type(value)
        if kind in _PLAIN:
            yield f"{kind.__name__} {value!r}".encode("utf-8", "surrogatepass")
            return
        if id(value) in self._met:
            yield b"again %d" % self._met[id(value)][0]
            return
        match value:
            case torch.Tensor() | nn.Module() | PretrainedConfig() | list() | dict():
                self._met[id(value)] = len(self._met), value
            case _ if _is_record(value):
                self._met[id(value)] = len(self._met), value
            case _:
                pass
        yield f"{kind.__module__}.{kind.__qualname__}".encode()
        yield from self._inside(value, path)

    def _inside(self, value: object, path: str) -> Iterator[bytes]:
        match value:
            case torch.Tensor():
                self.lines.append(tensor_line(path, value))
                if type(value) not in _TENSORS:
                    yield self._unidentified(path)
                yield from self._named(vars(value), path, _NOT_IN_TENSORS)
            case nn.Module():
                yield from self._module(value, path)
            case PretrainedConfig():
                yield from self._code(type(value), path)
                # A save leaves the name of a dtype where the dtype was.
                held = vars(value) | {"dtype": str(value.dtype).removeprefix("torch.")}
                yield from self._named(held, path, _NOT_IN_CONFIGS)
            case GenerationConfig():
                pass  # how tokens are chosen
            case np.ndarray() | np.generic():
                yield from self._array(cast("npt.NDArray[np.generic]", np.asarray(value)), path)
            case list() | tuple() | set() | frozenset() | dict():
                yield from self._container(cast("Container", value), path)
            case _:
                yield from self._object(value, path)

    def _object(self, value: object, path: str) -> Iterator[bytes]:
        match value:
            case partial():
                bound = cast("partial[object]", value)
                yield from self._several((bound.func, bound.args, bound.keywords), path)
            case MethodType():
                yield from self._several((value.__func__, value.__self__), path)
            case FunctionType() | BuiltinFunctionType() | type():
                yield from self._code(value, path)
            case Enum():
                yield value.name.encode()
                yield from self._code(type(value), path)
            case _ if _is_record(value):
                yield from self._code(type(value), path)
                yield from self._named(vars(value), path, frozenset())
            case _:
                yield self._unidentified(path)

    def _container(self, value: Container, path: str) -> Iterator[bytes]:
        kind = cast("type", type(value))
        if kind not in _CONTAINERS:
            yield from self._code(kind, path)
        match value:
            case list() | tuple():
                yield from self._several(value, path)
            case set() | frozenset():
                yield from self._unordered(value, path)
            case dict():
                yield from self._keyed(value, path)
        if kind.__dictoffset__:
            yield from self._named(vars(value), path, frozenset())
        if any(vars(base).get("__slots__") for base in kind.__mro__):
            yield self._unidentified(path)

    def _unordered(self, values: Iterable[object], path: str) -> Iterator[bytes]:
        parts = sorted(list(self.of(value, path)) for value in values)
        yield b"%d" % len(parts)
        for part in parts:
            yield from part

    def _keyed(self, found: dict[object, object], path: str) -> Iterator[bytes]:
        yield from self._several(found.keys(), path)
        for key, value in found.items():
            yield from self.of(value, f"{path}.{key}")

    def _module(self, module: nn.Module, path: str) -> Iterator[bytes]:
        yield from self._code(type(module), path)
        for name in _HOOKS:
            if vars(module)[name]:
                yield self._unidentified(f"{path}.{name}")
        yield from self._named(vars(module), path, _NOT_COMPUTED_WITH | _HOOKS)
        if isinstance(module, list | tuple | dict | set | frozenset):
            yield self._unidentified(path)

    def _named(
        self, held: Mapping[str, object], path: str, left_out: frozenset[str]
    ) -> Iterator[bytes]:
        names = sorted(held.keys() - left_out)
        yield b"%d" % len(names)
        for name in names:
            yield name.encode()
            yield from self.of(held[name], f"{path}.{name}")

    def _several(self, values: Iterable[object], path: str) -> Iterator[bytes]:
        found = list(values)
        yield b"%d" % len(found)
        for at, value in enumerate(found):
            yield from self.of(value, f"{path}.{at}")

    def _array(self, array: npt.NDArray[np.generic], path: str) -> Iterator[bytes]:
        yield f"{array.dtype.descr} {array.shape}".encode()
        if array.dtype.hasobject:
            yield self._unidentified(path)
        else:
            yield array.tobytes()

    def _code(self, found: type | FunctionType | BuiltinFunctionType, path: str) -> Iterator[bytes]:
        """Of a class or function its name, if that leads to it and to nobody's own code."""
        yield f"{found.__module__}.{found.__qualname__}".encode()
        self.code.of(found, path)
        if not is_of_code(found):
            yield self._unidentified(path)

    def _unidentified(self, path: str) -> bytes:
        self.unidentified.append(path)
        return b"unidentified"


def _is_record(value: object) -> bool:
    """Whether its fields are all that it holds, and can be seen."""
    slots = any("__slots__" in vars(kind) for kind in type(value).__mro__)
    return is_dataclass(value) and not isinstance(value, type) and not slots
