"""All that ranks must have alike, as bytes to compare, and the first place where they differ.

Owns the list of what is a rank's own: everything else that an engine reaches counts, to the last
column, also what is added tomorrow. Must not change anything.
"""

import io
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from threading import Lock
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stratakv.agreement.agreement import Agreement
from stratakv.cache.losses import LossBook
from stratakv.cache.misses import MissLog
from stratakv.cache.prices import AdmissionLimits
from stratakv.core.clock import BroadcastClock
from stratakv.disagg.agreeing_role import AgreeingRole
from stratakv.disagg.decode_role import DecodeRole
from stratakv.disagg.prefill_role import PrefillRole
from stratakv.engine.loop import Engine, EngineLimits
from stratakv.engine.namespaces import Namespaces
from stratakv.engine.ranks.step_messages import StepSync
from stratakv.engine.request import Prompt
from stratakv.engine.step_times import StepTimes
from stratakv.engine.storage_control import BackgroundStores
from stratakv.policy.prefetch import Abandoned, PrefetchRules
from stratakv.policy.prefetch_book import PrefetchCounters
from stratakv.policy.prefetch_reasons import Tally
from stratakv.spec.groups import CacheGroup, CacheSpec
from stratakv.storage.io_worker import IoWorker
from stratakv.storage.opening import Background
from stratakv.testing.fleet.ahead import AheadDevice, AheadExecutor
from stratakv.testing.fleet.device import PageBytes, SimTransfer
from stratakv.testing.fleet.runner import TokenRunner
from stratakv.tiers.persist import PersistCounters
from stratakv.tree.nodes import NodeTable, Run
from stratakv.tree.order import EvictionQueue

OWN: Final = (
    Agreement, StepSync, BroadcastClock, IoWorker, SimTransfer, PageBytes, TokenRunner,
    AheadDevice, AheadExecutor,
    MethodType, FunctionType, BuiltinFunctionType,
    # What this rank's store has answered, and what is made of it.
    PersistCounters, PrefetchCounters, Tally, LossBook, MissLog,
    StepTimes,  # of this rank's processor
    CacheSpec, CacheGroup, AdmissionLimits, EngineLimits,  # never change
    Namespaces, PrefetchRules, Prompt,
    BackgroundStores, Background, type(Lock()),  # stores open and close when they do
    AgreeingRole, PrefillRole, DecodeRole,  # what is agreed is compared in ballots
)  # fmt: skip
"""Types of which every rank has its own, or the same for ever."""
OWN_PARTS: Final[dict[type, frozenset[str]]] = {
    Abandoned: frozenset({"reason"}),
    NodeTable: frozenset({"kids", "paths"}),  # views
}
"""Public attributes of which every rank has its own, by type."""
_NO_ROWS: Final = np.empty(0, np.intp)


def picture(engine: Engine) -> bytes:
    """Equal on two ranks only if they are in the same state; two that are may still differ in what
    is one object and what is two equal ones."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=5)
    pickler.dispatch_table = _TABLE
    pickler.dump(engine)
    return out.getvalue()


def columns(engine: Engine) -> list[npt.NDArray[Any]]:
    """The arrays that an engine has from its start: the columns of its tree, of its tables and of
    its allocators. Copying them is ten times faster than a picture."""
    found: list[npt.NDArray[Any]] = []
    _collect(engine, found, set())
    return found


def first_difference(here: object, there: object) -> str | None:
    """Where two ranks' objects differ: a path, and both sides; None where they do not."""
    return _differ(here, there, "", set())


def _own(thing: object) -> tuple[Callable[..., object], tuple[object, ...]]:
    return str, (type(thing).__name__,)


