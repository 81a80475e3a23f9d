"""The engine in which ``HitEqualsRecompute`` tries what a suite brings: its store, its transfer
engine, its model.

Owns that engine, the usual model and the sizes of both. Needs the extra ``serve``; whoever only
imports the suite must not load this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final
from uuid import uuid4

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from stratakv.assembly import models
from stratakv.assembly.build import Sockets
from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.rank_context import ObjectSharding
from stratakv.assembly.sizing import Sizes
from stratakv.assembly.stores import open_store
from stratakv.cache.kv_cache import KVCache
from stratakv.core.clock import MonotonicClock
from stratakv.core.config import EngineConfig
from stratakv.core.ids import PageIds, TokenIds
from stratakv.engine.executor import TokenSource
from stratakv.engine.loop import Engine
from stratakv.engine.model import HuggingFaceModel, load_model, wrap
from stratakv.engine.torch_pools import LayerTensors
from stratakv.engine.verify import Settings, StartSubject, Verifier, cut_sizes
from stratakv.engine.verify_report import VerifyReport
from stratakv.memory.mapped import POISON
from stratakv.spec.derive import spec_of
from stratakv.spec.groups import CacheGroup, CacheSpec
from stratakv.spec.sharding import default_cut, sharding_of
from stratakv.storage.backend import StoreFormat
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.testing.hit_equals_recompute import HitEqualsRecompute
from stratakv.tree.nodes import Tier

PAGE_TOKENS: Final = 16
CHUNK_TOKENS: Final = 40
MAX_RUNNING: Final = 8


@dataclass(frozen=True, slots=True)
class Tried:
    """An engine's parts as ``engine.verify`` takes them."""

    parts: models.EngineParts

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


@cache
def tiny_model() -> HuggingFaceModel:
    """Windows and full attention, random, scaled so that one wrong page changes the answer: under
    the usual initialisation attention is so even that it may not."""
    shape = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=40,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=16,
        max_position_embeddings=2048,
        eos_token_id=None,
    )
    random = torch.Generator().manual_seed(7)
    module = Gemma3ForCausalLM(shape).float()
    with torch.no_grad():
        for name, weight in sorted(module.named_parameters()):
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[1] ** -0.5, generator=random)
            elif "q_norm" in name:  # it multiplies by one more
                weight.fill_(1.5)
    return wrap(module)


def model_of(directory: Path | None) -> HuggingFaceModel:
    """Of a directory, in float32 whatever it was saved in; None: the usual one."""
    return tiny_model() if directory is None else load_model(directory, "float32")


def start(suite: HitEqualsRecompute, model: HuggingFaceModel) -> StartSubject:
    spec = spec_of(model.config, page_tokens=PAGE_TOKENS, dtype=model.dtype)
    room = -(-4 * sum(suite.lengths) // PAGE_TOKENS) + MAX_RUNNING * CHUNK_TOKENS // PAGE_TOKENS
    each = (room,) * len(spec.groups)
    longest = min(2 * max(suite.lengths) + 32, model.max_positions)

    def begin(token_source: TokenSource, chunk_tokens: int | None) -> Tried:
        chunk = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
        config = EngineConfig(
            page_tokens=PAGE_TOKENS,
            max_running=MAX_RUNNING,
            max_model_len=longest,
            chunk_tokens=chunk,
            step_tokens=2 * chunk + MAX_RUNNING,
            prefetch_policy="wait-complete",
            prefetch_threshold=1,
            load_back_threshold=1,
        )
        device, sizes = suite.device(), Sizes.of(spec, each, each, longest)
        plan = EnginePlan.of(config, sizes, model.fingerprint, steps_at_once=device.steps_at_once)
        tried = Tried(models.assemble(model, plan, Sockets(token_source=token_source), device))
        if (worker := _worker(suite, model, spec, each)) is not None:
            tried.engine.attach_storage(worker)
        tried.scrub()
        return tried

    return begin


def _worker(
    suite: HitEqualsRecompute, model: HuggingFaceModel, spec: CacheSpec, pages: Sequence[int]
) -> IoWorker | None:
    if suite.storage is not None:
        whole = sharding_of(model.config, spec, 1)
        sharing = ObjectSharding(whole, 0, default_cut(1), model.fingerprint)
        return open_store(suite.storage, spec, pages, sharing).worker
    form = StoreFormat.of(spec)
    if (backend := suite.backend(form)) is None:
        return None
    return IoWorker(Backends(backend, backend), form, IoLimits(), MonotonicClock())


def verified(
    suite: HitEqualsRecompute, model: HuggingFaceModel, asked: Sequence[TokenIds]
) -> VerifyReport:
    spec = spec_of(model.config, page_tokens=PAGE_TOKENS, dtype=model.dtype)
    settings = Settings(
        bound=suite.bound,
        salt=f"hit equals recompute {uuid4()}",
        cuts=cut_sizes(spec, model.config, max(suite.lengths)),
    )
    return Verifier(suite.start(model), asked, settings).run(suite.ways)
