"""``stratakv bench sparse``: what a bounded device buffer misses, what planning it costs, and what
a server gains by it.

Owns what is measured and the report; served throughput is ``sparse_throughput``'s, copies by page
and by token ``sparse_pages``'. Misses are those of the production planner, on made-up selections,
on what a running model selects, and on recorded ones, beside the plainest LRU and beside a buffer
that knows the future. Plans are timed for a whole step: every layer's selection of every request
of a batch, through the tables that an engine keeps.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stratakv.assembly.device import Device
from stratakv.assembly.devices import device_of
from stratakv.bench.sparse_pages import PageSizeCase, page_size_cases
from stratakv.bench.sparse_recall import RecallCase, recall_cases
from stratakv.bench.sparse_recorded import recorded_selections
from stratakv.bench.sparse_selections import (
    Selections,
    SelectionTraffic,
    clairvoyant_misses,
    generate_selections,
    lru_misses,
    read_selections,
)
from stratakv.bench.sparse_throughput import (
    HEADER,
    LEAST_RATIO,
    ON_CPU,
    TARGET,
    print_case,
    throughput_cases,
)
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.sparse.hot_buffer import DEFAULT_PLANNER, MOST_ENTRIES, HotBuffers, HotBufferShape
from stratakv.sparse.swap_in import Planner, Table, plan_swap_in

TOP_K: Final = 2048
PAGE_ROWS: Final = 64
LAYERS: Final = 61
ROW_BYTES: Final = 1152
"""DeepSeek-V3.2's: a latent of 512 and 64 rotated elements, bfloat16."""
ENTRIES: Final = 32_768
DRIFTS: Final = (0.05, 0.10, 0.20)
BUFFERS: Final = (2048, 4096, 6144)
STEPS: Final = 160
WARM_STEPS: Final = 60
"""Not counted: the buffer is still filling."""
PLAN_ENTRIES: Final = 131_072
PLAN_BUFFER: Final = 4096
PLAN_DRIFT: Final = 0.05
PLAN_STEPS: Final = 5
BATCHES: Final = (1, 4, 16, 64)
LAYER_COUNTS: Final = (1, 16, LAYERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MissCase:
    """Of one request and one layer, a step: ``per_step`` rows are copied. Rates are parts of what
    is selected; ``bytes_per_step`` is of all layers, each with a selection of its own."""

    selections: str
    drift: float
    buffer: int
    per_step: float
    hit_rate: float
    lru_hit_rate: float
    clairvoyant_hit_rate: float
    bytes_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCase:
    """Microseconds of CPU of a step, in one thread, median: the clock would also show what else the
    machine does. ``entries`` is the length of every request."""

    planner: str
    batch: int
    layers: int
    entries: int
    us: float


def _on_gpu(device: Device[Any]) -> dict[str, object]:
    from stratakv.bench.gpu_sparse import run_on  # noqa: PLC0415 - only a GPU needs Triton

    return run_on(device)


def run(
    selections: str | None = None, text: str | None = None, device: str = "cpu"
) -> dict[str, object]:
    """Measure, and print tables; ten minutes. ConfigError where recorded ``selections`` or the
    ``text`` that the built-in model reads cannot be used. ``device``: cuda has its own kernels."""
    if device != "cpu":
        for flag, given in (("--selections", selections), ("--text", text)):
            if given is not None:
                raise ConfigError(f"{flag}: allowed with --device cpu")
        return _on_gpu(device_of(EngineConfig(device=device)))
    recorded = None if selections is None else read_selections(Path(selections))
    watched = recorded_selections(text)
    print(f"one request, {TOP_K} of {ENTRIES} entries a step, one layer; rates are parts of them")
    print(_MISS_HEADER)
    misses = [_printed_miss(case) for case in miss_cases(recorded, watched)]
    print(f"\nplans of a step, buffers of {PLAN_BUFFER}, {PLAN_DRIFT:.0%} new a step")
    print(_PLAN_HEADER)
    plans = [_printed_plan(case) for case in plan_cases()]
    print("\npages of made-up keys selected by bounds: part of attention's weight (approximate)")
    print(_RECALL_HEADER)
    recalls = [_printed_recall(case) for case in recall_cases()]
    print("\nselected rows moved by pages, and by tokens")
    sizes = [_printed_size(case) for case in page_size_cases()]
    print(
        f"\nserved, device pages for {ON_CPU.held} requests; ratios are to resident: at least "
        f"{LEAST_RATIO} while all fit, {TARGET} at the end\n{HEADER}"
    )
    throughput = throughput_cases(print_case, ON_CPU)
    return {
        "top_k": TOP_K,
        "row_bytes": ROW_BYTES,
        "layers": LAYERS,
        "misses": [asdict(case) for case in misses],
        "plan_us": [asdict(case) for case in plans],
        "page_bounds": [asdict(case) for case in recalls],
        "page_sizes": [asdict(case) for case in sizes],
        "throughput": [asdict(case) for case in throughput],
    }


def miss_cases(recorded: Selections | None, watched: Sequence[Selections]) -> Iterator[MissCase]:
    """``recorded``: of a file; ``watched``: of each layer of the built-in model."""
    named = [(f"layer {at}", each) for at, each in enumerate(watched)]
    replayed = named if recorded is None else [("recorded", recorded), *named]
    for name, each in replayed:
        top_k = each.shape[1]
        for buffer in (size for size in (top_k, 2 * top_k, 3 * top_k) if size <= MOST_ENTRIES):
            yield miss_case(name, drift_of(each), each, buffer)
    for uniform in (False, True):
        for drift in DRIFTS:
            traffic = SelectionTraffic(entries=ENTRIES, top_k=TOP_K, drift=drift, uniform=uniform)
            made = generate_selections(traffic, STEPS)
            for buffer in BUFFERS:
                yield miss_case("uniform" if uniform else "popular", drift, made, buffer)


def drift_of(selections: Selections) -> float:
    """The part of a selection that the one before had not, on average."""
    new = [np.setdiff1d(later, earlier).size for earlier, later in pairwise(selections)]
    return float(np.mean(new) / selections.shape[1]) if new else 0.0


def miss_case(name: str, drift: float, selections: Selections, buffer: int) -> MissCase:
    warm = min(WARM_STEPS, len(selections) // 2)
    selected = np.count_nonzero(selections[warm:] >= 0)
    steps = len(selections) - warm
    copied, lru, best = (
        int(misses(selections, buffer)[warm:].sum())
        for misses in (planned_misses, lru_misses, clairvoyant_misses)
    )
    return MissCase(
        selections=name,
        drift=drift,
        buffer=buffer,
        per_step=copied / steps,
        hit_rate=1 - copied / selected,
        lru_hit_rate=1 - lru / selected,
        clairvoyant_hit_rate=1 - best / selected,
        bytes_per_step=copied * ROW_BYTES * LAYERS // steps,
    )


def planned_misses(selections: Selections, buffer: int) -> npt.NDArray[np.int64]:
    """int64 [steps]: what the production planner copies."""
    shape = HotBufferShape(entries=buffer, page_rows=1, top_k=selections.shape[1])
    buffers = HotBuffers(shape, 1, 1, int(selections.max()) + 1)
    row = np.zeros(1, np.int32)
    counts = [len(buffers.swap_in(0, row, selection[None]).misses) for selection in selections]
    return np.array(counts, np.int64)


def plan_cases() -> Iterator[PlanCase]:
    planners: list[tuple[str, Planner]] = [("numpy", plan_swap_in)]
    if DEFAULT_PLANNER is not plan_swap_in:
        planners.insert(0, ("c", DEFAULT_PLANNER))
    for name, planner in planners:
        for batch in BATCHES:
            made = batch_selections(batch, PLAN_ENTRIES)
            for layers in LAYER_COUNTS:
                us = step_us(planner, made, layers)
                yield PlanCase(
                    planner=name, batch=batch, layers=layers, entries=PLAN_ENTRIES, us=us
                )
        short = PLAN_ENTRIES // 8
        us = step_us(planner, batch_selections(BATCHES[-1], short), LAYERS)
        yield PlanCase(planner=name, batch=BATCHES[-1], layers=LAYERS, entries=short, us=us)


def batch_selections(batch: int, entries: int) -> Table:
    """int32 [steps, batch, K], warmed up for as long as a buffer takes to fill."""
    per_request = [
        generate_selections(
            SelectionTraffic(entries=entries, top_k=TOP_K, drift=PLAN_DRIFT, seed=seed), PLAN_STEPS
        )
        for seed in range(batch)
    ]
    return np.stack(per_request, 1)


def step_us(planner: Planner, selections: Table, layers: int) -> float:
    steps, batch, top_k = selections.shape
    shape = HotBufferShape(entries=PLAN_BUFFER, page_rows=PAGE_ROWS, top_k=top_k)
    buffers = HotBuffers(shape, layers, batch, int(selections.max()) + 1, planner)
    rows = np.arange(batch, dtype=np.int32)
    taken: list[float] = []
    for step in range(steps):
        begun = time.process_time()
        for layer in range(layers):
            buffers.swap_in(layer, rows, selections[step])
        taken.append(time.process_time() - begun)
    return 1e6 * median(taken[1:])  # in the first one everything is missed


_MISS_HEADER: Final = (
    "selections  new a step  buffer  misses/step  hit rate  plain LRU  clairvoyant"
    "  MB/step, all layers"
)
_PLAN_HEADER: Final = "planner  batch  layers  entries  CPU ms a step  us a request and layer"

_RECALL_HEADER: Final = "pages   by bounds   the best   at random"


def _printed_miss(case: MissCase) -> MissCase:
    print(
        f"{case.selections:10s}  {case.drift:10.0%}  {case.buffer:6d}  {case.per_step:11.1f}"
        f"  {case.hit_rate:8.3f}  {case.lru_hit_rate:9.3f}  {case.clairvoyant_hit_rate:11.3f}"
        f"  {case.bytes_per_step / 1e6:19.1f}",
        flush=True,
    )
    return case


def _printed_plan(case: PlanCase) -> PlanCase:
    each = case.us / case.batch / case.layers
    print(
        f"{case.planner:7s}  {case.batch:5d}  {case.layers:6d}  {case.entries:7d}"
        f"  {case.us / 1e3:13.2f}  {each:23.1f}",
        flush=True,
    )
    return case


def _printed_recall(case: RecallCase) -> RecallCase:
    print(
        f"{case.part:5.0%}  {case.recall:10.3f}  {case.best_recall:9.3f}"
        f"  {case.random_recall:10.3f}"
    )
    return case


def _printed_size(case: PageSizeCase) -> PageSizeCase:
    print(
        f"{case.path:15s}  pages of {case.page_tokens}: {case.gb_s:.2f} GB/s, of 1: "
        f"{case.single_gb_s:.2f}; {case.ratio:.1f} times as fast",
        flush=True,
    )
    return case
