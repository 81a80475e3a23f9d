"""The engine beside plain transformers, a per-request loop, and itself with the cache off.

Owns the comparisons. All contenders of a round get the same fresh random prompts, in one process on
one thread, so nothing is reused from an earlier round and a busy machine slows all. Runs of
transformers take turns with ours, and the medians are compared; two engines take turns every few
steps.
"""

import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Final, cast

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput

from stratakv.bench.per_request import use_per_request_attention
from stratakv.bench.shapes import VOCABULARY, twin
from stratakv.core.config import EngineConfig
from stratakv.core.ids import RequestId, TokenIds
from stratakv.engine.loop import Engine
from stratakv.engine.model import HuggingFaceModel, wrap
from stratakv.engine.request import Prompt, SamplingParams
from stratakv.serve.wiring import EngineParts, build_engine
from stratakv.spec.budget import ExpectedLoad, device_bytes, pages_beside
from stratakv.spec.derive import spec_of

PROMPTS: Final = 16
PROMPT_TOKENS: Final = 256
NEW_TOKENS: Final = 128
RAGGED: Final = (2048,) + 15 * (128,)
RAGGED_STEPS: Final = 48
RAGGED_NEW: Final = RAGGED_STEPS + 32
"""Those that are timed, and those of the first ones while the last ones are still in prefill."""
DEVICE_TOKENS: Final = PROMPTS * (PROMPT_TOKENS + NEW_TOKENS) * 3 // 2
"""Room for what runs and for half as much again, so that the rounds evict on both tiers."""
ALONE: Final = 24
"""Requests of the workload without reuse: half as many again as run at once."""
ALONE_NEW: Final = 64
ROUNDS: Final = {"llama 8x256": 3, "gpt_oss 4x64": 7}
"""What takes about as long for either."""
TURN_STEPS: Final = 8

