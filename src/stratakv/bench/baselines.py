"""The engine beside plain transformers, a per-request loop, and itself with the cache off.

Owns the comparisons. All contenders of a round get the same fresh random prompts, in one process on
one thread, and take turns every few steps, so nothing is reused from an earlier round and a busy
machine slows all. Of each turn the fastest of its rounds counts; where a cache writes in the
background, the round with the median ratio. Only ``generate_batch`` and what stands beside it run
alone. A short round before the others warms all.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from transformers import PreTrainedModel

from stratakv.assembly.device import CPU, Device
from stratakv.assembly.models import EngineParts, build_engine
from stratakv.bench.per_request import PER_REQUEST
from stratakv.bench.races import (
    TURN_STEPS,
    Prompts,
    generate_batch,
    race,
    race_decode,
    race_generate,
    undisturbed_s,
)
from stratakv.bench.rig import attach_files, config_for
from stratakv.bench.shapes import VOCABULARY, twin
from stratakv.core.config import EngineConfig
from stratakv.engine.attention.torch_pools import TorchPools
from stratakv.engine.huggingface.model import wrap
from stratakv.engine.loop import Engine
from stratakv.spec.budget import ExpectedLoad
from stratakv.spec.derive import default_page_tokens, spec_of

PROMPTS: Final = 16
PROMPT_TOKENS: Final = 256
NEW_TOKENS: Final = 128
RAGGED: Final = (2048,) + 15 * (128,)
RAGGED_STEPS: Final = 48
RAGGED_ROUNDS: Final = 2
RAGGED_NEW: Final = RAGGED_STEPS + 32
"""Those that are timed, and those of the first ones while the last ones are still in prefill."""
DEVICE_TOKENS: Final = PROMPTS * (PROMPT_TOKENS + NEW_TOKENS) * 3 // 2
"""Room for what runs and for half as much again, so that the rounds evict on both tiers."""
SINGLE_PROMPT_TOKENS: Final = 24
"""Requests of the workload without reuse: half as many again as run at once."""
ALONE_NEW: Final = 48
ALONE_ROUNDS: Final = 3
BATCHING_NEW: Final = 64
STORE_QUOTA: Final = "1GiB"
ROUNDS: Final = {
    "llama 8x256": 2,
    "gpt_oss 4x64": 4,
    "qwen3_next 4x256": 2,
    "nemotron_h 6x256": 2,
}
"""Beside ``generate``: what all of it may take is minutes."""
_WORK_S: Final = {
    "llama 8x256": (17.0, 8.0, 12.0, 30.0),
    "gpt_oss 4x64": (10.0, 6.0, 3.0, 8.0),
    "qwen3_next 4x256": (14.0,),
    "nemotron_h 6x256": (13.0,),
}
"""About how long each comparison takes, in the order of ``compare``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Output tokens per second, prefill included; ``batching_ratio``: speed over that of
    ``generate_batch``; ``ragged_ratio``: decode speed over that of the per-request loop;
    ``no_reuse_ratio``: speed with both tiers over that with the cache off, where
    nothing is reused; ``no_reuse_storage_ratio``: the same with a file store too, to which all of
    it is written. None: not measured (yet), or not at all, where ``TARGETS`` has none."""

    model: str
    ours_tok_s: float
    generate_tok_s: float
    batching_ratio: float | None = None
    ragged_ratio: float | None = None
    no_reuse_ratio: float | None = None
    no_reuse_storage_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """What each ratio must reach; a comparison without a target is not made."""

    ours_to_generate: float
    ours_to_generate_batch: float | None = None
    ragged: float | None = None
    no_reuse: float | None = None


TARGETS: Final = {
    "llama 8x256": Target(1.3, 2.5, 0.9, 0.98),
    "gpt_oss 4x64": Target(1.3, 2.5, 0.9, 0.98),
    # ``generate_batch`` refuses layers with states; the per-request loop is one of attention.
    "qwen3_next 4x256": Target(1.05),
    "nemotron_h 6x256": Target(1.05),
}


def work_s(name: str) -> float:
    """About how long ``compare`` takes, so that a bench can say how far it is."""
    return sum(_WORK_S[name])


def compare(
    name: str, model: PreTrainedModel, passed: Callable[[float], None]
) -> Generator[Baseline]:
    """All comparisons that ``TARGETS`` names for one model, which is left as it was: what there is
    after each. ``passed`` is called after each round, with its part of ``work_s``."""
    target, output = TARGETS[name], PROMPTS * NEW_TOKENS
    work = iter(_WORK_S[name])
    ours_s, plain_s = _beside_generate(model, ROUNDS[name], partial(_pass, passed, next(work)))
    so_far = Baseline(model=name, ours_tok_s=output / ours_s, generate_tok_s=output / plain_s)
    yield so_far
    if target.ours_to_generate_batch is not None:
        so_far = replace(so_far, batching_ratio=_batching(model))
        passed(next(work))
        yield so_far
    if target.ragged is not None:
        so_far = replace(so_far, ragged_ratio=_ragged(model, partial(_pass, passed, next(work))))
        yield so_far
    if target.no_reuse is not None:
        without, stored = _without_reuse(model, partial(_pass, passed, next(work)))
        yield replace(so_far, no_reuse_ratio=without, no_reuse_storage_ratio=stored)


def _pass(passed: Callable[[float], None], work: float, rounds: int) -> None:
    """One of ``rounds`` and of the one that warms, which count alike."""
    passed(work / (rounds + 1))


def _beside_generate(
    model: PreTrainedModel, rounds: int, one_round: Callable[[int], None]
) -> tuple[float, float]:
    """Seconds of ours and of ``generate``."""
    plain = twin(model)
    with _engines(_engine(twin(model), "host")) as (ours,):
        race_generate(ours, plain, _equal(PROMPTS), TURN_STEPS)
        one_round(rounds)
        pairs: list[tuple[list[float], list[float]]] = []
        for _ in range(rounds):
            pairs.append(race_generate(ours, plain, _equal(PROMPTS), NEW_TOKENS))
            one_round(rounds)
    return undisturbed_s([mine for mine, _ in pairs]), undisturbed_s([its for _, its in pairs])


def _batching(model: PreTrainedModel) -> float:
    prompts, its = _equal(PROMPTS), twin(model)
    generate_batch(its, prompts[:1], 2)
    batching_s = generate_batch(its, prompts, BATCHING_NEW)
    with _engines(_engine(twin(model), "host")) as engines:
        race(engines, _equal(PROMPTS), 2)
        (ours_s,) = race(engines, prompts, BATCHING_NEW)
    return batching_s / ours_s


def _ragged(model: PreTrainedModel, one_round: Callable[[int], None]) -> float:
    loop = _engine(twin(model), "host", PER_REQUEST)
    with _engines(_engine(twin(model), "host"), loop) as both:
        race(both, _equal(PROMPTS), 2)
        one_round(RAGGED_ROUNDS)
        rounds: list[list[list[float]]] = []
        for _ in range(RAGGED_ROUNDS):
            rounds.append(race_decode(both, _prompts(RAGGED), RAGGED_STEPS, RAGGED_NEW))
            one_round(RAGGED_ROUNDS)
    ours_s, loop_s = (undisturbed_s([turns[at] for turns in rounds]) for at in range(2))
    return loop_s / ours_s


def _without_reuse(model: PreTrainedModel, one_round: Callable[[int], None]) -> tuple[float, float]:
    """Speed with both tiers over that of a cache that is off; and with a store too."""
    with TemporaryDirectory(prefix="stratakv-bench-") as directory:
        stored = _engine(twin(model), "host")
        url = f"file://{directory}?quota={STORE_QUOTA}"
        attach_files(stored.engine, stored.spec, [arena.pages for arena in stored.arenas], url)
        three = (_engine(twin(model), "host"), stored, _engine(twin(model), "off"))
        with _engines(*three) as engines:
            race(engines, _equal(PROMPTS), 2)
            one_round(ALONE_ROUNDS)
            rounds: list[list[float]] = []
            for at in range(ALONE_ROUNDS):
                order = (0, 1, 2) if at % 2 else (2, 1, 0)
                prompts = _equal(SINGLE_PROMPT_TOKENS)
                taken_s = race([engines[one] for one in order], prompts, ALONE_NEW)
                rounds.append([taken_s[order.index(one)] for one in range(3)])
                one_round(ALONE_ROUNDS)
    return (
        median(off_s / ours_s for ours_s, _, off_s in rounds),
        median(off_s / stored_s for _, stored_s, off_s in rounds),
    )


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
