"""What a running model selects: its indexers are watched while it answers a text.

Owns the recording, step by step and layer by layer, in positions of the context. The model is the
built-in one of V3.2's shape, whose weights are random; the text is given, or this package's own
sources. Replaying is ``sparse``'s.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn

from stratakv.assembly.models import EngineParts, build_engine
from stratakv.bench.rig import errors_alone, greedy, one_thread
from stratakv.bench.shapes import DEEPSEEK_V32_3X512, build
from stratakv.bench.sparse_selections import Selections
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.core.ids import TokenIds
from stratakv.engine.deepseek.v32_indexer import V32Indexer
from stratakv.engine.deepseek.v32_runner import DeepSeekV32Runner
from stratakv.engine.deepseek.v32_step import Selection, V32Step
from stratakv.engine.huggingface.model import wrap

PROMPT_TOKENS: Final = 3072
ANSWER_TOKENS: Final = 160


def recorded_selections(text: str | None) -> list[Selections]:
    """Of each layer that selects, int32 [steps, top-k]. ConfigError where the file ``text`` cannot
    be read, or is too short."""
    prompt = _tokens(text)
    config = EngineConfig(
        device_memory="64MiB", host_memory="0B", max_running=1,
        max_model_len=PROMPT_TOKENS + ANSWER_TOKENS,
    )  # fmt: skip
    with one_thread(), errors_alone("stratakv.assembly"):
        parts = build_engine(wrap(build(DEEPSEEK_V32_3X512)), config)
        try:
            return _answered(parts, prompt)
        finally:
            parts.close()


def _tokens(text: str | None) -> TokenIds:
    """A token for each byte."""
    if text is None:
        sources = sorted(Path(__file__).parent.glob("*.py"))
        found = b"".join(source.read_bytes() for source in sources)
    else:
        try:
            found = Path(text).read_bytes()
        except OSError as error:
            raise ConfigError(f"--text {text}: {error}; allowed is a file") from error
    if len(found) < PROMPT_TOKENS:
        raise ConfigError(f"--text {text}: {len(found)} bytes; allowed are {PROMPT_TOKENS} or more")
    return np.frombuffer(found[:PROMPT_TOKENS], np.uint8).astype(np.int32)


def _answered(parts: EngineParts, prompt: TokenIds) -> list[Selections]:
    runner = parts.runner
    assert isinstance(runner, DeepSeekV32Runner), "another model has no such indexers"
    with watched(runner.model) as layers:
        parts.engine.submit(greedy("recorded", prompt, ANSWER_TOKENS))
        while parts.engine.has_work():
            parts.engine.step()
    return [np.stack(steps) for steps in layers]


@contextmanager
def watched(model: nn.Module) -> Generator[list[list[Selections]]]:
    """Of each indexer what it selects for the first request of every step that answers, one that
    is alone in it, as positions of its context."""
    indexers = [module for module in model.modules() if isinstance(module, V32Indexer)]
    layers: list[list[Selections]] = [[] for _ in indexers]
    hooks = [
        indexer.register_forward_hook(partial(_seen, found.append))
        for indexer, found in zip(indexers, layers, strict=True)
    ]
    try:
        yield layers
    finally:
        for hook in hooks:
            hook.remove()


def _seen(
    record: Callable[[Selections], None],
    _: nn.Module,
    given: Sequence[object],
    selection: Selection,
) -> None:
    step = given[-1]
    assert isinstance(step, V32Step), "an indexer is given its step"
    if not step.buckets:  # a chunk of the prompt
        return
    (bucket,), (chosen,) = step.buckets, selection.buckets
    assert bucket.latents.hidden is None, "several requests in a step"
    record(positions(bucket.latents.rows[0], chosen.seen.rows[0]))


def positions(context: torch.Tensor, chosen: torch.Tensor) -> Selections:
    """Where each of the rows ``chosen`` [k] stands in the ``context`` [n], int32 [k]."""
    ordered, places = context.sort()
    return places[torch.searchsorted(ordered, chosen)].to(torch.int32).numpy()
