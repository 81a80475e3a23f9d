# pyright: reportMissingImports=false, reportUntypedBaseClass=false
"""A storage tier below vLLM's own CPU tier: checksummed, bound by a quota, shared, and repairable.

Owns the words between vLLM's classes and ``ChunkTier``, and nothing else. vLLM loads both classes
by ``stratakv.connect.vllm`` (docs/vllm.md): the connector is vLLM's own, and hands its tier what
only a connector is given, the engine's configuration.
"""

import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.envs import environment_variables
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from stratakv.connect.chunk_tier import ChunkTier
from stratakv.connect.installed_code import installed_fields
from stratakv.connect.lent_rows import staged
from stratakv.connect.namespace import EngineNamespace, identify_weights
from stratakv.connect.namespace_records import NamespaceRecord, StoredPart, save_record
from stratakv.connect.page_counts import EVENTS, PageEvent
from stratakv.connect.settings import TierSettings
from stratakv.connect.stores import format_of, open_engine_store
from stratakv.connect.vllm_fields import (
    fields_of,
    layout_of,
    model_directories,
    trailing_tokens,
    weights_directory,
)
from stratakv.core.clock import MonotonicClock, WallClock
from stratakv.core.errors import ConfigError
from stratakv.core.ids import GroupId
from stratakv.storage.backend import ObjectKey
from stratakv.storage.io_worker import IoLimits, IoWorker
from stratakv.storage.urls import hidden

log = logging.getLogger(__name__)

SETTINGS: Final = "stratakv_engine"
"""Under which the connector leaves the engine's configuration for its tiers."""
PAGES: Final = "stratakv:kv_pages"
OFF: Final = "stratakv:store_off"
OWN: Final = ("type", "module_path", "locality")
"""Settings of a tier that are vLLM's."""
MOST_QUEUED: Final = 8192
LEAST_QUEUED: Final = 64
COPIED_BYTES: Final = 8 << 20
"""Of a batch: it is still in the processor's cache when it is copied once more."""


