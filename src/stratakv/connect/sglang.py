# pyright: reportMissingImports=false, reportUntypedBaseClass=false
"""A back end of SGLang's HiCache: checksummed, bound by a quota, shared, and repairable.

Owns the words between SGLang's pools and ``BlockingPages``. SGLang loads the class by
``--hicache-storage-backend dynamic`` (docs/sglang.md) and calls it on threads of its own.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import sglang
import torch
from sglang.srt.environ import EnvField, Envs
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_context
from sglang.srt.utils import get_device_name

from stratakv.connect.blocking_pages import BlockingPages
from stratakv.connect.installed_code import installed_fields
from stratakv.connect.namespace import EngineNamespace, identify_weights
from stratakv.connect.namespace_records import NamespaceRecord, StoredPart, save_record
from stratakv.connect.page_counts import PageEvent
from stratakv.connect.pool_hits import Flags, PoolPages, leading, prefix_hits
from stratakv.connect.settings import TierSettings
from stratakv.connect.sglang_fields import (
    OWN,
    fields_of,
    model_paths,
    shard_fields,
    state_fields,
)
from stratakv.connect.sglang_metrics import PageMetrics
from stratakv.connect.sglang_pool import MARK, HostKVCache, HostPool, lies_in_one_piece
from stratakv.connect.stores import format_of, open_engine_store
from stratakv.connect.vllm_fields import weights_directory
from stratakv.core.clock import MonotonicClock, WallClock
from stratakv.storage.urls import hidden

log = logging.getLogger(__name__)
Pages: TypeAlias = Any
"""Tensors of pages, or None where SGLang gives none."""
FLAG: Final = "--hicache-storage-backend-extra-config"
KV: Final = str(PoolName.KV)
STATES: Final = frozenset({str(PoolName.MAMBA)})
LATENT_POOLS: Final = ("MLA", "DSA", "DeepSeekV4", "Logical")
"""In the names of host pools that are alike on every rank of a model with latents. A draft model
beside it may keep heads, of which each rank has its own."""
"""Pools of states: each rank has a part, also where latents are the same on all, and a page is
bytes of several dtypes."""
LAST_PAGE: Final = frozenset({str(PoolName.MAMBA), str(PoolName.SWA)})
"""Pools of which a prefix needs its last page at least; of others, all pages."""


class StrataStorage(HiCacheStorage):
    """``storage_config.extra_config`` has what ``TierSettings`` has, beside SGLang's own."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: object) -> None:
        del kwargs
        self._config = storage_config
        self._settings = TierSettings.of(FLAG, storage_config.extra_config or {}, OWN)
        arguments = get_context().resolved_server_args_dict()
        self._fields = {
            "engine": f"sglang {sglang.__version__}",
            **installed_fields([] if (name := get_device_name()) is None else [name]),
            **fields_of(arguments, os.environ, _variables()),
            **shard_fields(storage_config),
        }
        paths = model_paths(arguments)
        self._models = [identify_weights(weights_directory(path)) for path in paths]
        self._pools: dict[str, HostPool] = {}
        ranks = (storage_config.tp_rank, storage_config.pp_rank, storage_config.dp_rank)
        self._metrics = PageMetrics(ranks) if storage_config.enable_storage_metrics else None
        self._recorded: dict[str, str] = {}

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: object) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, host: HostKVCache) -> None:
        """A pool that gives no flat pages, or states without their dtypes, is not kept, and then
        nothing that needs it hits."""
        if name in self._pools:
            return
        try:
            sample = host.get_dummy_flat_data_page()
            rows = int(host.page_size)
            tag = str(host.storage_format_tag)
            states = state_fields(host) if name in STATES else {}
        except (AttributeError, RuntimeError, ValueError) as error:  # also what it has not got
            log.warning("pool %s of %s is not stored: %s", name, type(host).__name__, error)
            return
        fields = {
            "pool": f"{name} {type(host).__name__}",
            "layout": str(host.layout),
            "page_dtype": str(sample.dtype),
            "page_size": str(rows),
            "page_bytes": str(sample.nbytes),
            "tag": tag,
            **states,
        }
        namespace = EngineNamespace.of(self._models, {**self._fields, **fields})
        ends = open_engine_store(
            self._settings.storage,
            self._settings.storage_key_file,
            format_of(namespace, [max(sample.nbytes, len(MARK))]),
        )
        whole = self._config.is_mla_model and name not in STATES and _holds_latents(host)
        self._pools[name] = HostPool(
            host=host,
            rows=rows,
            page_bytes=int(sample.nbytes),
            dtype=sample.dtype,
            namespace=namespace,
            shard=0 if whole else int(self._config.tp_rank),
            pages=BlockingPages(ends, MonotonicClock(), self._settings.timeout_s),
            in_place=lies_in_one_piece(host, sample.nbytes),
        )
        self._recorded |= {f"{name} {field}": value for field, value in fields.items()}
        if self._config.tp_rank == 0:  # names of the others differ in the rank alone
            fields = {"model": b"".join(self._models).hex(), **self._fields, **self._recorded}
            _save_record(hidden(self._settings.storage), fields, self._pools)

    # -- KV alone ------------------------------------------------------------------------------

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return leading(self._present(KV, keys))

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._load(KV, keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._store(KV, keys, host_indices)

    # -- with pools beside it ------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        kv = self._present(KV, keys)
        whole = leading(kv)
        pools = [
            PoolPages(
                str(transfer.name), self._present(str(transfer.name), keys[:whole]),
                None if transfer.hit_policy == PoolHitPolicy.ALL_PAGES
                else max(1, len(transfer.keys or ())),
            )
            for transfer in pool_transfers or ()
            # A second form of pages that KV has: it never decides, and has no verdict here.
            if transfer.hit_policy != PoolHitPolicy.BLOCK_GROUPS
        ]  # fmt: skip
        hits = prefix_hits(kv, pools)
        by_pool: dict[str, int] = dict(hits.by_pool)
        if whole:
            by_pool[KV] = whole
        return PoolTransferResult(hits.pages, by_pool, list(hits.ends))

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {
            one.name: self._load(str(one.name), one.keys or [], one.host_indices)
            for one in transfers
        }

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {
            one.name: self._store(str(one.name), one.keys or [], one.host_indices)
            for one in transfers
        }

    # -- page by page, of KV: what SGLang calls without "interface_v1" ---------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(
        self,
        key: str,
        target_location: Pages = None,
        target_sizes: Pages = None,
    ) -> torch.Tensor | None:
        (found,) = self.batch_get([key], [target_location], target_sizes)
        return found

    def batch_get(
        self,
        keys: list[str],
        target_locations: Pages = None,
        target_sizes: Pages = None,
    ) -> list[torch.Tensor | None]:
        pool = self._pools.get(KV)
        if pool is None:
            return [None] * len(keys)
        hit = pool.load_into(keys, target_locations)
        return [page if there else None for page, there in zip(target_locations, hit, strict=True)]

    def set(
        self,
        key: str,
        value: Pages = None,
        target_location: Pages = None,
        target_sizes: Pages = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Pages = None, target_locations: Pages = None,
        target_sizes: Pages = None,
    ) -> bool:  # fmt: skip
        pool = self._pools.get(KV)
        if pool is None:
            return False
        return all(pool.store_from(keys, values))

    # -- all of it -----------------------------------------------------------------------------

    def clear(self) -> bool:
        """Also what other servers of the same settings have stored."""
        cleared = [pool.pages.clear() for pool in self._pools.values()]
        return all(cleared)

    def get_stats(self) -> None:
        """SGLang asks now and then, in its scheduler's process, where it has metrics: these are
        among them then, and beside its own there is nothing to tell."""
        if self._metrics is None:
            return
        for name, pool in self._pools.items():
            self._metrics.add(name, pool.pages.take_counts())
        self._metrics.set_off(off=any(pool.pages.off for pool in self._pools.values()))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.pages.close()
        self.get_stats()
        for name, counts in self.totals.items():
            log.info("pages of %s, since the start: %s", name, dict(counts))

    @property
    def totals(self) -> Mapping[str, Mapping[PageEvent, int]]:
        """By pool, what became of its pages since the start (``EVENTS``)."""
        return {name: pool.pages.totals for name, pool in self._pools.items()}

    def _present(self, name: str, keys: Sequence[str]) -> Flags:
        pool = self._pools.get(name)
        return np.zeros(len(keys), np.bool_) if pool is None else pool.contains(keys)

    def _load(self, name: str, keys: list[str], indices: torch.Tensor | None) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None or indices is None or not pool.fits(keys, indices):
            return [False] * len(keys)
        return pool.load(keys, indices)

    def _store(self, name: str, keys: list[str], indices: torch.Tensor | None) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None or indices is None or not pool.fits(keys, indices):
            return [False] * len(keys)
        return pool.store(keys, indices)


def _variables() -> list[str]:
    """That SGLang knows, also without its prefix."""
    return [name for name, field in vars(Envs).items() if isinstance(field, EnvField)]


def _holds_latents(host: HostKVCache) -> bool:
    name = type(host).__name__
    return "MHA" not in name and any(kind in name for kind in LATENT_POOLS)


def _save_record(where: str, fields: Mapping[str, str], pools: Mapping[str, HostPool]) -> None:
    """A pool's row may stand for a whole page, as a state's does: its keys are KV's."""
    kv = pools.get(KV)
    if kv is None:
        return
    parts = [
        StoredPart(
            name=f"pool {name}",
            digest=pool.namespace.digest.hex(),
            page_bytes=(max(pool.page_bytes, len(MARK)),),
            group=0,
            shard=pool.shard,
            page_tokens=kv.rows,
            trailing=1 if name in LAST_PAGE else None,
        )
        for name, pool in pools.items()
    ]
    record = NamespaceRecord(
        engine="sglang",
        storage=where,
        started_s=WallClock().now_s(),
        fields=fields,
        hash_tokens=kv.rows,
        hash_name="sha256",
        parts=tuple(sorted(parts, key=lambda part: part.name != f"pool {KV}")),
    )
    save_record(record)
