"""The composition root: the one place that names concrete classes.

Owns the order of a start: derive the spec, refuse what cannot run, split the budget, and only then
take memory.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch

from stratakv.agreement.agreement import Agreement
from stratakv.agreement.ranks import SingleRank
from stratakv.cache.admit import AdmissionLimits
from stratakv.cache.kv_cache import CacheOptions, KVCache
from stratakv.core.clock import MonotonicClock
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.core.model_identity import ModelIdentity
from stratakv.core.page_keys import Namespace
from stratakv.engine.adapters import check_directories
from stratakv.engine.attaching import Opener as RankOpener
from stratakv.engine.attaching import no_store
from stratakv.engine.deepseek.refused import OWN_TYPES, own_refusal
from stratakv.engine.deepseek.v4_runner import DeepSeekV4Runner
from stratakv.engine.deepseek.v32_runner import DeepSeekV32Runner
from stratakv.engine.loop import Engine, EngineLimits, Runner
from stratakv.engine.model import HuggingFaceModel, load_model, with_adapters
from stratakv.engine.model_facts import ModelFacts, read_facts
from stratakv.engine.namespaces import Namespaces
from stratakv.engine.parallel import tp_refusal
from stratakv.engine.ranked import RankedEngine
from stratakv.engine.roles import UnifiedRole
from stratakv.engine.runner import ModelRunner
from stratakv.engine.scheduler import StepLimits
from stratakv.engine.token_source import TokenSource
from stratakv.engine.torch_pools import TorchPools
from stratakv.memory.allocator import PageAllocator
from stratakv.memory.block_table import BlockTable
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.policy.load_back import LoadBackPolicy
from stratakv.policy.write import WriteBack, WritePolicy, WriteThrough, WriteThroughSelective
from stratakv.serve.admin import Opener, OpenStore, StorageAdmin
from stratakv.serve.attach_ranks import RankedOpener
from stratakv.serve.driver import EngineDriver
from stratakv.serve.metrics import ServerMetrics
from stratakv.serve.service import Limits, Service
from stratakv.serve.sizing import Sizes, size
from stratakv.serve.tokenizer import Tokenizer
from stratakv.serve.wiring_events import open_publisher
from stratakv.serve.wiring_ranks import RankContext, Sharing, check_alike, heartbeat_s
from stratakv.serve.wiring_storage import (
    check_storage,
    check_url,
    opener_while_it_runs,
    operators_store,
    prefetch_policy_of,
    reach_at_start,
    store_key,
    trust_while_it_runs,
)
from stratakv.spec.budget_table import BudgetTable
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.spec.sharding import default_cut, sharding_of
from stratakv.storage.urls import hidden
from stratakv.tiers.tiered_cache import TierOptions
from stratakv.transfer.cpu import CpuTransferEngine
from stratakv.transfer.engine import TransferEngine
from stratakv.tree.observer import CacheObserver
from stratakv.tree.policies import EVICTION_POLICIES

log = logging.getLogger(__name__)

Pages = Sequence[int]
MakeRunner = Callable[[HuggingFaceModel, CacheSpec, TorchPools, BlockTable], Runner]
OWN_RUNNERS: Final[Mapping[str, MakeRunner]] = {
    "deepseek_v32": DeepSeekV32Runner,
    "glm_moe_dsa": DeepSeekV32Runner,
    "deepseek_v4": DeepSeekV4Runner,
}
"""Model types whose Hugging Face module takes no ragged batch: our own runs in its place."""
assert OWN_RUNNERS.keys() == OWN_TYPES
MakeTransfer = Callable[[CacheSpec, DevicePools, Sequence[HostArena]], TransferEngine]
Follow = Callable[[CacheSpec, Mapping[str, bytes]], CacheObserver]


@dataclass(frozen=True, slots=True, eq=False)
class EngineParts:
    """A running engine and what it was built from, for the server, the benches and the tests.
    ``port``: who steps it; with ranks, all of them."""

    engine: Engine
    port: Engine | RankedEngine
    model: HuggingFaceModel
    cache: KVCache
    pools: TorchPools
    arenas: Sequence[HostArena]
    transfer: TransferEngine
    spec: CacheSpec
    table: BudgetTable
    max_model_len: int

    def close(self) -> None:
        self.port.close()
        self.transfer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What an engine has around it. ``follow``: makes what is told of the cache to those outside,
    from its spec and its adapters' digests. ``ranks``: among the ranks that do the same; None:
    alone. ``sizes``: what all of them can have. ``digest``: of the cache of all ranks together,
    which names pages; None: the spec's. ``opener``: of a rank's end of a store, once it runs.
    ``transfer``: makes what copies. ``token_source``: where tokens are chosen; None: as ever."""

    follow: Follow | None = None
    ranks: RankContext | None = None
    sizes: Sizes | None = None
    digest: bytes | None = None
    opener: RankOpener = no_store
    transfer: MakeTransfer = CpuTransferEngine
    token_source: TokenSource | None = None


