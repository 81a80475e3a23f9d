"""Where the "hit == recompute" tests live: one small engine per family and page size, and the
comparison with Hugging Face at batch 1 that each of them ends in.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
from transformers import PreTrainedModel

from stratakv.assembly.models import EngineParts
from stratakv.assembly.verify_engine import Tried
from stratakv.core.clock import MonotonicClock
from stratakv.core.config import EngineConfig
from stratakv.core.ids import RequestId, TokenIds
from stratakv.engine.executor import TokenSource
from stratakv.engine.huggingface.model import HuggingFaceModel, load_model, wrap
from stratakv.engine.verify.claims import Settings, Verifier, compare
from stratakv.engine.verify.report import Exact, Way
from stratakv.engine.verify.session import Scribe, VerifyOutput, VerifySession
from stratakv.spec.derive import spec_of
from stratakv.spec.families import COMPOSITES
from stratakv.spec.groups import CacheSpec
from stratakv.transfer.copier import Copier
from stratakv.transfer.cpu import DEFAULT_COPIER
from tests.engines import RecordingRunner, small_engine
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


def hugging_face(model: PreTrainedModel, tokens: tuple[int, ...], count: int) -> VerifyOutput:
    generated, logits = oracle(model, tokens, count)
    return VerifyOutput(tuple(generated), logits, 0.0)


def config_for(page: int, **settings) -> EngineConfig:
    chunk = settings.pop("chunk_tokens", CHUNK[page])
    return EngineConfig(
        page_tokens=page,
        max_running=6,
        max_model_len=settings.pop("max_model_len", 1024),
        chunk_tokens=chunk,
        step_tokens=settings.pop("step_tokens", 2 * chunk + 8),
        **settings,
    )


def prompt(page: int, seed: int, tokens: int | None = None) -> list[int]:
    return random_prompt(seed, PROMPT[page] if tokens is None else tokens)


def last_end(tokens: int, page: int) -> int:
    """Tokens that the same prompt can hit: floorP(n - 1)."""
    return (tokens - 1) // page * page


class Lab:
    """A session with an engine whose every reply is compared with a run of ``model`` that has no
    cache. ``scribe``: the engine's token_source."""

    def __init__(self, model: PreTrainedModel, parts: EngineParts, scribe: Scribe) -> None:
        self.model = model
        self.parts = parts
        self.spec = parts.spec
        self.page = parts.spec.page_tokens
        self.recorder = RecordingRunner(parts)
        self.session = VerifySession(Tried(parts), scribe, MonotonicClock())
        self.answers: dict[str, VerifyOutput] = {}
        self._asked: dict[str, tuple[int, ...]] = {}

    def submit(self, name: str, tokens: Sequence[int], count: int = OUTPUT, salt: str = "") -> None:
        self._asked[name] = tuple(tokens)
        self.session.submit(np.array(tokens, np.int32), count, salt, name=RequestId(name))

    def step(self) -> None:
        self.session.step()

    def drain(self) -> None:
        """Serve all to the end and compare each with the oracle."""
        self.session.drain()
        self.parts.engine.check()
        for name, reply in self.session.replies().items():
            self.answers[name] = reply
            self.compare(self._asked[name], reply)

    def ask(self, tokens: Sequence[int], count: int = OUTPUT, salt: str = "") -> VerifyOutput:
        """One prompt alone."""
        name = str(len(self._asked))
        self.submit(name, tokens, count, salt)
        self.drain()
        return self.answers[name]

    def compare(self, tokens: tuple[int, ...], reply: VerifyOutput) -> None:
        """Greedy tokens are identical and logits agree at every one of them; NaN never does."""
        count = len(reply.tokens) + (reply.failure is not None)
        right = hugging_face(self.model, tokens, count)
        wrong, error = compare(right, reply, bound_of_model(self.model))
        assert wrong is None, f"token {wrong} differs, or its logits; those by {error:.1e}"


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
    config = config_for(page, **settings)
    pages = (plenty if device is None else device, plenty if host is None else host)
    scribe = Scribe()
    with small_engine(engine_model(family), config, *pages, copier, scribe) as parts:
        yield Lab(tiny_model(family), parts, scribe)


# -- a short proof -------------------------------------------------------------------------------


PROOF: Final = (Way.COMPUTED, Way.DEVICE, Way.HOST)


def prove_reuse(family: str, page: int = 16) -> None:
    """The short proof that a family is exact: computed, hit on the device, loaded from the host."""
    prove_exact(engine_model(family), tiny_model(family), page)


def prove_exact(model: HuggingFaceModel, reference: PreTrainedModel, page: int) -> None:
    """The same of any model and what Hugging Face has for it."""
    torch.set_num_threads(1)
    groups = len(spec_of(model.config, page_tokens=page, dtype=model.dtype).groups)
    pages = (-(-1024 // page),) * groups

    def uncached(tokens: TokenIds, count: int) -> VerifyOutput:
        return hugging_face(reference, tuple(tokens.tolist()), count)

    settings = Settings(bound=bound_of_model(reference), salt="", output_tokens=OUTPUT)
    asked = [np.array(prompt(page, 1), np.int32)]
    with ExitStack() as undo:

        def start(token_source: TokenSource, _: int | None) -> Tried:
            engine = small_engine(model, config_for(page), pages, pages, token_source=token_source)
            return Tried(undo.enter_context(engine))

        report = Verifier(start, asked, settings, uncached).run(PROOF)
    for result in report.results:
        assert isinstance(result.verdict, Exact), result


def prove_composite(model_type: str, directory: Path) -> None:
    """The same of a whole checkpoint with images or sound beside its text part, which is saved to
    the empty ``directory`` and loaded as a user loads it; prompts are text alone."""
    whole = composite(model_type, COMPOSITES[model_type])
    whole.save_pretrained(directory)
    prove_exact(load_model(directory), whole, 16)
