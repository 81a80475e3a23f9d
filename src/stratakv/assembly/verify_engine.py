"""Engines in which ``engine.verify`` tries a model: small pools, pages that nobody owns are NaN.

Owns how large such an engine is, and how its unowned pages are overwritten. Must not choose what is
asked of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from stratakv.assembly.build import Sockets
from stratakv.assembly.device import Device
from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.models import EngineParts, assemble
from stratakv.assembly.rank_context import ObjectSharding
from stratakv.assembly.sizing import Pages, Sizes
from stratakv.assembly.stores import open_store
from stratakv.cache.kv_cache import KVCache
from stratakv.core.config import EngineConfig
from stratakv.core.ids import PageIds
from stratakv.engine.attention.torch_pools import LayerTensors
from stratakv.engine.executor import TokenSource
from stratakv.engine.huggingface.model import HuggingFaceModel
from stratakv.engine.loop import Engine
from stratakv.engine.tensors import on_host
from stratakv.engine.verify.claims import StartSubject
from stratakv.memory.mapped import POISON
from stratakv.spec.groups import CacheGroup, CacheSpec
from stratakv.spec.sharding import default_cut, sharding_of
from stratakv.storage.io_worker import IoWorker
from stratakv.tree.nodes import Tier

OpenWorker: TypeAlias = Callable[[Pages], IoWorker | None]
"""A fresh worker over one store, for so many host pages; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialShape:
    """``lengths``: tokens of each prompt. ``chunk_tokens``: most of a prompt in a step."""

    page_tokens: int
    chunk_tokens: int
    max_running: int
    lengths: tuple[int, ...]

    @property
    def pages(self) -> int:
        """Of each group and tier: what all prompts, what is added to them, and chunks take."""
        chunks = self.max_running * self.chunk_tokens // self.page_tokens
        return -(-4 * sum(self.lengths) // self.page_tokens) + chunks

    def longest(self, max_positions: int) -> int:
        """Of prompt and answer together."""
        return min(2 * max(self.lengths) + 32, max_positions)


@dataclass(frozen=True, slots=True)
class Tried:
    """An engine's parts as ``engine.verify`` takes them."""

    parts: EngineParts

    @property
    def engine(self) -> Engine:
        return self.parts.engine

    @property
    def cache(self) -> KVCache:
        return self.parts.cache

    def scrub(self) -> None:
        """Nobody owns these: whoever reads one reads NaN."""
        unowned = self.cache.tiers.pools.unowned
        for group in self.parts.spec.groups:
            poison(self.parts.pools, group, unowned(Tier.DEVICE, group.id))
            self.parts.arenas[group.id].poison(unowned(Tier.HOST, group.id))

    def close(self) -> None:
        self.parts.close()


def poison(pools: LayerTensors, group: CacheGroup, pages: PageIds) -> None:
    """Fill device pages with NaN (integers: 0xFF bytes), whatever device they are on."""
    for buffer in group.buffers:
        for layer in buffer.layers:
            raw = pools.layer(group.id, buffer.name, layer).view(torch.uint8)
            raw.index_fill_(0, torch.from_numpy(pages).long().to(raw.device), POISON)
            if len(raw):
                on_host(raw[:1])  # whatever stream comes next, it comes after this


def store_worker(url: str, model: HuggingFaceModel, spec: CacheSpec, pages: Pages) -> IoWorker:
    """Over the store of ``--storage url``, for pages of ``model``. Errors as of ``open_store``."""
    whole = sharding_of(model.config, spec, 1)
    sharing = ObjectSharding(whole, 0, default_cut(1), model.fingerprint)
    return open_store(url, spec, pages, sharing).worker


def trials(
    model: HuggingFaceModel,
    spec: CacheSpec,
    shape: TrialShape,
    make_device: Callable[[], Device[Any]],
    open_worker: OpenWorker,
) -> StartSubject:
    """What starts an engine over ``model``."""
    each = (shape.pages,) * len(spec.groups)
    longest = shape.longest(model.max_positions)

    def begin(token_source: TokenSource, chunk_tokens: int | None) -> Tried:
        chunk = shape.chunk_tokens if chunk_tokens is None else chunk_tokens
        config = EngineConfig(
            page_tokens=shape.page_tokens,
            max_running=shape.max_running,
            max_model_len=longest,
            chunk_tokens=chunk,
            step_tokens=2 * chunk + shape.max_running,
            prefetch_policy="wait-complete",
            prefetch_threshold=1,
            load_back_threshold=1,
        )
        device, sizes = make_device(), Sizes.of(spec, each, each, longest)
        plan = EnginePlan.of(config, sizes, model.fingerprint, steps_at_once=device.steps_at_once)
        tried = Tried(assemble(model, plan, Sockets(token_source=token_source), device))
        if (worker := open_worker(each)) is not None:
            tried.engine.attach_storage(worker)
        tried.scrub()
        return tried

    return begin
