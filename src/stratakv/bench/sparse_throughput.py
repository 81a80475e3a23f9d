"""How many tokens a server says in a second with its selected rows on the host, and without.

Owns the measurement: one model and three engines that take turns. *Resident* has a device for a few
requests. *Offload* has the same pages for selected rows, and beside them index keys of everyone.
*Same memory* has selected rows on the host too, and not a byte more of the device than resident.
Contexts are cached before, so that what is timed is answers, with what it takes to seat each
request. Directly on the engine, without HTTP; one torch thread.
"""

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from stratakv.assembly.device import CPU, Device
from stratakv.assembly.models import EngineParts, build_engine, build_sized
from stratakv.assembly.sizing import Sizes, buffer_rows, spec_for
from stratakv.bench.rig import Laps, errors_alone, greedy, in_turn, one_thread
from stratakv.bench.shapes import DEEPSEEK_V32_3X512, Shape, build
from stratakv.core.config import EngineConfig
from stratakv.core.ids import TokenIds
from stratakv.engine.huggingface.model import HuggingFaceModel, wrap
from stratakv.engine.loop import Engine
from stratakv.spec.budget import device_bytes
from stratakv.spec.derive import spec_of

RESIDENT: Final = "resident"
OFFLOAD: Final = "offload"
SAME_MEMORY: Final = "same memory"
LEAST_RATIO: Final = 0.97
"""While everything fits."""
TARGET: Final = 2.5
"""At the highest concurrency."""
GROWTH: Final = 5
"""How much longer a case takes than the one before, at most: four times as many requests."""
HEADER: Final = (
    "requests      resident       offload (ratio, CPU)   same memory (ratio, CPU)"
    "   tok/s, and how many ran"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLoad:
    """``shape``: of the model, in bfloat16; ``held``: requests that the device holds whole;
    ``concurrency``: how many are asked for together, ascending; ``buffer_rows``: of a spilled one;
    ``host_times``: host pages to those of everyone's context once: one that runs has a page more,
    which is filling."""

    shape: Shape
    held: int
    concurrency: tuple[int, ...]
    context_tokens: int
    answer_tokens: int
    buffer_rows: int
    page_tokens: int
    chunk_tokens: int
    laps: int
    host_times: float

    @property
    def most(self) -> int:
        return max(self.concurrency)

    @property
    def longest(self) -> int:
        """Tokens of a request, and one that is looked ahead for."""
        return self.context_tokens + self.answer_tokens + 1

    @property
    def pages(self) -> int:
        """Of a request."""
        return -(-self.longest // self.page_tokens)


ON_CPU: Final = ServedLoad(
    shape=DEEPSEEK_V32_3X512,
    held=4,
    concurrency=(1, 4, 16, 64),
    context_tokens=2032,
    answer_tokens=32,
    buffer_rows=96,
    page_tokens=8,
    chunk_tokens=512,
    laps=4,
    host_times=2.0,
)
"""With a top-k of 64 a thirty-second of V3.2's 2,048 of 65,536. The buffer has one and a half
selections, so that buffers of all 64 fit beside each other."""


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


def throughput_cases(
    show: Callable[[ThroughputCase], None],
    load: ServedLoad,
    device: Device[Any] = CPU,
    limit_s: float = math.inf,
) -> list[ThroughputCase]:
    """``show`` is called with each as soon as it is there. The first that might not end by
    ``limit_s``, as long as the one before took, and all behind it are left out."""
    random, vocabulary = np.random.default_rng(0), int(load.shape["vocab_size"])
    prompts = [
        random.integers(0, vocabulary, load.context_tokens).astype(np.int32)
        for _ in range(load.most)
    ]
    found: list[ThroughputCase] = []
    cached, begin_s, last_s = 0, time.perf_counter(), 0.0
    with _engines(load, device) as engines:
        for count in load.concurrency:
            since_s = time.perf_counter()
            if found and since_s - begin_s + GROWTH * last_s > limit_s:
                break
            for engine in engines.values():
                _answer(engine, prompts[cached:count], 1)  # these are on the host from now on
            cached = count
            found.append(_case(engines, prompts[:count], load))
            show(found[-1])
            last_s = time.perf_counter() - since_s
    return found


def print_case(case: ThroughputCase) -> None:
    """A line under ``HEADER``."""
    ratios = f"{case.ratio:.2f}, {case.cpu_ratio:.2f}"
    same_memory = f"{case.same_memory_ratio:.2f}, {case.same_memory_cpu_ratio:.2f}"
    print(
        f"{case.concurrency:8d}  {case.resident_tok_s:6.1f} {case.resident_at_once:5.1f}"
        f"  {case.offload_tok_s:6.1f} {case.offload_at_once:5.1f} ({ratios})"
        f"    {case.same_memory_tok_s:6.1f} {case.same_memory_at_once:5.1f}"
        f" ({same_memory})",
        flush=True,
    )


def _case(
    engines: dict[str, Engine], prompts: Sequence[TokenIds], load: ServedLoad
) -> ThroughputCase:
    laps, work, at_once = Laps(), Laps(), dict[str, float]()

    def lap(name: str) -> None:
        begin_s = time.process_time()
        at_once[name] = _answer(engines[name], prompts, load.answer_tokens)
        work.add(name, time.process_time() - begin_s)

    for turn in range(load.laps):
        for name in in_turn(list(engines), turn):
            laps.time(name, lambda name=name: lap(name))
    tokens = len(prompts) * load.answer_tokens
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
def _engines(load: ServedLoad, device: Device[Any]) -> Generator[dict[str, Engine]]:
    """A model may be run by all: its weights are read alone."""
    with one_thread(), errors_alone("stratakv.assembly"), ExitStack() as stack:
        module = build(load.shape).bfloat16()
        model = wrap(module.to(device.at))  # pyright: ignore[reportArgumentType] - as of a Module
        made: dict[str, EngineParts] = {}
        for name, make in (
            (RESIDENT, _resident),
            (OFFLOAD, _with_index_keys_of_all),
            (SAME_MEMORY, _same_memory),
        ):
            made[name] = make(model, load, device)
            stack.callback(made[name].close)
        yield {name: parts.engine for name, parts in made.items()}


def _resident(model: HuggingFaceModel, load: ServedLoad, device: Device[Any]) -> EngineParts:
    return build_engine(model, _config(model, load, device, offload=False), device)


def _same_memory(model: HuggingFaceModel, load: ServedLoad, device: Device[Any]) -> EngineParts:
    return build_engine(model, _config(model, load, device, offload=True), device)


def _with_index_keys_of_all(
    model: HuggingFaceModel, load: ServedLoad, device: Device[Any]
) -> EngineParts:
    """With room for so many whole requests' selected rows as the resident one has."""
    config = _config(model, load, device, offload=True)
    spec, rows = spec_for(model.facts, config), buffer_rows(model.facts, config)
    everyone = load.most * load.pages
    pages, host = (everyone, load.held * load.pages), (int(load.host_times * everyone),) * 2
    sizes = Sizes.of(spec, pages, host, load.longest, rows)
    return build_sized(model, config, sizes, device=device)


def _config(
    model: HuggingFaceModel, load: ServedLoad, device: Device[Any], *, offload: bool
) -> EngineConfig:
    spec = spec_of(model.config, page_tokens=load.page_tokens, dtype=model.dtype)
    host = int(load.host_times * device_bytes(spec, (load.most * load.pages,)))
    return EngineConfig(
        device=device.at.type,
        page_tokens=load.page_tokens,
        device_memory=f"{device_bytes(spec, (load.held * load.pages,))}B",
        host_memory=f"{host}B",
        max_running=load.most,
        max_model_len=load.longest,
        chunk_tokens=load.chunk_tokens,
        step_tokens=2 * load.chunk_tokens,
        chat_tokens=load.longest,
        reserve_tokens=load.answer_tokens,
        load_back_threshold=1,
        sparse_offload=offload,
        device_buffer_size=load.buffer_rows if offload else None,
    )