def build_engine(
    model: HuggingFaceModel, config: EngineConfig, outside: Outside = Outside()
) -> EngineParts:
    """Everything below the server. ConfigError before any memory is taken."""
    sizes = outside.sizes or size(model.facts, config, on_cpu=model.device.type == "cpu")
    if sizes.notice is not None:
        log.warning(sizes.notice)
    check_model(model.facts, config)
    model = with_adapters(model, config.adapters())
    if (ranks := outside.ranks) is not None:
        check_alike(ranks, config, model.fingerprint, sizes.spec.digest, store_key(config))
        sizes = outside.sizes or ranks.all_reduce_min(sizes)
        sharing = sharing_of(sizes, config, ranks.ranks.rank, model.fingerprint)
        opener = opener_while_it_runs(config, sizes.spec, sizes.host, sharing)
        outside = replace(outside, opener=opener)
    outside = replace(outside, digest=sizes.sharding.whole.digest)
    pages = (sizes.device, sizes.host)
    return assemble(model, sizes.spec, config, pages, sizes.max_model_len, outside)


def check_model(facts: ModelFacts, config: EngineConfig) -> None:
    """ConfigError for what our own modules do not do, and for what ranks cannot share."""
    if reason := own_refusal(facts):
        raise ConfigError(f"MODEL: {reason}")
    if reason := tp_refusal(facts, config.tp):
        raise ConfigError(f"--tp {config.tp}: {reason}")
    name = str(facts.config["model_type"])
    if config.adapters() and name in OWN_RUNNERS:
        raise ConfigError(f"--lora: model type {name!r} takes no adapters")


