"""The engine in which ``HitEqualsRecompute`` tries what a suite brings: its store, its transfer
engine, its model.

Owns that engine, the usual model and the sizes of both. Needs the extra ``serve``; whoever only
imports the suite must not load this.
"""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Final
from uuid import uuid4

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from stratakv.assembly.verify_engine import TrialShape, store_worker, trials
from stratakv.core.clock import MonotonicClock
from stratakv.core.ids import TokenIds
from stratakv.engine.huggingface.model import HuggingFaceModel, load_model, wrap
from stratakv.engine.verify.claims import Settings, StartSubject, Verifier, cut_sizes
from stratakv.engine.verify.report import VerifyReport
from stratakv.spec.derive import spec_of
from stratakv.spec.groups import CacheSpec
from stratakv.storage.backend import StoreFormat
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.testing.hit_equals_recompute import HitEqualsRecompute

PAGE_TOKENS: Final = 16
CHUNK_TOKENS: Final = 40
MAX_RUNNING: Final = 8


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
    shape = TrialShape(
        page_tokens=PAGE_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        max_running=MAX_RUNNING,
        lengths=suite.lengths,
    )
    return trials(model, spec, shape, suite.device, partial(_worker, suite, model, spec))


def _worker(
    suite: HitEqualsRecompute, model: HuggingFaceModel, spec: CacheSpec, pages: Sequence[int]
) -> IoWorker | None:
    if suite.storage is not None:
        return store_worker(suite.storage, model, spec, pages)
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
