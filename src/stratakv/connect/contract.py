"""What our adapters rely on in an engine's classes, and where an engine that is here has another.

Owns the lists of names and the comparison of signatures. Imports an engine only through the modules
that it is given by name; what an engine's functions do, ``vllm_contract`` and ``sglang_contract``
try.
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
from typing import Any, Final, TypeAlias

from stratakv.connect.engines import SupportedEngine

Names: TypeAlias = Mapping[str, Mapping[str, tuple[str, ...]]]
"""By module and class: fields, members and methods."""
RELIED: Final[Mapping[str, Names]] = {
    "stratakv.connect.vllm": {
        "vllm.v1.kv_offload.base": {
            "ReqContext": ("req_id",),
            "LookupResult": ("HIT", "MISS", "RETRY"),
            "Medium": ("STORAGE",),
        },
        "vllm.v1.kv_offload.tiering.base": {
            "TransferJob": ("job_id", "keys", "chunk_ids"),
            "JobResult": (
                "job_id", "success", "successful_keys", "transfer_time", "transfer_bytes",
            ),
            "SecondaryTierManager": ("block_size_bytes",),
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": {
            "OffloadingConnectorStats": ("increase_counter", "set_gauge"),
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorRole": ("SCHEDULER", "WORKER"),
        },
    },
    "stratakv.connect.sglang": {
        "sglang.srt.mem_cache.hicache_storage": {
            "PoolTransfer": ("name", "host_indices", "keys", "hit_policy"),
            "PoolTransferResult": (
                "kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages",
            ),
            "PoolHitPolicy": ("ALL_PAGES", "TRAILING_PAGES", "BLOCK_GROUPS"),
            "PoolName": ("KV", "MAMBA", "SWA"),
            "HiCacheStorage": ("register_mem_pool_host", "register_mem_host_pool_v2"),
        },
    },
}  # fmt: skip
"""By adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demanded:
    """Of an engine's classes above one of ours: ``abstract`` methods, and the parameters of those
    ``methods`` that ours has too."""

    abstract: tuple[str, ...]
    methods: Mapping[str, tuple[str, ...]]


def demanded(cls: type) -> Demanded:
    """What the classes above ``cls`` say."""
    bases = cls.__mro__[1:-1]
    methods: dict[str, tuple[str, ...]] = {}
    for name, made in vars(cls).items():
        theirs = [vars(base)[name] for base in bases if name in vars(base)]
        if inspect.isfunction(made) and theirs and (name == "__init__" or name[:2] != "__"):
            methods[name] = parameters(theirs[0])
    nearest: dict[str, object] = {}
    for base in bases:
        nearest = {**vars(base), **nearest}
    abstract = [name for name, value in nearest.items() if _is_abstract(value)]
    return Demanded(abstract=tuple(sorted(abstract)), methods=methods)


def misfits(cls: type, wanted: Demanded) -> list[str]:
    """Where ``cls`` is not what an engine demands."""
    own = vars(cls)
    found = [
        f"{cls.__name__} has no {name}, which is demanded"
        for name in wanted.abstract
        if name not in own
    ]
    for name, theirs in wanted.methods.items():
        if name in own and parameters(own[name])[: len(theirs)] != theirs:
            found.append(f"{cls.__name__}.{name} is given ({', '.join(theirs)})")
    return found


def parameters(function: Any) -> tuple[str, ...]:  # noqa: ANN401 - any callable
    return tuple(name for name in inspect.signature(function).parameters if name != "self")


def unknown_names(adapter: str) -> list[str]:
    """What the engine has not, of the names that an adapter relies on."""
    found: list[str] = []
    for module, classes in RELIED[adapter].items():
        there = vars(import_module(module))
        for name, members in classes.items():
            if name not in there:
                found.append(f"{module} has no {name}")
                continue
            missing = [member for member in members if member not in _members(there[name])]
            found += [f"{module}.{name} has no {member}" for member in missing]
    return found


def broken(engine: SupportedEngine) -> list[str]:
    """Where the installed engine is not what its adapter takes it for; empty where nowhere.

    Raises what the engine's modules do when they are imported.
    """
    adapter = import_module(engine.adapter)
    found: list[str] = []
    for name in engine.classes:
        cls = vars(adapter)[name]
        found += misfits(cls, demanded(cls))
    found += unknown_names(engine.adapter)
    return found or list(import_module(engine.contract).problems())


def _is_abstract(value: object) -> bool:
    return isinstance(value, FunctionType) and vars(value).get("__isabstractmethod__") is True


def _members(cls: type) -> Sequence[str]:
    if not dataclasses.is_dataclass(cls):
        return dir(cls)
    return [*dir(cls), *(field.name for field in dataclasses.fields(cls))]
