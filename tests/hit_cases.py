"""Where the "hit == recompute" tests live: one small engine per family and page size, and the
comparison with Hugging Face at batch 1 that each of them ends in.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel

from stratakv.core.config import EngineConfig
from stratakv.engine.model import HuggingFaceModel, load_model, wrap
from stratakv.engine.verify import compare
from stratakv.engine.verify_session import Reply
from stratakv.serve.wiring import EngineParts
from stratakv.spec.derive import spec_of
from stratakv.spec.families import COMPOSITES
from stratakv.spec.groups import CacheSpec
from stratakv.transfer.copier import Copier
from stratakv.transfer.cpu import DEFAULT_COPIER
from tests.engines import (
    Answer,
    RecordingRunner,
    drain,
    evict_device,
    greedy,
    on_device,
    on_host,
    small_engine,
    tokens_of,
)
from tests.fixtures.bounds import bound_of_model
from tests.fixtures.composites import composite
from tests.fixtures.models import (
    FAMILIES,
    model_to_give_away,
    random_prompt,
    reference_greedy,
    tiny_model,
)

WINDOWED: Final = ("gemma3", "gpt_oss")
CASES: Final = [
    *((family, page) for page in (16, 64) for family in FAMILIES),
    ("llama", 1),
    ("gemma3", 1),
    ("llama4", 16),
    ("deepseek_v3", 16),
    ("deepseek_v3", 64),
    ("deepseek_v32", 16),
    ("deepseek_v32", 64),
]
PROMPT: Final = {1: 75, 16: 150, 64: 270}
"""Tokens of a usual prompt by page size: several windows, several pages, and a part of one."""
CHUNK: Final = {1: 24, 16: 40, 64: 90}
OUTPUT: Final = 4


@cache
def engine_model(family: str) -> HuggingFaceModel:
    return wrap(model_to_give_away(family))


@cache
def spec_for(family: str, page: int) -> CacheSpec:
    model = engine_model(family)
    return spec_of(model.config, page_tokens=page, dtype=model.dtype)


@cache
def oracle(
    model: PreTrainedModel, prompt: tuple[int, ...], count: int
) -> tuple[list[int], torch.Tensor]:
    return reference_greedy(model, list(prompt), count)


def prompt(page: int, seed: int, tokens: int | None = None) -> list[int]:
    return random_prompt(seed, PROMPT[page] if tokens is None else tokens)


def last_end(tokens: int, page: int) -> int:
    """Tokens that the same prompt can hit: floorP(n - 1)."""
    return (tokens - 1) // page * page


class Lab:
    """An engine whose every answer is compared with a run of ``model`` that has no cache."""

    def __init__(self, model: PreTrainedModel, parts: EngineParts) -> None:
        self.model = model
        self.parts = parts
        self.spec = parts.spec
        self.page = parts.spec.page_tokens
        self.recorder = RecordingRunner(parts)
        self.answers: dict[str, Answer] = {}
        self._asked: dict[str, tuple[int, ...]] = {}
        self._outputs: dict[str, list] = {}

    def submit(self, name: str, tokens: Sequence[int], count: int = OUTPUT, salt: str = "") -> None:
        self._asked[name] = tuple(tokens)
        self._outputs[name] = []
        self.parts.engine.submit(greedy(name, tokens, count, salt))

    def step(self) -> None:
        self._take(self.parts.engine.step())

    def drain(self) -> None:
        """Serve all to the end and compare each with the oracle."""
        self._take(drain(self.parts))
        for name in list(self._outputs):
            outputs = self._outputs.pop(name)
            answer = Answer(
                tokens_of(outputs), torch.stack(self.recorder.logits.pop(name)), outputs[0].cached
            )
            self.answers[name] = answer
            self.compare(self._asked[name], answer)

    def ask(self, tokens: Sequence[int], count: int = OUTPUT, salt: str = "") -> Answer:
        """One prompt alone."""
        name = str(len(self._asked))
        self.submit(name, tokens, count, salt)
        self.drain()
        return self.answers[name]

    def compare(self, tokens: tuple[int, ...], answer: Answer) -> None:
        """Greedy tokens are identical and logits agree at every one of them; NaN never does."""
        expected, logits = oracle(self.model, tokens, len(answer.tokens))
        right = Reply(tuple(expected), logits, 0.0)
        got = Reply(tuple(answer.tokens), answer.logits, 0.0)
        wrong, error = compare(right, got, bound_of_model(self.model))
        assert wrong is None, f"token {wrong} differs, or its logits; those by {error:.1e}"

    def _take(self, outputs) -> None:
        for output in outputs:
            self._outputs[output.request].append(output)


@contextmanager
def lab(
    family: str,
    page: int,
    device: Sequence[int] | None = None,
    host: Sequence[int] | None = None,
    copier: Copier = DEFAULT_COPIER,
    **settings,
) -> Iterator[Lab]:
    """Pools that hold everything unless ``device`` or ``host`` say otherwise, per group."""
    torch.set_num_threads(1)
    groups = len(spec_for(family, page).groups)
    plenty = (-(-4096 // page),) * groups
    chunk = settings.pop("chunk_tokens", CHUNK[page])
    config = EngineConfig(
        page_tokens=page,
        max_running=6,
        max_model_len=settings.pop("max_model_len", 1024),
        chunk_tokens=chunk,
        step_tokens=settings.pop("step_tokens", 2 * chunk + 8),
        **settings,
    )
    pages = (plenty if device is None else device, plenty if host is None else host)
    with small_engine(engine_model(family), config, *pages, copier) as parts:
        yield Lab(tiny_model(family), parts)


def prove_reuse(family: str, page: int = 16) -> None:
    """The short proof that a family is exact: computed, hit on the device, loaded from the host."""
    with lab(family, page) as this:
        prove_reuse_in(this)


def prove_reuse_in(this: Lab) -> None:
    tokens = prompt(this.page, 1)
    end = last_end(len(tokens), this.page)
    assert this.ask(tokens).cached == on_device(this.spec, 0)
    assert this.ask(tokens).cached == on_device(this.spec, end)
    evict_device(this.parts)
    assert this.ask(tokens).cached == on_host(this.spec, end)


def prove_composite(model_type: str, directory: Path) -> None:
    """The same of a whole checkpoint with images or sound beside its text part, which is saved to
    the empty ``directory`` and loaded as a user loads it; prompts are text alone."""
    torch.set_num_threads(1)
    whole = composite(model_type, COMPOSITES[model_type])
    whole.save_pretrained(directory)
    model = load_model(directory)
    config = EngineConfig(
        page_tokens=16, max_running=6, max_model_len=1024, chunk_tokens=40, step_tokens=88
    )
    groups = len(spec_of(model.config, page_tokens=16, dtype=model.dtype).groups)
    with small_engine(model, config, (64,) * groups, (64,) * groups) as parts:
        prove_reuse_in(Lab(whole, parts))
