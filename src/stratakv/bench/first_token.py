"""Time to first token of a long prompt: computed, found on the device, loaded back from the host,
fetched from storage.

Owns the rounds. One request at a time, in an engine whose device has room for one prompt: each new
one drives the one before it off. Storage is a directory of files, which the kernel has in memory.
Chunks and pages are as the engine has them by default. What takes long is computing, so there are
more rounds of hits, of the last two prompts in turn.
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
from stratakv.engine.huggingface.model import wrap
from stratakv.policy.checkpoints import last_end
from stratakv.spec.derive import default_page_tokens, spec_of
from stratakv.spec.retention import peak_pages

PROMPT_TOKENS: Final = 4096
COMPUTED: Final = 2
"""Prompts that are computed and timed, after one that warms."""
ROUNDS: Final = 4
"""In each, both prompts are found on the device, on the host and in storage; one more warms."""
TARGET: Final = 0.15
"""What a hit may take of a recompute, wherever it is found."""
HOST_TARGET: Final = 1.1
STORAGE_TARGET: Final = 1.3
"""What one may take of a hit on the device."""
STORE_QUOTA: Final = "16GiB"
HOST_PROMPTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenCase:
    """Medians. ``*_hit_ratio``: to a recompute; ``*_to_device``: to a hit on the device in the same
    round."""

    family: str
    recompute_ms: float
    device_hit_ratio: float
    host_hit_ratio: float
    storage_hit_ratio: float
    host_to_device: float
    storage_to_device: float


def first_token(family: str, module: PreTrainedModel) -> FirstTokenCase:
    """Take over ``module`` and time its first tokens."""
    rng = np.random.default_rng(0)
    laps = Laps()
    with _parts(module) as parts:
        engine = parts.engine
        hit = last_end(PROMPT_TOKENS, parts.spec.page_tokens) * parts.spec.page_tokens
        prompts = [_prompt(rng) for _ in range(COMPUTED + 1)]
        for prompt in prompts:
            laps.add("recompute", first_token_s(engine, prompt, (0, 0, 0)))
        one, other = prompts[-2:]
        for _ in range(ROUNDS + 1):
            assert engine.flush(), "a request still runs"
            for prompt in (one, other):
                laps.add("storage", first_token_s(engine, prompt, (0, 0, hit)))
            for prompt, driven_off in ((other, one), (one, other)):
                laps.add("device", first_token_s(engine, prompt, (hit, 0, 0)))
                laps.add("host", first_token_s(engine, driven_off, (0, hit, 0)))
        engine.check()
    recompute_s = laps.median_s("recompute")
    return FirstTokenCase(
        family=family,
        recompute_ms=recompute_s * 1000,
        device_hit_ratio=laps.median_s("device") / recompute_s,
        host_hit_ratio=laps.median_s("host") / recompute_s,
        storage_hit_ratio=laps.median_s("storage") / recompute_s,
        host_to_device=laps.ratio("host", "device"),
        storage_to_device=laps.ratio("storage", "device"),
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
