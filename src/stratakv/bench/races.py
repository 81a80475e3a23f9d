"""Races: two contenders serve the same prompts, a few steps at a time in turn.

Owns the turns and their clocks: whatever else the machine does meanwhile meets both alike. Must not
build engines or know what is compared with what.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, cast

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.continuous_batching.requests import GenerationOutput

from stratakv.bench.rig import greedy
from stratakv.core.ids import RequestId, TokenIds
from stratakv.engine.loop import Engine

TURN_STEPS: Final = 8

Prompts: TypeAlias = Sequence[TokenIds]


def _submit(engine: Engine, prompts: Prompts, new_tokens: int) -> None:
    for at, tokens in enumerate(prompts):
        engine.submit(greedy(str(at), tokens, new_tokens))


def race(engines: Sequence[Engine], prompts: Prompts, new_tokens: int) -> list[float]:
    """Seconds of each engine to serve all prompts, ``TURN_STEPS`` steps at a time in turn, so that
    whatever else the machine does in the meantime meets them alike."""
    taken_s = [0.0] * len(engines)
    output_tokens = [0] * len(engines)
    for engine in engines:
        _submit(engine, prompts, new_tokens)
    while any(engine.has_work() for engine in engines):
        for at, engine in enumerate(engines):
            begin_s = time.perf_counter()
            for _ in range(TURN_STEPS):
                output_tokens[at] += len(engine.step()) if engine.has_work() else 0
            taken_s[at] += time.perf_counter() - begin_s
    assert output_tokens == [len(prompts) * new_tokens] * len(engines), f"{output_tokens} tokens"
    return taken_s


def race_decode(
    engines: Sequence[Engine], prompts: Prompts, steps: int, new_tokens: int
) -> list[float]:
    """Seconds of each engine for ``steps`` steps in which every prompt is past its prefill, in turn
    as in ``race``. ``new_tokens`` are enough for the first ones to be still there."""
    for engine in engines:
        _submit(engine, prompts, new_tokens)
        started: set[RequestId] = set()
        while len(started) < len(prompts):
            started.update(output.request for output in engine.step())
    taken_s = [0.0] * len(engines)
    output_tokens = [0] * len(engines)
    for _ in range(steps // TURN_STEPS):
        for at, engine in enumerate(engines):
            begin_s = time.perf_counter()
            output_tokens[at] += sum(len(engine.step()) for _ in range(TURN_STEPS))
            taken_s[at] += time.perf_counter() - begin_s
    assert output_tokens == [steps * len(prompts)] * len(engines), f"{output_tokens} tokens"
    for engine in engines:
        for at in range(len(prompts)):
            engine.abort(RequestId(str(at)))
        while engine.has_work():
            engine.step()
    return taken_s


class _Turns(StoppingCriteria):
    """Asked after every token of ``generate`` whether to stop: never, but every ``TURN_STEPS``
    tokens it is an engine's turn."""

    def __init__(self, engine: Engine, prompts: Prompts, new_tokens: int) -> None:
        begin_s = time.perf_counter()
        self._engine = engine
        _submit(engine, prompts, new_tokens)
        self._asked = self.output_tokens = 0
        self.taken_s = time.perf_counter() - begin_s

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: torch.Tensor, scores: object, **kwargs: object
    ) -> torch.Tensor:
        del scores, kwargs
        self._asked += 1
        if self._asked % TURN_STEPS == 0:
            self.play(TURN_STEPS)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def play(self, steps: int) -> None:
        """At most ``steps`` steps. The last copy is waited for: a backup that went on for longer
        would slow whoever comes next."""
        begin_s = time.perf_counter()
        while steps and self._engine.has_work():
            self.output_tokens += len(self._engine.step())
            steps -= 1
        self.taken_s += time.perf_counter() - begin_s


def race_generate(
    engine: Engine, model: PreTrainedModel, prompts: Prompts, new_tokens: int
) -> tuple[float, float]:
    """Seconds of the engine and of plain ``generate``, one greedy batch of prompts of one length,
    in turn as in ``race``."""
    turns = _Turns(engine, prompts, new_tokens)
    before_s = turns.taken_s
    ids = torch.from_numpy(np.stack(prompts)).long()
    generate = cast("Callable[..., torch.Tensor]", model.generate)
    begin_s = time.perf_counter()
    out = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        stopping_criteria=StoppingCriteriaList([turns]),
    )
    plain_s = time.perf_counter() - begin_s - (turns.taken_s - before_s)
    turns.play(sys.maxsize)
    assert out.shape == (len(prompts), ids.shape[1] + new_tokens), f"{out.shape}"
    assert turns.output_tokens == len(prompts) * new_tokens, f"{turns.output_tokens} tokens"
    return turns.taken_s, plain_s


def generate_batch(model: PreTrainedModel, prompts: Prompts, new_tokens: int) -> float:
    """Transformers' own continuous batching, as its documentation calls it, greedy, without the
    warm-up that captures CUDA graphs. -1 is no token, so that no answer stops early."""
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)
    inputs = [tokens.tolist() for tokens in prompts]
    generate = cast("Callable[..., dict[str, GenerationOutput]]", model.generate_batch)
    begin_s = time.perf_counter()
    out = generate(inputs, generation_config=config, warmup=False)
    taken_s = time.perf_counter() - begin_s
    output_tokens = sum(len(answer.generated_tokens) for answer in out.values())
    assert output_tokens == len(prompts) * new_tokens, f"{output_tokens} tokens"
    return taken_s
