"""How many tokens a server says in a second with its selected rows on the host, and without.

Owns the measurement: one model and three engines that take turns. *Resident* has a device for four
requests. *Offload* has the same pages for selected rows, and beside them index keys of everyone.
*Same memory* has selected rows on the host too, and not a byte more of the device than resident.
Contexts are cached before, so that what is timed is answers, with what it takes to seat each
request. Directly on the engine, without HTTP; one torch thread.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from stratakv.assembly.models import EngineParts, build_engine, build_sized
from stratakv.assembly.sizing import Sizes, buffer_rows, spec_for
from stratakv.bench.rig import Laps, errors_alone, greedy, in_turn, one_thread
from stratakv.bench.shapes import DEEPSEEK_V32_3X512, VOCABULARY, build
from stratakv.core.config import EngineConfig
from stratakv.core.ids import TokenIds
from stratakv.engine.loop import Engine
from stratakv.engine.model import HuggingFaceModel, wrap
from stratakv.spec.budget import device_bytes
from stratakv.spec.derive import spec_of

RESIDENT: Final = "resident"
OFFLOAD: Final = "offload"
SAME_MEMORY: Final = "same memory"
HELD: Final = 4
"""Requests that the device holds whole."""
CONCURRENCY: Final = (1, 4, 16, 64)
CONTEXT_TOKENS: Final = 2032
"""With a top-k of 64 a thirty-second of V3.2's 2,048 of 65,536."""
ANSWER_TOKENS: Final = 32
BUFFER_ROWS: Final = 96
"""One and a half selections, so that buffers of all 64 fit beside each other."""
PAGE_TOKENS: Final = 8
CHUNK_TOKENS: Final = 512
LAPS: Final = 4
LEAST_RATIO: Final = 0.97
"""While everything fits."""
TARGET: Final = 2.5
"""At the highest concurrency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputCase:
    """Output tokens per second of each engine, medians. A ratio is of its tokens to those of the
    resident one: the median of neighbouring laps. ``cpu_ratio`` is the same of tokens per second of
    processor time, which shows nothing of what else the machine does. ``at_once``: of the requests
    that were asked for together, how many answered in a step, on average."""

    concurrency: int
    resident_tok_s: float
    offload_tok_s: float
    same_memory_tok_s: float
    ratio: float
    same_memory_ratio: float
    cpu_ratio: float
    same_memory_cpu_ratio: float
    resident_at_once: float
    offload_at_once: float
    same_memory_at_once: float


def throughput_cases(show: Callable[[ThroughputCase], None]) -> list[ThroughputCase]:
    """``show`` is called with each as soon as it is there."""
    random = np.random.default_rng(0)
    prompts = [
        random.integers(0, VOCABULARY, CONTEXT_TOKENS).astype(np.int32)
        for _ in range(max(CONCURRENCY))
    ]
    found: list[ThroughputCase] = []
    with _engines() as engines:
        for engine in engines.values():
            _answer(engine, prompts, 1)  # contexts are on the host from now on
        for count in CONCURRENCY:
            found.append(_case(engines, prompts[:count]))
            show(found[-1])
    return found


def _case(engines: dict[str, Engine], prompts: Sequence[TokenIds]) -> ThroughputCase:
    laps, work, at_once = Laps(), Laps(), dict[str, float]()

    def lap(name: str) -> None:
        begin_s = time.process_time()
        at_once[name] = _answer(engines[name], prompts, ANSWER_TOKENS)
        work.add(name, time.process_time() - begin_s)

    for turn in range(LAPS):
        for name in in_turn(list(engines), turn):
            laps.time(name, lambda name=name: lap(name))
    tokens = len(prompts) * ANSWER_TOKENS
    tok_s = {name: round(tokens / laps.median_s(name), 1) for name in engines}
    ratios = {name: round(laps.ratio(RESIDENT, name), 3) for name in engines}
    cpu = {name: round(work.ratio(RESIDENT, name), 3) for name in engines}
    seated = {name: round(count, 1) for name, count in at_once.items()}
    return ThroughputCase(
        concurrency=len(prompts),
        resident_tok_s=tok_s[RESIDENT],
        offload_tok_s=tok_s[OFFLOAD],
        same_memory_tok_s=tok_s[SAME_MEMORY],
        ratio=ratios[OFFLOAD],
        same_memory_ratio=ratios[SAME_MEMORY],
        cpu_ratio=cpu[OFFLOAD],
        same_memory_cpu_ratio=cpu[SAME_MEMORY],
        resident_at_once=seated[RESIDENT],
        offload_at_once=seated[OFFLOAD],
        same_memory_at_once=seated[SAME_MEMORY],
    )


def _answer(engine: Engine, prompts: Sequence[TokenIds], count: int) -> float:
    """All together; how many ran in a step."""
    for at, tokens in enumerate(prompts):
        engine.submit(greedy(str(at), tokens, count))
    answers = [len(engine.step())]
    while engine.has_work():
        answers.append(len(engine.step()))
    return float(np.mean(answers))


@contextmanager
def _engines() -> Generator[dict[str, Engine]]:
    """A model may be run by both: its weights are read alone."""
    with one_thread(), errors_alone("stratakv.assembly"), ExitStack() as stack:
        model = wrap(build(DEEPSEEK_V32_3X512).bfloat16())
        made = {
            RESIDENT: build_engine(model, _config(model, offload=False)),
            OFFLOAD: _with_index_keys_of_all(model, _config(model, offload=True)),
            SAME_MEMORY: build_engine(model, _config(model, offload=True)),
        }
        for parts in made.values():
            stack.callback(parts.close)
        yield {name: parts.engine for name, parts in made.items()}


def _with_index_keys_of_all(model: HuggingFaceModel, config: EngineConfig) -> EngineParts:
    """With room for so many whole requests' selected rows as the resident one has."""
    spec, rows = spec_for(model.facts, config), buffer_rows(model.facts, config)
    longest = CONTEXT_TOKENS + ANSWER_TOKENS + 1
    each = -(-longest // PAGE_TOKENS)
    everyone = max(CONCURRENCY) * each
    device, host = (everyone, HELD * each), (2 * everyone, 2 * everyone)
    return build_sized(model, config, Sizes.of(spec, device, host, longest, rows))


def _config(model: HuggingFaceModel, *, offload: bool) -> EngineConfig:
    spec = spec_of(model.config, page_tokens=PAGE_TOKENS, dtype=model.dtype)
    longest = CONTEXT_TOKENS + ANSWER_TOKENS + 1
    each = -(-longest // PAGE_TOKENS)
    # Every context once on the host, where one that runs has a half-filled page more.
    host = 2 * device_bytes(spec, (max(CONCURRENCY) * each,))
    return EngineConfig(
        page_tokens=PAGE_TOKENS,
        device_memory=f"{device_bytes(spec, (HELD * each,))}B",
        host_memory=f"{host}B",
        max_running=max(CONCURRENCY),
        max_model_len=longest,
        chunk_tokens=CHUNK_TOKENS,
        step_tokens=2 * CHUNK_TOKENS,
        chat_tokens=longest,
        reserve_tokens=ANSWER_TOKENS,
        load_back_threshold=1,
        sparse_offload=offload,
        device_buffer_size=BUFFER_ROWS if offload else None,
    )
