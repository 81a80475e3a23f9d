"""Which code runs a model: where every function was written that its modules come to.

Owns what counts as code that a release names: what lies in the files of the installed packages,
whatever place it was put in. Must not look at a model's values (``module_identity``), nor run code.
"""

import inspect
import logging
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Final, cast

from torch import nn
from torch.nn.modules import module as global_hooks

from stratakv.core.identity.digests import framed

LOG: Final = logging.getLogger(__name__)
CODE: Final = frozenset({"torch", "transformers", "stratakv"})
"""Packages whose functions and classes are identified by their names: the identity has their
releases."""
_AROUND: Final = frozenset({
    "numpy", "huggingface_hub", "packaging", "accelerate", "typing_extensions",
})  # fmt: skip
"""What these call beside Python's own library and builtins."""
_FOLLOWED: Final = (
    "stratakv/", "transformers/models/", "transformers/activations",
    "transformers/integrations/moe", "transformers/masking_utils", "transformers/modeling_layers",
    "transformers/modeling_rope_utils", "transformers/pytorch_utils", "torch/nn/functional",
    "torch/nn/modules/activation", "torch/nn/modules/conv", "torch/nn/modules/linear",
    "torch/nn/modules/normalization", "torch/nn/modules/sparse",
)  # fmt: skip
"""Files that compute. What their functions name is looked at in turn; of the others, that load,
generate and save, only the functions are that a model's classes have themselves."""
_BUILTIN: Final = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_GLOBAL_HOOKS: Final = ("_global_forward_hooks", "_global_forward_pre_hooks")


class CodeWalk:
    """Goes from classes to their functions, those that these name as globals or in modules, what
    decorators hold, and on. ``foreign``: places where somebody's own code is, who may have changed
    it since; an untouched release has none."""

    def __init__(self) -> None:
        self.foreign: list[str] = []
        self._lines: set[str] = set()
        self._met: dict[int, object] = {}

    def model(self, model: nn.Module) -> None:
        """The classes of all modules within, and hooks that every module has."""
        for kind in dict.fromkeys(type(part) for part in model.modules()):
            self.of(kind, _name_of(kind))
        self.foreign += [name for name in _GLOBAL_HOOKS if vars(global_hooks)[name]]

    def digest(self) -> bytes:
        """32 bytes over every place and what is there: a function of the packages in the place of
        another is another model, too."""
        return framed(line.encode() for line in sorted(self._lines))

    def of(self, value: object, place: str) -> None:
        """A function or a class, or what is wrapped around one. Of other values nothing is
        recorded."""
        match value:
            case FunctionType():
                self._function(value, place)
            case type():
                self._class(value, place)
            case staticmethod() | classmethod() | MethodType():
                self.of(cast("MethodType", value).__func__, place)
            case property():
                for one in (value.fget, value.fset, value.fdel):
                    self.of(one, place)
            case partial():
                self.of(cast("partial[object]", value).func, place)
            case _ if isinstance(value, _BUILTIN):
                self._lines.add(f"{place} {value.__qualname__}")
            case _ if callable(value) and not isinstance(value, ModuleType):
                self.of(type(value), place)
                self.of(inspect.getattr_static(value, "__wrapped__", None), place)
            case _:
                pass

    def _function(self, found: FunctionType, place: str) -> None:
        code = found.__code__
        origin = _origin(code.co_filename) or _generated(found)
        if origin is None:
            self.foreign.append(place)
            return
        self._lines.add(f"{place} {origin} {code.co_qualname}")
        if self._met_before(found):
            return
        for cell in found.__closure__ or ():
            # An empty one is of a class that is still being made.
            for held in _contents(cell):
                self.of(held, f"{_name_of(found)}.<closure>")
        if origin.startswith(_FOLLOWED):
            self._named(found, frozenset(_names(code)))

    def _named(self, found: FunctionType, names: frozenset[str]) -> None:
        """Globals, what lies in those that are modules, and the functions of those that are dicts;
        of the names of attributes, those that these modules have."""
        at = found.__globals__
        for name in sorted(names & at.keys()):
            value: object = at[name]
            place = f"{at['__name__']}.{name}"
            if isinstance(value, ModuleType):
                self._in_modules(value, names)
            elif type(value) is dict:
                for key, one in cast("dict[object, object]", value).items():
                    self.of(one, f"{place}.{key}")
            else:
                self.of(value, place)

    def _in_modules(self, first: ModuleType, names: frozenset[str]) -> None:
        """Of ``torch.nn.functional.silu``, what each of the names may lead to in each module."""
        modules = {first.__name__: first}
        left = [first]
        while left:
            module = left.pop()
            for name in sorted(names & vars(module).keys()):
                value = vars(module)[name]
                if not isinstance(value, ModuleType):
                    self.of(value, f"{module.__name__}.{name}")
                elif value.__name__ not in modules:
                    modules[value.__name__] = value
                    left.append(value)

    def _class(self, kind: type, place: str) -> None:
        self._lines.add(f"{place} {_name_of(kind)}")
        if self._met_before(kind):
            return
        for base in kind.__mro__[1:]:
            self.of(base, _name_of(base))
        for name, value in vars(kind).items():
            self.of(value, f"{_name_of(kind)}.{name}")

    def _met_before(self, value: object) -> bool:
        met = id(value) in self._met
        self._met[id(value)] = value
        return met


def warn_of(unidentified: Sequence[str]) -> None:
    """Log that a model shares with no other, and why; nothing where there is no reason."""
    if unidentified:
        LOG.warning(
            "the model's pages are for itself alone; the identity does not cover %s",
            unidentified[:3],
        )


def is_of_code(found: type | FunctionType | BuiltinFunctionType) -> bool:
    """Whether its name lies in the packages and leads to it."""
    at: object = sys.modules.get(found.__module__ or "")
    for name in found.__qualname__.split("."):
        at = inspect.getattr_static(at, name, None)
    at = at.__func__ if isinstance(at, staticmethod | classmethod) else at
    return at is found and _package(found.__module__) in CODE


def _name_of(found: type | FunctionType) -> str:
    return f"{found.__module__}.{found.__qualname__}"


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _contents(cell: CellType) -> Iterator[object]:
    try:
        yield cell.cell_contents
    except ValueError:
        return


def _generated(found: FunctionType) -> str | None:
    """Where a function came from that has no file: dataclasses and named tuples have such."""
    module = str(found.__globals__.get("__name__"))
    known = _package(module) in CODE | _AROUND | {"builtins"} or module.startswith("namedtuple_")
    return module if known and found.__code__.co_filename.startswith("<") else None


@cache
def _origin(file: str) -> str | None:
    """A file of the packages, by its place within, and of Python's library; None for all others."""
    for package in CODE | _AROUND:
        within = _root(package)
        if within is not None and file.startswith(within):
            return f"{package}/{file.removeprefix(within)}"
    library = sysconfig.get_path("stdlib") + "/"
    added = (f"{library}site-packages/", f"{library}dist-packages/")
    if file.startswith("<frozen ") or (file.startswith(library) and not file.startswith(added)):
        return "python"
    return None


@cache
def _root(package: str) -> str | None:
    found = sys.modules.get(package)
    if found is None or found.__file__ is None:
        return None
    file = Path(found.__file__)
    return f"{file.parent}/" if file.stem == "__init__" else str(file)
