"""Time to first token of a long prompt: computed, found on the device, loaded back from the host,
fetched from storage.

Owns the rounds. One request at a time, in an engine whose device has room for one prompt: each new
one drives the one before it off. Storage is a directory of files, which the kernel has in memory.
Chunks and pages are as the engine has them by default.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from transformers import PreTrainedModel

from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.models import EngineParts, assemble
from stratakv.assembly.sizing import Sizes
from stratakv.bench.rig import Laps, attach_files, first_token_s
from stratakv.bench.shapes import VOCABULARY
from stratakv.core.config import EngineConfig
from stratakv.core.ids import TokenIds
from stratakv.engine.model import wrap
from stratakv.policy.checkpoints import last_end
from stratakv.spec.derive import default_page_tokens, spec_of
from stratakv.spec.retention import peak_pages

PROMPT_TOKENS: Final = 4096
ROUNDS: Final = 3
TARGET: Final = 0.15
"""What a hit may take of a recompute, wherever it is found."""
STORE_QUOTA: Final = "16GiB"
HOST_PROMPTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenCase:
    """Medians over the rounds. The ratios are to the recompute of the same round."""

    family: str
    recompute_ms: float
    device_hit_ratio: float
    host_hit_ratio: float
    storage_hit_ratio: float


def first_token(family: str, module: PreTrainedModel) -> FirstTokenCase:
    """Take over ``module`` and time its first tokens."""
    rng = np.random.default_rng(0)
    laps = Laps()
    before = _prompt(rng)
    with _parts(module) as parts:
        engine = parts.engine
        hit = last_end(PROMPT_TOKENS, parts.spec.page_tokens) * parts.spec.page_tokens
        first_token_s(engine, before, (0, 0, 0))
        for _ in range(ROUNDS + 1):
            prompt = _prompt(rng)
            laps.add("recompute", first_token_s(engine, prompt, (0, 0, 0)))
            laps.add("device", first_token_s(engine, prompt, (hit, 0, 0)))
            laps.add("host", first_token_s(engine, before, (0, hit, 0)))
            assert engine.flush(), "a request still runs"
            laps.add("storage", first_token_s(engine, prompt, (0, 0, hit)))
            before = prompt
        engine.check()
    return FirstTokenCase(
        family=family,
        recompute_ms=laps.median_s("recompute") * 1000,
        device_hit_ratio=laps.ratio("device", "recompute"),
        host_hit_ratio=laps.ratio("host", "recompute"),
        storage_hit_ratio=laps.ratio("storage", "recompute"),
    )


@contextmanager
def _parts(module: PreTrainedModel) -> Generator[EngineParts]:
    """With a store in a directory that goes afterwards."""
    parts = _engine(module)
    try:
        with TemporaryDirectory(prefix="stratakv-bench-") as directory:
            host = [arena.pages for arena in parts.arenas]
            attach_files(parts.engine, parts.spec, host, f"file://{directory}?quota={STORE_QUOTA}")
            yield parts
            parts.close()
    finally:
        parts.close()


def _engine(module: PreTrainedModel) -> EngineParts:
    """Room for one prompt on the device, and for a few on the host."""
    model, longest = wrap(module), PROMPT_TOKENS + 1
    config = EngineConfig(max_running=1, max_model_len=longest)
    page = default_page_tokens(model.config)
    spec = spec_of(model.config, page_tokens=page, dtype=model.dtype)
    device = [
        peak_pages(group.retention, longest, config.chunk_tokens, page) for group in spec.groups
    ]
    host = [HOST_PROMPTS * device[0]] * len(device)
    plan = EnginePlan.of(config, Sizes.of(spec, device, host, longest), model.fingerprint)
    return assemble(model, plan)


def _prompt(rng: np.random.Generator) -> TokenIds:
    return rng.integers(0, VOCABULARY, PROMPT_TOKENS, dtype=np.int32)
