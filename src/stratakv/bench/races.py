"""Races: contenders serve the same prompts, a few steps at a time in turn.

Owns the turns and their clocks: whatever else the machine does meanwhile meets all alike. Must not
build engines or know what is compared with what.
"""

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
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from stratakv.bench.rig import greedy
from stratakv.core.ids import RequestId, TokenIds
from stratakv.engine.loop import Engine

TURN_STEPS: Final = 8
BATCH_TOKENS: Final = 1024
"""Of a step of ``generate_batch``."""

Prompts: TypeAlias = Sequence[TokenIds]
Turns: TypeAlias = list[float]
"""Seconds of one contender, turn by turn; the same turn of another round has the same work."""


def undisturbed_s(rounds: Sequence[Turns]) -> float:
    """Seconds of a round of which every turn is the fastest of its rounds: whatever else the
    machine did has to meet the same turn of all of them to count."""
    return sum(map(min, zip(*rounds, strict=True)))


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
) -> list[Turns]:
    """Turns of each engine for ``steps`` steps in which every prompt is past its prefill, in turn
    as in ``race``. ``new_tokens`` are enough for the first ones to be still there."""
    for engine in engines:
        _submit(engine, prompts, new_tokens)
        started: set[RequestId] = set()
        while len(started) < len(prompts):
            started.update(output.request for output in engine.step())
    turns: list[Turns] = [[] for _ in engines]
    output_tokens = [0] * len(engines)
    for _ in range(steps // TURN_STEPS):
        for at, engine in enumerate(engines):
            begin_s = time.perf_counter()
            output_tokens[at] += sum(len(engine.step()) for _ in range(TURN_STEPS))
            turns[at].append(time.perf_counter() - begin_s)
    assert output_tokens == [steps * len(prompts)] * len(engines), f"{output_tokens} tokens"
    for engine in engines:
        for at in range(len(prompts)):
            engine.abort(RequestId(str(at)))
        while engine.has_work():
            engine.step()
    return turns


class _Turns(StoppingCriteria):
    """Asked after every token of ``generate`` whether to stop: never, but every ``TURN_STEPS``
    tokens it is an engine's turn. ``plain``: the turns of ``generate``."""

    def __init__(self, engine: Engine, prompts: Prompts, new_tokens: int) -> None:
        begin_s = time.perf_counter()
        self._engine = engine
        _submit(engine, prompts, new_tokens)
        self._asked = self.output_tokens = 0
        self._submit_s = time.perf_counter() - begin_s
        self.ours: Turns = []
        self.plain: Turns = []
        self._since_s = time.perf_counter()

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: torch.Tensor, scores: object, **kwargs: object
    ) -> torch.Tensor:
        del scores, kwargs
        self._asked += 1
        if self._asked % TURN_STEPS == 0:
            self.play()
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def play(self) -> None:
        """What passed since the last turn was that of ``generate``; then it is ours."""
        begin_s = time.perf_counter()
        self.plain.append(begin_s - self._since_s)
        for _ in range(TURN_STEPS):
            self.output_tokens += len(self._engine.step()) if self._engine.has_work() else 0
        self._since_s = time.perf_counter()
        self.ours.append(self._since_s - begin_s)

    def end(self) -> None:
        """All that is left, the last copies too: a backup that went on for longer would slow
        whoever comes next. Both sides' rests are turns, and so is what a submission takes."""
        begin_s = time.perf_counter()
        self.plain.append(begin_s - self._since_s)
        while self._engine.has_work():
            self.output_tokens += len(self._engine.step())
        self.ours.append(time.perf_counter() - begin_s + self._submit_s)


def race_generate(
    engine: Engine, model: PreTrainedModel, prompts: Prompts, new_tokens: int
) -> tuple[Turns, Turns]:
    """Turns of the engine and of plain ``generate``, one greedy batch of prompts of one length, in
    turn as in ``race``."""
    ids = torch.from_numpy(np.stack(prompts)).long()
    generate = cast("Callable[..., torch.Tensor]", model.generate)
    turns = _Turns(engine, prompts, new_tokens)
    out = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        stopping_criteria=StoppingCriteriaList([turns]),
    )
    turns.end()
    assert out.shape == (len(prompts), ids.shape[1] + new_tokens), f"{out.shape}"
    assert turns.output_tokens == len(prompts) * new_tokens, f"{turns.output_tokens} tokens"
    return turns.ours, turns.plain


def generate_batch(model: PreTrainedModel, prompts: Prompts, new_tokens: int) -> float:
    """Seconds of transformers' own continuous batching, greedy, without the warm-up that captures
    CUDA graphs. -1 is no token, so that no answer stops early. Its cache is as large as these
    prompts need twice over: left to itself it takes most of the memory that is free, and that takes
    20 s."""
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)
    page = ContinuousBatchingConfig().page_size
    blocks = sum(-(-(len(tokens) + new_tokens) // page) for tokens in prompts)
    sizes = ContinuousBatchingConfig(num_blocks=2 * blocks, max_batch_tokens=BATCH_TOKENS)
    inputs = [tokens.tolist() for tokens in prompts]
    generate = cast("Callable[..., dict[str, GenerationOutput]]", model.generate_batch)
    begin_s = time.perf_counter()
    out = generate(inputs, generation_config=config, continuous_batching_config=sizes, warmup=False)
    taken_s = time.perf_counter() - begin_s
    output_tokens = sum(len(answer.generated_tokens) for answer in out.values())
    assert output_tokens == len(prompts) * new_tokens, f"{output_tokens} tokens"
    return taken_s
