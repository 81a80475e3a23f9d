"""The suite for what an engine is made of, a store, a transfer engine or a model: whatever way a
prefix came, tokens and logits are those of a run without a cache, and exactly what could be
reused was. Owns the engine that it is tried in; the ways are ``engine.verify``'s.

    class TestMyStore(HitEqualsRecompute):
        def backend(self, form):
            return MyBackend(form)

    class TestAStoreThatIsThere(HitEqualsRecompute):
        storage = "redis://localhost"

    class TestMyTransferEngine(HitEqualsRecompute):
        def transfer(self, spec, pools, arenas):
            return MyEngine(spec, pools, arenas)

    class TestMyModel(HitEqualsRecompute):
        directory = Path("path/to/model")

Needs the extras ``serve`` and ``testing`` (pytest). Pages that nobody owns are NaN throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from stratakv.cache.kv_cache import KVCache
from stratakv.core.clock import MonotonicClock
from stratakv.core.config import EngineConfig
from stratakv.core.ids import TokenIds
from stratakv.engine.loop import Engine
from stratakv.engine.model import HuggingFaceModel, load_model, wrap
from stratakv.engine.token_source import TokenSource
from stratakv.engine.verify import Settings, Start, Verifier
from stratakv.engine.verify_cuts import cut_sizes
from stratakv.engine.verify_report import Differs, NotRun, Report, Way
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.serve.wiring import EngineParts, Outside, assemble
from stratakv.serve.wiring_ranks import Sharing
from stratakv.serve.wiring_storage import open_store
from stratakv.spec.derive import spec_of
from stratakv.spec.groups import CacheSpec
from stratakv.spec.sharding import default_cut, sharding_of
from stratakv.storage.backend import StorageBackend, StoreFormat
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.transfer.cpu import CpuTransferEngine
from stratakv.transfer.engine import TransferEngine
from stratakv.tree.nodes import Tier

PAGE_TOKENS = 16
CHUNK_TOKENS = 40
MAX_RUNNING = 8


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
        for group in self.parts.spec.groups:
            self.parts.pools.poison(group.id, self.cache.unowned(Tier.DEVICE, group.id))
            self.parts.arenas[group.id].poison(self.cache.unowned(Tier.HOST, group.id))

    def close(self) -> None:
        self.parts.close()


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


def prompts(vocab: int, lengths: Sequence[int]) -> list[TokenIds]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocab, tokens).astype(np.int32) for tokens in lengths]


class HitEqualsRecompute:
    """Subclass as ``Test...`` and say what is yours; what is not said is ours."""

    directory: ClassVar[Path | None] = None
    """A model's; None: ``tiny_model``. In float32, whatever it was saved in."""
    bound: ClassVar[float] = 1e-5
    """Of two logits that are equal, in parts of the largest one; of your model's family."""
    lengths: ClassVar[tuple[int, ...]] = (150, 81, 40)
    """Tokens of each prompt: several windows, several pages, and a part of one."""
    ways: ClassVar[tuple[Way, ...]] = tuple(Way)
    """What has to run: all, where there is a store."""
    storage: ClassVar[str | None] = None
    """URL of a store, as ``--storage`` takes it; pages under a name of their own stay in it. It
    has to outlast the engine that it is attached to: ``memory://`` does not."""

    def model(self) -> HuggingFaceModel:
        return tiny_model() if self.directory is None else load_model(self.directory, "float32")

    def backend(self, form: StoreFormat) -> StorageBackend | None:
        """The store, where ``storage`` names none; opened again over the same place after a
        restart. None: none."""
        del form
        return None

    def transfer(
        self, spec: CacheSpec, pools: DevicePools, arenas: Sequence[HostArena]
    ) -> TransferEngine:
        return CpuTransferEngine(spec, pools, arenas)

    def start(self, model: HuggingFaceModel) -> Start:
        """What starts an engine over ``model``."""
        spec = spec_of(model.config, page_tokens=PAGE_TOKENS, dtype=model.dtype)
        room = -(-4 * sum(self.lengths) // PAGE_TOKENS) + MAX_RUNNING * CHUNK_TOKENS // PAGE_TOKENS
        each = (room,) * len(spec.groups)
        longest = min(2 * max(self.lengths) + 32, model.max_positions)

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
            outside = Outside(transfer=self.transfer, token_source=token_source)
            tried = Tried(assemble(model, spec, config, (each, each), longest, outside))
            if (worker := self._worker(model, spec, each)) is not None:
                tried.engine.attach_storage(worker)
            tried.scrub()
            return tried

        return begin

    def _worker(
        self, model: HuggingFaceModel, spec: CacheSpec, pages: Sequence[int]
    ) -> IoWorker | None:
        if self.storage is not None:
            whole = sharding_of(model.config, spec, 1)
            sharing = Sharing(whole, 0, default_cut(1), model.fingerprint)
            return open_store(self.storage, spec, pages, sharing).worker
        form = StoreFormat(
            spec_digest=spec.digest, page_bytes=tuple(group.page_bytes for group in spec.groups)
        )
        if (backend := self.backend(form)) is None:
            return None
        return IoWorker(Backends(backend, backend), form, IoLimits(), MonotonicClock())

    def verified(self) -> Report:
        model = self.model()
        spec = spec_of(model.config, page_tokens=PAGE_TOKENS, dtype=model.dtype)
        settings = Settings(
            bound=self.bound,
            salt=f"hit equals recompute {uuid4()}",
            cuts=cut_sizes(spec, model.config, max(self.lengths)),
        )
        asked = prompts(model.vocab_size, self.lengths)
        return Verifier(self.start(model), asked, settings).run(self.ways)

    @pytest.fixture(scope="class")
    @classmethod
    def report(cls) -> Report:
        return cls().verified()

    @pytest.mark.parametrize("way", Way)
    def test_a_hit_says_what_a_recomputation_says(self, report: Report, way: Way) -> None:
        if way not in self.ways:
            pytest.skip("not asked for")
        verdict = report[way].verdict
        if isinstance(verdict, NotRun):
            pytest.skip(verdict.why)
        assert not isinstance(verdict, Differs), f"{way.value}: {verdict}"