def _parts(thing: object) -> dict[str, object]:
    """The attributes of an object that all ranks must have alike."""
    if isinstance(thing, Run):  # what lies behind its end is stale
        return {"rows": thing.rows[: len(thing.keys)], "keys": thing.keys, "parent": thing.parent}
    if isinstance(thing, EvictionQueue):  # in few pieces, for there are many batches
        batches = thing.batches()
        rows = [rows for _, rows in batches]
        return {"keys": [key for key, _ in batches], "rows": np.concatenate(rows or [_NO_ROWS])}
    parts = dict(_attributes(thing))
    for name in OWN_PARTS.get(type(thing), ()):
        del parts[name]
    return parts


def _attributes(thing: object) -> dict[str, Any]:
    slots = _slots(type(thing))
    if slots is None:
        return vars(thing)
    return {name: getattr(thing, name) for name in slots}


@cache
def _slots(kind: type) -> tuple[str, ...] | None:
    """None: its objects have a dictionary."""
    mine = [vars(of) for of in kind.__mro__[:-1]]
    if kind.__module__ != "builtins" and any("__slots__" not in names for names in mine):
        return None
    return tuple(name for names in mine for name in names.get("__slots__", ()))


def _array(array: npt.NDArray[Any]) -> tuple[Callable[..., object], tuple[object, ...]]:
    if array.dtype == object:  # its bytes are addresses
        return list, (array.tolist(),)
    return bytes, (array.tobytes(),)


def _reduced(thing: object) -> tuple[Callable[..., object], tuple[object, ...]]:
    return dict, (_parts(thing),)


_TABLE: Final[dict[type, Callable[[Any], Any]]] = {
    **dict.fromkeys(OWN, _own),
    **dict.fromkeys((*OWN_PARTS, Run, EvictionQueue), _reduced),
    np.ndarray: _array,
}


def _collect(thing: object, found: list[npt.NDArray[Any]], seen: set[int]) -> None:
    if isinstance(thing, OWN) or id(thing) in seen:
        return
    seen.add(id(thing))
    match thing:
        case np.ndarray():
            if thing.dtype != object:
                found.append(thing)
        case dict() | list() | tuple() | deque():
            for part in list(thing.values()) if isinstance(thing, dict) else list(thing):
                _collect(part, found, seen)
        case None | bool() | int() | float() | str() | bytes() | range() | Enum() | type():
            pass
        case _:
            for part in _parts(thing).values():
                _collect(part, found, seen)


def _differ(here: object, there: object, path: str, seen: set[int]) -> str | None:
    if isinstance(here, OWN) and type(here) is type(there):
        return None
    if id(here) in seen:
        return None
    seen.add(id(here))
    pairs = _pairs(here, there)
    if pairs is None:
        return f"{path}: {here!r} against {there!r}"
    found = (_differ(one, other, f"{path}.{name}", seen) for name, one, other in pairs)
    return next((where for where in found if where is not None), None)


def _pairs(here: Any, there: Any) -> list[tuple[Any, Any, Any]] | None:  # noqa: ANN401
    """Name and both sides of each part of two things; None where they differ as they are."""
    if type(here) is not type(there):
        return None
    match here:
        case np.ndarray() | np.generic():
            return [] if np.array_equal(here, there) else None
        case dict():
            return _entries(here, there)
        case list() | tuple() | set() | frozenset() | deque():
            return _children(dict(enumerate(here)), dict(enumerate(there)))
        case None | bool() | int() | float() | str() | bytes() | range() | Enum() | type():
            return [] if here == there else None
        case _:
            return _children(_parts(here), _parts(there))


def _entries(
    here: Mapping[Any, Any], there: Mapping[Any, Any]
) -> list[tuple[Any, Any, Any]] | None:
    """Of two dictionaries in their order, whose keys may be a rank's own objects."""
    if list(here) == list(there):
        return _children(dict(here), dict(there))
    if len(here) != len(there):
        return None
    pairs = zip(here.items(), there.items(), strict=True)
    return [(at, one, other) for at, (one, other) in enumerate(pairs)]


def _children(here: dict[Any, Any], there: dict[Any, Any]) -> list[tuple[Any, Any, Any]] | None:
    if len(here) != len(there) or list(here) != list(there):
        return None
    return [(name, one, there[name]) for name, one in here.items()]