class StrataConnector(OffloadingConnector):
    """vLLM's ``OffloadingConnector``, which reports the engine's configuration to ``StrataTier``:
    a tier alone is not given the dtype, the quantisation nor the overrides of the model."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        if role == KVConnectorRole.SCHEDULER:
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            extra[SETTINGS] = {
                "models": model_directories(vllm_config),
                "fields": fields_of(
                    vllm_config, kv_cache_config, os.environ, tuple(environment_variables)
                ),
                "devices": _devices(vllm_config.parallel_config),
                "trailing": [
                    trailing_tokens(group.kv_cache_spec)
                    for group in kv_cache_config.kv_cache_groups
                ],
            }
        super().__init__(vllm_config, role, kv_cache_config)


class StrataTier(SecondaryTierManager):
    """``given``: of ``TierSettings``, and ``locality``, which vLLM has for every tier."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        locality: str | None = None,
        **given: object,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        config = offloading_spec.config
        settings = TierSettings.of("--kv-transfer-config", given, OWN)
        view = np.frombuffer(primary_kv_view, np.uint8)
        row_bytes = self.block_size_bytes
        rows = len(view) // row_bytes
        models, fields = _identity(config, row_bytes)
        self._namespace = EngineNamespace.of(models, fields)
        self._groups = {group.group_id: at for at, group in enumerate(config.groups)}
        form = format_of(self._namespace, [row_bytes] * len(config.groups))
        ends = open_engine_store(settings.storage, settings.storage_key_file, form)
        # What waits to be written is pinned in the CPU tier: half of that must come and go.
        limits = IoLimits(
            queue_pages=min(max(rows // 2, LEAST_QUEUED), MOST_QUEUED), batch_bytes=COPIED_BYTES
        )
        clock = MonotonicClock()
        self._tier = ChunkTier(
            IoWorker(staged(ends), form, limits, clock),
            self._name,
            view.data,
            (row_bytes, row_bytes),
            clock,
            settings.timeout_s,
        )
        self._was_off = False
        where = hidden(settings.storage)
        save_record(_record(config, self._namespace, where, models, fields))
        log.info("pages of namespace %s in %s", self._namespace.digest.hex()[:12], where)

    def _name(self, key: bytes) -> ObjectKey:
        offload_key = OffloadKey(key)
        page = self._namespace.page_key(get_offload_block_hash(offload_key))
        return ObjectKey(page, GroupId(self._groups[get_offload_group_idx(offload_key)]))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        present = self._tier.lookup(key, req_context.req_id)
        if present is None:
            return LookupResult.RETRY
        return LookupResult.HIT if present else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        job = job_metadata
        # vLLM has the keys in the order of a set. Its CPU tier gave rows to a chain from its head
        # on, and what is written in that order is read in one piece.
        order = np.argsort(job.chunk_ids, kind="stable").tolist()
        keys = list(job.keys)
        self._tier.store(job.job_id, [keys[at] for at in order], job.chunk_ids[order].tolist())

    def submit_load(self, job_metadata: TransferJob) -> None:
        job = job_metadata
        self._tier.load(job.job_id, list(job.keys), job.chunk_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [
            JobResult(
                job_id=report.job,
                success=report.whole,
                successful_keys=tuple(map(OffloadKey, report.done)) if report.loading else None,
                transfer_time=report.took_s,
                transfer_bytes=len(report.done) * self.block_size_bytes,
            )
            for report in self._tier.take_reports()
        ]

    def has_pending_work(self) -> bool:
        return self._tier.busy

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._tier.touch(list(keys))

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._tier.release(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._tier.end_step()
        if self._tier.awaited:
            # A scheduler that steps without work keeps the interpreter from the store's thread: of
            # its 5 ms turns a restart hit then waits for dozens.
            time.sleep(0)

    def drain_jobs(self) -> None:
        """vLLM asks for it where it resets its caches: the weights may have been changed in place,
        and nobody can identify what they are now. So nothing stored so far is used any more."""
        self._tier.drain()
        self._namespace = self._namespace.renewed()
        self._tier.rename(self._name)
        log.warning(
            "vLLM has reset its caches: until it starts again, only pages stored from now on are "
            "used, since its weights may have changed"
        )

    def shutdown(self) -> None:
        self._tier.close()
        log.info("pages, since the start: %s", dict(self.totals))

    @property
    def totals(self) -> Mapping[PageEvent, int]:
        """What became of pages since the start (``EVENTS``)."""
        return self._tier.counts.total

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        events = "; ".join(f"{name}: {text}" for name, text in EVENTS.items())
        return {
            PAGES: OffloadingCounterMetadata(
                documentation=f"Pages of StrataKV's tier. {events}.", labelnames=("event",)
            ),
            OFF: OffloadingGaugeMetadata(
                documentation="1 while the store is left alone because it has failed."
            ),
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = OffloadingConnectorStats()
        for event, pages in self._tier.counts.take().items():
            stats.increase_counter(PAGES, pages, (event,))
        if self._tier.off != self._was_off:
            self._was_off = self._tier.off
            stats.set_gauge(OFF, int(self._was_off))
        return stats


def _identity(
    config: Any,  # noqa: ANN401 - vLLM's OffloadingConfig
    row_bytes: int,
) -> tuple[Sequence[bytes], Mapping[str, str]]:
    settings: Mapping[str, Any] | None = config.extra_config.get(SETTINGS)
    if settings is None:
        raise ConfigError(
            "--kv-transfer-config: vLLM gives a tier neither the model's dtype nor its "
            'quantisation; allowed is "kv_connector": "StrataConnector" with '
            '"kv_connector_module_path": "stratakv.connect.vllm"'
        )
    models = [identify_weights(weights_directory(name)) for name in settings["models"]]
    fields = {
        "engine": f"vllm {_version()}",
        **installed_fields(settings["devices"]),
        **settings["fields"],
        **layout_of(config, row_bytes),
    }
    return models, fields


def _devices(
    parallel: Any,  # noqa: ANN401 - vLLM's ParallelConfig
) -> Sequence[str]:
    """Names of those of this machine that ranks compute on, as vLLM's workers choose them: those of
    a replica come after those of the replicas before it, unless something else has placed it."""
    first, count = 0, int(current_platform.device_count())
    placed = (parallel.distributed_executor_backend, parallel.data_parallel_backend)
    if not {"ray", "external_launcher"} & set(placed) and parallel.nnodes_within_dp == 1:
        replica = parallel.data_parallel_rank_local
        replica = parallel.data_parallel_index if replica is None else replica
        first = int(replica) * int(parallel.world_size)
    used = range(first, min(first + int(parallel.world_size), count))
    return [str(current_platform.get_device_name(at)) for at in used]


def _record(
    config: Any,  # noqa: ANN401 - vLLM's OffloadingConfig
    namespace: EngineNamespace,
    where: str,
    models: Sequence[bytes],
    fields: Mapping[str, str],
) -> NamespaceRecord:
    row_bytes = int(fields["row_bytes"])
    trailing: Sequence[int | None] = config.extra_config[SETTINGS]["trailing"]
    parts: list[StoredPart] = []
    for at, group in enumerate(config.groups):
        width = group.tokens_per_block * config.cache.blocks_per_chunk
        read = trailing[group.group_id]
        parts.append(
            StoredPart(
                name=f"group {group.group_id}, {len(group.layer_names)} layers",
                digest=namespace.digest.hex(),
                page_bytes=(row_bytes,) * len(config.groups),
                group=at,
                shard=0,
                page_tokens=width,
                trailing=None if read is None else -(-read // width),
            )
        )
    return NamespaceRecord(
        engine="vllm",
        storage=where,
        started_s=WallClock().now_s(),
        fields={"model": b"".join(models).hex(), **fields},
        hash_tokens=config.cache.tokens_per_hash,
        hash_name=fields["hash"],
        parts=tuple(parts),
    )


def _version() -> str:
    import vllm  # noqa: PLC0415 - what is loaded, however its package is called

    return str(vllm.__version__)