Prompts = Sequence[TokenIds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Output tokens per second, prefill included; ``ragged_ratio``: decode speed over that of the
    per-request loop; ``no_reuse_ratio``: speed with both tiers over that with the cache off."""

    model: str
    ours_tok_s: float
    generate_batch_tok_s: float
    generate_tok_s: float
    ragged_ratio: float
    no_reuse_ratio: float


@dataclass(frozen=True, slots=True)
class Target:
    ours_to_generate: float
    ours_to_generate_batch: float = 2.5
    ragged: float = 0.9
    no_reuse: float = 0.95


TARGETS: Final = {"llama 8x256": Target(0.95), "gpt_oss 4x64": Target(1.1)}


def compare(name: str, model: PreTrainedModel) -> Baseline:
    """All comparisons on one model, which is left as it was."""
    rng = np.random.default_rng()
    plain, batching = twin(model), twin(model)
    ours, off = _engine(twin(model), "host"), _engine(twin(model), "off")
    loop = _engine(twin(model), "host", use_per_request_attention)
    taken: dict[str, list[float]] = {key: [] for key in ("ours", "plain", "ragged", "reuse")}
    try:
        for at in range(ROUNDS[name] + 1):
            prompts = _prompts(rng, (PROMPT_TOKENS,) * PROMPTS)
            # Whoever goes second finds the caches of the machine as the first one left them.
            turns = (
                ("ours", partial(_serve, ours.engine)),
                ("plain", partial(_generate, plain)),
            )
            for key, run in turns if at % 2 else reversed(turns):
                taken[key].append(run(prompts))
            decode = _race_decode((ours.engine, loop.engine), _prompts(rng, RAGGED))
            taken["ragged"].append(decode[1] / decode[0])
            alone = _prompts(rng, (PROMPT_TOKENS,) * ALONE)
            whole = _race((ours.engine, off.engine), alone)
            taken["reuse"].append(whole[1] / whole[0])
        prompts = _prompts(rng, (PROMPT_TOKENS,) * PROMPTS)
        _generate_batch(batching, prompts[:1], 2)
        batching_s = _generate_batch(batching, prompts, NEW_TOKENS)
    finally:
        for parts in (ours, off, loop):
            parts.close()
    # The first round warms all of them.
    middle = {key: median(values[1:]) for key, values in taken.items()}
    output = PROMPTS * NEW_TOKENS
    return Baseline(
        model=name,
        ours_tok_s=output / middle["ours"],
        generate_batch_tok_s=output / batching_s,
        generate_tok_s=output / middle["plain"],
        ragged_ratio=middle["ragged"],
        no_reuse_ratio=middle["reuse"],
    )


def _engine(
    module: PreTrainedModel, cache: str, change: Callable[[HuggingFaceModel], None] | None = None
) -> EngineParts:
    model = wrap(module)
    if change is not None:
        change(model)
    usual = EngineConfig(
        cache=cache,
        max_running=PROMPTS,
        max_model_len=RAGGED[0] + RAGGED_NEW,
        chat_tokens=PROMPT_TOKENS + NEW_TOKENS,
    )
    spec = spec_of(model.config, page_tokens=usual.page_tokens, dtype=model.dtype)
    load = ExpectedLoad(
        max_running=PROMPTS,
        max_model_len=RAGGED[0] + RAGGED_NEW,
        chunk_tokens=usual.chunk_tokens,
        chat_tokens=usual.chat_tokens,
    )
    size = device_bytes(spec, pages_beside(spec, DEVICE_TOKENS // usual.page_tokens, load))
    return build_engine(model, replace(usual, device_memory=f"{size}B"))


def _prompts(rng: np.random.Generator, lengths: Sequence[int]) -> Prompts:
    return [rng.integers(0, VOCABULARY, length, dtype=np.int32) for length in lengths]


def _submit(engine: Engine, prompts: Prompts, new_tokens: int) -> None:
    for at, tokens in enumerate(prompts):
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0)
        engine.submit(Prompt(id=RequestId(str(at)), tokens=tokens, sampling=sampling))


def _serve(engine: Engine, prompts: Prompts) -> float:
    """Seconds from the first prompt to the end of the last copy: a backup that went on for longer
    would slow whoever comes next."""
    begin_s = time.perf_counter()
    _submit(engine, prompts, NEW_TOKENS)
    told = 0
    while engine.has_work():
        told += len(engine.step())
    taken_s = time.perf_counter() - begin_s
    assert told == len(prompts) * NEW_TOKENS, f"{told} tokens"
    return taken_s


def _race(engines: Sequence[Engine], prompts: Prompts) -> list[float]:
    """Seconds of each engine to serve all prompts, ``TURN_STEPS`` steps at a time in turn, so that
    whatever else the machine does in the meantime meets them alike."""
    taken_s = [0.0] * len(engines)
    told = [0] * len(engines)
    for engine in engines:
        _submit(engine, prompts, ALONE_NEW)
    while any(engine.has_work() for engine in engines):
        for at, engine in enumerate(engines):
            begin_s = time.perf_counter()
            for _ in range(TURN_STEPS):
                told[at] += len(engine.step()) if engine.has_work() else 0
            taken_s[at] += time.perf_counter() - begin_s
    assert told == [len(prompts) * ALONE_NEW] * len(engines), f"{told} tokens"
    return taken_s


def _race_decode(engines: Sequence[Engine], prompts: Prompts) -> list[float]:
    """Seconds of each engine for ``RAGGED_STEPS`` steps in which every prompt is past its prefill,
    in turn as in ``_race``."""
    for engine in engines:
        _submit(engine, prompts, RAGGED_NEW)
        started: set[RequestId] = set()
        while len(started) < len(prompts):
            started.update(output.request for output in engine.step())
    taken_s = [0.0] * len(engines)
    told = [0] * len(engines)
    for _ in range(RAGGED_STEPS // TURN_STEPS):
        for at, engine in enumerate(engines):
            begin_s = time.perf_counter()
            told[at] += sum(len(engine.step()) for _ in range(TURN_STEPS))
            taken_s[at] += time.perf_counter() - begin_s
    assert told == [RAGGED_STEPS * len(prompts)] * len(engines), f"{told} tokens"
    for engine in engines:
        for at in range(len(prompts)):
            engine.abort(RequestId(str(at)))
        while engine.has_work():
            engine.step()
    return taken_s


def _generate(model: PreTrainedModel, prompts: Prompts) -> float:
    """Plain ``generate``: one batch of prompts of one length, greedy."""
    ids = torch.from_numpy(np.stack(prompts)).long()
    generate = cast("Callable[..., torch.Tensor]", model.generate)
    begin_s = time.perf_counter()
    out = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
    )
    taken_s = time.perf_counter() - begin_s
    assert out.shape == (len(prompts), ids.shape[1] + NEW_TOKENS), f"{out.shape}"
    return taken_s


def _generate_batch(model: PreTrainedModel, prompts: Prompts, new_tokens: int) -> float:
    """Transformers' own continuous batching, as its documentation calls it, greedy, without the
    warm-up that captures CUDA graphs. -1 is no token, so that no answer stops early."""
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)
    inputs = [tokens.tolist() for tokens in prompts]
    generate = cast("Callable[..., dict[str, GenerationOutput]]", model.generate_batch)
    with _quiet("ContinuousBatchingLogger"):
        begin_s = time.perf_counter()
        out = generate(inputs, generation_config=config, warmup=False)
        taken_s = time.perf_counter() - begin_s
    told = sum(len(answer.generated_tokens) for answer in out.values())
    assert told == len(prompts) * new_tokens, f"{told} tokens"
    return taken_s


@contextmanager
def _quiet(name: str) -> Generator[None]:
    """Advice about GPUs that are not there would stand between the lines of the table."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
