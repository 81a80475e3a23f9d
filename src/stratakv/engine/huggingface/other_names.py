"""A model's layers with other functions under the names that they call.

Hugging Face's layers call what computes their states by a global name. Owns giving a layer a
forward of the same code in a namespace of its own, and taking it away again; neither its class
nor another model sees it.
"""

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any, Final, TypeAlias
from weakref import WeakSet

from torch import nn

Wrap: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From the function that a layer calls to the one that it is to call."""


_made: Final[WeakSet[FunctionType]] = WeakSet()


def take_names(model: nn.Module) -> None:
    """Let every layer of ``model`` have the forward of its class again where ``give_names`` gave it
    another: a model that is adopted a second time is the one that it was."""
    for part in model.modules():
        match vars(part).get("forward"):
            case MethodType(__func__=FunctionType() as forward) if forward in _made:
                del part.forward
            case _:
                pass


def give_names(model: nn.Module, wraps: Mapping[str, Wrap]) -> int:
    """Let every layer of ``model`` whose forward calls a function by one of these names call what
    is made of it. Returns how many layers do."""
    made: dict[FunctionType, FunctionType] = {}
    count = 0
    for part in model.modules():
        forward = inspect.unwrap(part.forward)
        forward = forward.__func__ if isinstance(forward, MethodType) else forward
        if not isinstance(forward, FunctionType):
            continue
        called = [name for name in wraps if name in forward.__code__.co_names]
        if not called:
            continue
        if forward not in made:
            made[forward] = _with_names(forward, {name: wraps[name] for name in called})
        part.forward = MethodType(made[forward], part)
        count += 1
    return count


def _with_names(forward: FunctionType, wraps: Mapping[str, Wrap]) -> FunctionType:
    """``forward`` as it is, in a namespace of its own."""
    theirs = forward.__globals__
    names = theirs | {name: wrap(theirs[name]) for name, wrap in wraps.items()}
    copy = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    _made.add(copy)
    return copy
