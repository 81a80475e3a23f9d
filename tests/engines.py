"""Engines over tiny models for tests: small pools, poisoned where nobody owns a page."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from stratakv.core.config import EngineConfig
from stratakv.core.ids import GroupId, PageIds, RequestId
from stratakv.engine.model import HuggingFaceModel
from stratakv.engine.request import Output, Prompt, SamplingParams
from stratakv.memory.allocator import PageAllocator
from stratakv.serve import wiring
from stratakv.spec.derive import spec_of


class PoisoningAllocator(PageAllocator):
    """Fills what is freed with NaN, so that a read of a page nobody owns cannot go unseen."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.poison = lambda pages: None

    def free(self, pages: PageIds) -> None:
        super().free(pages)
        if len(pages):
            self.poison(pages)


@contextmanager
def small_engine(
    model: HuggingFaceModel, config: EngineConfig, device: Sequence[int], host: Sequence[int]
) -> Iterator[wiring.EngineParts]:
    """An engine with exactly these pages per group, everything unowned poisoned."""
    spec = spec_of(model.config, page_tokens=config.page_tokens, dtype=model.dtype)
    made: list[PoisoningAllocator] = []

    def allocator(capacity: int) -> PoisoningAllocator:
        made.append(PoisoningAllocator(capacity))
        return made[-1]

    plain, wiring.PageAllocator = wiring.PageAllocator, allocator
    try:
        parts = wiring.assemble(
            model, spec, config, (device, host), config.max_model_len or model.max_positions
        )
    finally:
        wiring.PageAllocator = plain
    arenas = {group.id: arena for group, arena in zip(spec.groups, parts.arenas, strict=True)}
    for group in spec.groups:
        made[group.id].poison = lambda pages, g=group.id: parts.pools.poison(g, pages)
        made[len(spec.groups) + group.id].poison = arenas[group.id].poison
        parts.pools.poison(group.id, np.arange(device[group.id], dtype=np.int32))
        arenas[group.id].poison(np.arange(host[group.id], dtype=np.int32))
    try:
        yield parts
    finally:
        parts.close()


def greedy(name: str, tokens: Sequence[int], count: int) -> Prompt:
    return Prompt(
        id=RequestId(name),
        tokens=np.array(tokens, np.int32),
        sampling=SamplingParams(max_tokens=count, temperature=0.0),
    )


def run(parts: wiring.EngineParts, *prompts: Prompt) -> dict[str, list[Output]]:
    """Serve ``prompts`` together to their ends; the outputs of each, in order."""
    out: dict[str, list[Output]] = {prompt.id: [] for prompt in prompts}
    for prompt in prompts:
        parts.engine.submit(prompt)
    while parts.engine.has_work():
        for output in parts.engine.step():
            out[output.request].append(output)
    parts.engine.check()
    return out


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    return [output.token for output in outputs if output.token is not None]


__all__ = ["GroupId", "PoisoningAllocator", "greedy", "run", "small_engine", "tokens_of"]
