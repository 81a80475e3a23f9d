"""An engine around a model, from its settings to its memory.

Owns the order of a start: refuse what cannot run, split the budget, and only then take memory.
What it runs on comes as a ``Device``; another role, or whatever else plugs in, with ``Sockets``.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from stratakv.assembly.build import DEFAULT_SOCKETS, MappedMemory, Sockets, build
from stratakv.assembly.device import CPU, OWN_RUNNERS, Device
from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.rank_context import check_alike, sharing_of
from stratakv.assembly.sizing import Sizes, size
from stratakv.assembly.stores import opener_while_it_runs, store_key
from stratakv.cache.kv_cache import KVCache
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.engine.attention.torch_pools import LayerTensors
from stratakv.engine.deepseek.refused import own_refusal
from stratakv.engine.executor import Runner
from stratakv.engine.huggingface.model import HuggingFaceModel, with_adapters
from stratakv.engine.huggingface.parallel import tp_refusal
from stratakv.engine.loop import Engine
from stratakv.engine.ranks.ranked import RankedEngine
from stratakv.engine.storage_control import BackgroundStores
from stratakv.memory.block_table import BlockTable
from stratakv.memory.host_arena import HostArena
from stratakv.spec.budget_table import BudgetTable
from stratakv.spec.groups import CacheSpec
from stratakv.spec.model_facts import ModelFacts
from stratakv.spec.offload import selected_group
from stratakv.transfer.engine import TransferEngine

log = logging.getLogger(__name__)

P = TypeVar("P", bound=LayerTensors)


@dataclass(frozen=True, slots=True, eq=False)
class EngineParts:
    """A running engine and what it was built from, for the server, the benches and the tests.
    ``port``: who steps it; with ranks, all of them."""

    plan: EnginePlan
    engine: Engine
    port: Engine | RankedEngine
    model: HuggingFaceModel
    cache: KVCache
    pools: LayerTensors
    arenas: Sequence[HostArena]
    transfer: TransferEngine
    runner: Runner

    @property
    def spec(self) -> CacheSpec:
        return self.plan.spec

    @property
    def max_model_len(self) -> int:
        return self.plan.max_model_len

    @property
    def table(self) -> BudgetTable:
        return BudgetTable.of(self.plan.spec, self.plan.device, self.plan.host)

    def close(self) -> None:
        try:
            self.port.close()
        finally:
            self.transfer.close()


def check_model(facts: ModelFacts, config: EngineConfig) -> None:
    """ConfigError for what our own modules do not do, and for what ranks cannot share."""
    if reason := own_refusal(facts):
        raise ConfigError(f"MODEL: {reason}")
    if reason := tp_refusal(facts, config.tp):
        raise ConfigError(f"--tp {config.tp}: {reason}")
    name = str(facts.config["model_type"])
    if config.adapters() and name in OWN_RUNNERS:
        raise ConfigError(f"--lora: model type {name!r} takes no adapters; allowed is none")


def build_engine(
    model: HuggingFaceModel, config: EngineConfig, device: Device[P] = CPU
) -> EngineParts:
    """Everything below the server, for a model in memory. ConfigError before any is taken."""
    check_model(model.facts, config)
    sizes = size(model.facts, config, device_free=device.free())
    model = with_adapters(model, config.adapters())
    return build_sized(model, config, sizes, device=device)


def build_sized(
    model: HuggingFaceModel,
    config: EngineConfig,
    sizes: Sizes,
    sockets: Sockets = DEFAULT_SOCKETS,
    device: Device[P] = CPU,
) -> EngineParts:
    """The same, with all adapters and for what was found for the model and, with ranks, for all of
    them. ConfigError where ranks differ."""
    if sizes.notice is not None:
        log.warning(sizes.notice)
    for line in sizes.advice(config.chat_tokens):
        log.info("--sparse-offload: %s", line)
    if (ranks := sockets.ranks) is not None:
        check_alike(ranks, config, model.fingerprint, sizes.spec.digest, store_key(config))
    rank = 0 if ranks is None else ranks.ranks.rank
    sharing = sharing_of(sizes, config, rank, model.fingerprint)
    stores = BackgroundStores(opener_while_it_runs(config, sizes.spec, sizes.host, sharing))
    digests, ahead = model.adapters.digests, device.steps_at_once
    plan = EnginePlan.of(config, sizes, model.fingerprint, digests, steps_at_once=ahead)
    plan = replace(plan, vocab_size=model.vocab_size)
    return assemble(model, plan, replace(sockets, stores=stores), device)


def assemble(
    model: HuggingFaceModel,
    plan: EnginePlan,
    sockets: Sockets = DEFAULT_SOCKETS,
    device: Device[P] = CPU,
) -> EngineParts:
    """Take the memory."""
    memory = MappedMemory.of(plan, device.pools, device.transfer, device.allocator, device.arenas)
    made: list[Runner] = []

    def runner(tables: BlockTable) -> Runner:
        kernels, away = device.kernels(model), selected_group(plan.spec)
        host = None
        if plan.spec.has_home_on_host:
            assert device.host_rows is not None, "this device reads no rows of host pages"
            host = device.host_rows(away, memory.pools, memory.arenas)
        made.append(device.runner(model, plan.spec, memory.pools, tables, kernels, host))
        return made[0]

    engine, cache = build(plan, memory, runner, sockets, device.executor)
    ranks = sockets.ranks
    port = engine if ranks is None else RankedEngine(engine, ranks.sync)
    return EngineParts(
        plan, engine, port, model, cache, memory.pools, memory.arenas, memory.transfer, made[0]
    )