def assemble(
    model: HuggingFaceModel,
    spec: CacheSpec,
    config: EngineConfig,
    pages: tuple[Pages, Pages],
    max_model_len: int,
    outside: Outside = Outside(),
) -> EngineParts:
    """Take the memory: ``pages`` per group on the device and on the host."""
    device, host = pages
    pools = TorchPools(spec, device)
    arenas = [HostArena(group, host[group.id]) for group in spec.groups]
    transfer = outside.transfer(spec, pools, arenas)
    tables = BlockTable(len(spec.groups), config.max_running, -(-max_model_len // spec.page_tokens))
    tiers = ([PageAllocator(n) for n in device], [PageAllocator(n) for n in host])
    ranks, follow = outside.ranks, outside.follow
    options = CacheOptions(
        limits=AdmissionLimits(
            chunk_tokens=config.chunk_tokens,
            reserve_tokens=config.reserve_tokens,
            load_back=LoadBackPolicy(
                threshold_tokens=config.load_back_threshold, budget_tokens=config.load_back_budget
            ),
            reuse=config.cache != "off",
        ),
        snapshot_pages=config.snapshot_pages(spec.page_tokens),
        tiers=TierOptions(
            eviction=EVICTION_POLICIES[config.eviction](),
            write=_write_policy(config),
            prefetch=prefetch_policy_of(config, spec, host),
            observer=None if follow is None else follow(spec, model.adapters.digests),
            clock=MonotonicClock() if ranks is None else ranks.clock,
            agreement=Agreement(SingleRank()) if ranks is None else ranks.agreement,
        ),
    )
    cache = KVCache(spec, tiers, tables, transfer, options, arenas)
    engine = Engine(
        cache,
        runner_of(model, spec, pools, tables),
        UnifiedRole(),
        Namespaces(
            Namespace(model=model.fingerprint, spec_digest=outside.digest or spec.digest),
            model.adapters.digests,
        ),
        EngineLimits(
            max_model_len=max_model_len,
            max_running=config.max_running,
            step=StepLimits(step_tokens=config.step_tokens, chunk_tokens=config.chunk_tokens),
        ),
        outside.token_source if ranks is None else ranks.sync,
    )
    port = engine if ranks is None else RankedEngine(engine, ranks.sync, outside.opener)
    table = BudgetTable.of(spec, device, host)
    return EngineParts(
        engine, port, model, cache, pools, arenas, transfer, spec, table, max_model_len
    )


def build_service(
    path: Path, config: EngineConfig, server: ServerConfig, ranks: RankContext | None = None
) -> tuple[Service, EngineParts]:
    """A server over the model directory ``path``; nothing runs yet. ``ranks``: rank 0's."""
    name = server.served_model_name or path.resolve().name
    sizes = check_service(path, config, server)
    if ranks is not None:
        sizes = ranks.all_reduce_min(sizes)  # before anything is made as long as they are
    tokenizer = Tokenizer(path)
    with ExitStack() as undo:
        publisher = open_publisher(config, server)
        if publisher is not None:
            undo.callback(publisher.close)
        model, store = _load(path, config, sizes, ranks)
        if store is not None:
            undo.callback(store.worker.close, 0)
        outside = Outside(
            follow=None if publisher is None else publisher.follow,
            ranks=ranks,
            sizes=None if ranks is None else sizes,
        )
        parts = build_engine(model, config, outside)
        undo.pop_all()
    _attach(parts, store, sizes)
    groups = {group.id: group.name for group in parts.spec.groups if not group.scratch}
    clock = MonotonicClock()
    metrics = ServerMetrics(groups)
    if publisher is not None:
        publisher.on_dropped = metrics.lost_kv_events
    driver = EngineDriver(
        parts.port,
        max_waiting=server.max_waiting,
        clock=clock,
        follower=publisher,
        heartbeat_s=None if ranks is None else heartbeat_s(config),
    )
    service = Service(
        driver=driver,
        storage=StorageAdmin(driver, parts.port, clock, _opener(parts, config, driver), store),
        tokenizer=tokenizer,
        metrics=metrics,
        clock=clock,
        version=version("stratakv"),
        model=name,
        limits=Limits(
            max_model_len=parts.max_model_len,
            vocab=parts.model.vocab_size,
            default_max_tokens=server.default_max_tokens,
        ),
        groups=groups,
        stop_tokens=parts.model.eos_ids,
        info=_info(config, server, parts),
        api_key=server.api_key,
        admin_key=server.admin_key,
        adapters=tuple(parts.model.adapters.digests),
    )
    return service, parts


def check_service(path: Path, config: EngineConfig, server: ServerConfig) -> Sizes:
    """ConfigError for what can be refused before weights that may take minutes to load."""
    name = server.served_model_name or path.resolve().name
    if name in config.adapters():
        raise ConfigError(f"--lora {name}={config.adapters()[name]}: the model has this name")
    facts = read_facts(path, config.dtype)
    check_model(facts, config)
    check_directories(config.adapters())
    sizes = size(facts, config, on_cpu=True)
    check_storage(config, sizes.host)
    return sizes


def build_follower(path: Path, config: EngineConfig, ranks: RankContext) -> EngineParts:
    """What a rank has that no client talks to; nothing runs yet."""
    sizes = ranks.all_reduce_min(check_service(path, config, ServerConfig()))
    with ExitStack() as undo:
        model, store = _load(path, config, sizes, ranks)
        if store is not None:
            undo.callback(store.worker.close, 0)
        parts = build_engine(model, config, Outside(ranks=ranks, sizes=sizes))
        undo.pop_all()
    _attach(parts, store, sizes)
    return parts


def _attach(parts: EngineParts, store: OpenStore | None, sizes: Sizes) -> None:
    if store is not None:
        assert parts.spec.digest == sizes.spec.digest, "the weights are not what config.json says"
        parts.engine.attach_storage(store.worker)


def sharing_of(sizes: Sizes, config: EngineConfig, rank: int, model: bytes = b"") -> Sharing:
    """``model``: its fingerprint."""
    cut = default_cut(config.tp) if config.storage_shards is None else config.storage_shards
    return Sharing(sizes.sharding, rank, cut, model)


def _load(
    path: Path, config: EngineConfig, sizes: Sizes, ranks: RankContext | None
) -> tuple[HuggingFaceModel, OpenStore | None]:
    """The model, and the store of ``--storage``: reached before weights that may take minutes to
    load, and asked for nothing until it is known whose pages to look for."""
    sharing = sharing_of(sizes, config, 0 if ranks is None else ranks.ranks.rank)
    with ExitStack() as undo:
        peers = None if ranks is None else ranks.ranks
        identity = undo.enter_context(ModelIdentity(path, peers))
        reached = reach_at_start(config, sizes.spec, sizes.host, sharing)
        if reached is not None:
            undo.callback(reached.close)
        model = load_model(path, config.dtype, ranks=config.tp, identity=identity)
        undo.pop_all()
    if reached is None:
        return model, None
    with operators_store(reached.url):
        return model, reached.open(replace(sharing, model=model.fingerprint))


def _opener(parts: EngineParts, config: EngineConfig, driver: EngineDriver) -> Opener | str:
    """What opens a store for a server that runs, or why none can be attached to it."""
    host_pages = [arena.pages for arena in parts.arenas]
    if config.cache != "host" or not host_pages[ANCHOR]:
        return "there is no host tier between storage and the device; --cache host has"
    if isinstance(parts.port, RankedEngine):
        trust = trust_while_it_runs(config)
        check = partial(check_url, ranks=config.tp, host_pages=host_pages, trust=trust)
        return RankedOpener(driver, parts.port, MonotonicClock(), check)
    whole = sharding_of(parts.model.config, parts.spec, 1)
    cut = config.storage_shards or default_cut(1)
    sharing = Sharing(whole, 0, cut, parts.model.fingerprint)
    return opener_while_it_runs(config, parts.spec, host_pages, sharing)


def runner_of(
    model: HuggingFaceModel, spec: CacheSpec, pools: TorchPools, tables: BlockTable
) -> Runner:
    """What runs the model: Hugging Face's module unmodified, or our own in its place."""
    own = OWN_RUNNERS.get(str(model.config["model_type"]), ModelRunner)
    return own(model, spec, pools, tables)


def _write_policy(config: EngineConfig) -> WritePolicy:
    match config.write_policy:
        case "write-through-selective":
            return WriteThroughSelective(config.write_hits)
        case "write-back":
            return WriteBack(config.write_back_reserve)
        case _:
            return WriteThrough()


def _info(config: EngineConfig, server: ServerConfig, parts: EngineParts) -> Mapping[str, object]:
    """What ``/server_info`` shows."""
    keys = {"api_key": server.api_key is not None, "admin_key": server.admin_key is not None}
    shown = asdict(server) | keys
    return {
        "engine": asdict(config)
        | {
            "storage": None if config.storage is None else hidden(config.storage),
            "page_tokens": parts.spec.page_tokens,
            "max_model_len": parts.max_model_len,
            "lora": {name: digest.hex() for name, digest in parts.model.adapters.digests.items()},
        },
        "server": shown,
        "threads": torch.get_num_threads(),
        "spec": {
            "page_tokens": parts.spec.page_tokens,
            "digest": parts.spec.digest.hex(),
            "groups": [
                {
                    "name": group.name,
                    "retention": repr(group.retention),
                    "page_bytes": group.page_bytes,
                    "buffers": [buffer.name for buffer in group.buffers],
                }
                for group in parts.spec.groups
            ],
        },
        "pages": {f"{pool.tier}.{pool.group}": pool.total for pool in parts.cache.stats()},
    }
