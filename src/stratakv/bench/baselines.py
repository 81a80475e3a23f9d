"""The engine beside plain transformers, a per-request loop, and itself with the cache off.

Owns the comparisons. Both contenders of a round get the same fresh random prompts, in one process
on one thread, and take turns every few steps, so nothing is reused from an earlier round and a busy
machine slows both. The round with the median ratio counts. Only ``generate_batch`` runs alone.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from transformers import PreTrainedModel

from stratakv.assembly.device import CPU, Device
from stratakv.assembly.models import EngineParts, build_engine
from stratakv.bench.per_request import PER_REQUEST
from stratakv.bench.races import Prompts, generate_batch, race, race_decode, race_generate
from stratakv.bench.rig import attach_files, config_for
from stratakv.bench.shapes import VOCABULARY, twin
from stratakv.core.config import EngineConfig
from stratakv.engine.loop import Engine
from stratakv.engine.model import wrap
from stratakv.engine.torch_pools import TorchPools
from stratakv.spec.budget import ExpectedLoad
from stratakv.spec.derive import default_page_tokens, spec_of

PROMPTS: Final = 16
PROMPT_TOKENS: Final = 256
NEW_TOKENS: Final = 128
RAGGED: Final = (2048,) + 15 * (128,)
RAGGED_STEPS: Final = 48
RAGGED_NEW: Final = RAGGED_STEPS + 32
"""Those that are timed, and those of the first ones while the last ones are still in prefill."""
DEVICE_TOKENS: Final = PROMPTS * (PROMPT_TOKENS + NEW_TOKENS) * 3 // 2
"""Room for what runs and for half as much again, so that the rounds evict on both tiers."""
SINGLE_PROMPT_TOKENS: Final = 24
"""Requests of the workload without reuse: half as many again as run at once."""
ALONE_NEW: Final = 64
STORE_QUOTA: Final = "1GiB"
ROUNDS: Final = {
    "llama 8x256": 3,
    "gpt_oss 4x64": 7,
    "qwen3_next 4x256": 3,
    "nemotron_h 6x256": 5,
}
"""What takes about as long for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Output tokens per second, prefill included; ``ragged_ratio``: decode speed over that of the
    per-request loop; ``no_reuse_ratio``: speed with both tiers over that with the cache off, where
    nothing is reused; ``no_reuse_storage_ratio``: the same with a file store too, to which all of
    it is written. None where ``TARGETS`` has none."""

    model: str
    ours_tok_s: float
    generate_tok_s: float
    generate_batch_tok_s: float | None
    ragged_ratio: float | None
    no_reuse_ratio: float | None
    no_reuse_storage_ratio: float | None


@dataclass(frozen=True, slots=True)
class Target:
    """What each ratio must reach; a comparison without a target is not made."""

    ours_to_generate: float
    ours_to_generate_batch: float | None = None
    ragged: float | None = None
    no_reuse: float | None = None


TARGETS: Final = {
    "llama 8x256": Target(0.95, 2.5, 0.9, 0.95),
    "gpt_oss 4x64": Target(1.1, 2.5, 0.9, 0.95),
    # ``generate_batch`` refuses layers with states; the per-request loop is one of attention.
    "qwen3_next 4x256": Target(0.9),
    "nemotron_h 6x256": Target(0.9),
}


def compare(name: str, model: PreTrainedModel) -> Baseline:
    """All comparisons that ``TARGETS`` names for one model, which is left as it was."""
    target, rounds = TARGETS[name], ROUNDS[name]
    output = PROMPTS * NEW_TOKENS
    plain = twin(model)
    with _engines(_engine(twin(model), "host")) as (ours,):
        pairs = [race_generate(ours, plain, _equal(PROMPTS), NEW_TOKENS) for _ in range(rounds + 1)]
    # Here and below, the first round warms both.
    timed = sorted(pairs[1:], key=lambda pair: pair[1] / pair[0])
    ours_s, plain_s = timed[len(timed) // 2]
    batching_s = None if target.ours_to_generate_batch is None else _batching_s(twin(model))
    return Baseline(
        model=name,
        ours_tok_s=output / ours_s,
        generate_tok_s=output / plain_s,
        generate_batch_tok_s=None if batching_s is None else output / batching_s,
        ragged_ratio=None if target.ragged is None else _ragged(model, rounds),
        no_reuse_ratio=None if target.no_reuse is None else _without_reuse(model, rounds),
        no_reuse_storage_ratio=None if target.no_reuse is None else _stored(model, rounds),
    )


def _batching_s(model: PreTrainedModel) -> float:
    prompts = _equal(PROMPTS)
    generate_batch(model, prompts[:1], 2)
    return generate_batch(model, prompts, NEW_TOKENS)


def _ragged(model: PreTrainedModel, rounds: int) -> float:
    loop = _engine(twin(model), "host", PER_REQUEST)
    steps = RAGGED_STEPS
    with _engines(_engine(twin(model), "host"), loop) as both:
        pairs = [race_decode(both, _prompts(RAGGED), steps, RAGGED_NEW) for _ in range(rounds + 1)]
    return median(loop_s / ours_s for ours_s, loop_s in pairs[1:])


def _stored(model: PreTrainedModel, rounds: int) -> float:
    with TemporaryDirectory(prefix="stratakv-bench-") as directory:
        return _without_reuse(model, rounds, f"file://{directory}?quota={STORE_QUOTA}")


def _without_reuse(model: PreTrainedModel, rounds: int, store: str | None = None) -> float:
    """Speed with both tiers, and perhaps a store, over that of a cache that is off."""
    parts = _engine(twin(model), "host")
    if store is not None:
        attach_files(parts.engine, parts.spec, [arena.pages for arena in parts.arenas], store)
    with _engines(parts, _engine(twin(model), "off")) as both:
        pairs = [race(both, _equal(SINGLE_PROMPT_TOKENS), ALONE_NEW) for _ in range(rounds + 1)]
    return median(off_s / ours_s for ours_s, off_s in pairs[1:])


@contextmanager
def _engines(*parts: EngineParts) -> Generator[list[Engine]]:
    try:
        yield [one.engine for one in parts]
    finally:
        for one in parts:
            one.close()


def _engine(module: PreTrainedModel, cache: str, device: Device[TorchPools] = CPU) -> EngineParts:
    model = wrap(module)
    page = default_page_tokens(model.config)
    spec = spec_of(model.config, page_tokens=page, dtype=model.dtype)
    load = ExpectedLoad(
        max_running=PROMPTS,
        max_model_len=RAGGED[0] + RAGGED_NEW,
        chunk_tokens=EngineConfig().chunk_tokens,
        chat_tokens=PROMPT_TOKENS + NEW_TOKENS,
    )
    return build_engine(model, config_for(spec, DEVICE_TOKENS, load, cache=cache), device)


def _prompts(lengths: Sequence[int]) -> Prompts:
    rng = np.random.default_rng()
    return [rng.integers(0, VOCABULARY, length, dtype=np.int32) for length in lengths]


def _equal(count: int) -> Prompts:
    return _prompts((PROMPT_TOKENS,) * count)
