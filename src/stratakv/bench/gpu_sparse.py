"""``stratakv bench sparse --device cuda``: missing rows from pinned host memory in a decode step,
and what a server gains by keeping rows there.

Owns the first measurement: rows of DeepSeek-V3.2's size for a whole batch and all layers, by the
kernel of the swap-in, beside a bare one that is given the addresses of the same rows. The second is
``sparse_throughput``'s, under a load of its own.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from stratakv.assembly.device import Device
from stratakv.bench.shapes import DEEPSEEK_V32_2X2048
from stratakv.bench.sparse_throughput import (
    HEADER,
    ServedLoad,
    print_case,
    throughput_cases,
)
from stratakv.engine.attention.triton_swap_ins import room_of
from stratakv.sparse.triton_swap_in import RowRoute, launch_rows
from stratakv.transfer.triton_copy import launch_moves

ROW_BYTES: Final = 1152
LAYERS: Final = 61
MISSES: Final = 2
BATCHES: Final = (1, 10, 100)
PAGE_ROWS: Final = 64
PAGES: Final = 256
TARGET: Final = 1.5
REPEATS: Final = 20
SERVED: Final = ServedLoad(
    shape=DEEPSEEK_V32_2X2048,
    held=16,
    concurrency=(1, 4, 16, 64, 256),
    context_tokens=16_223,
    answer_tokens=32,
    buffer_rows=768,
    page_tokens=PAGE_ROWS,
    chunk_tokens=2048,
    laps=3,
    host_times=1.25,
)
"""A top-k of 512 is a thirty-second of the context, as V3.2's of 65,536. Buffers of all 256, of one
and a half selections, fit beside each other in 16 requests' pages. The host has 15 GB for each of
three engines."""
SERVED_S: Final = 420.0
"""For all of them: ``make gpu`` ends a part after nine minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSwapInCase:
    """Medians of a step of ``LAYERS`` layers. ``ratio``: to the bare kernel."""

    batch: int
    swap_in_us: float
    bare_us: float
    ratio: float


def run_on(
    device: Device[Any], layers: int = LAYERS, load: ServedLoad = SERVED
) -> dict[str, object]:
    """Measure, and print tables; minutes."""
    at = device.at
    print(
        f"{MISSES} misses per request, {layers} layers, rows of {ROW_BYTES} bytes; at most {TARGET}"
    )
    print("batch  swap-in us  bare us  ratio")
    cases: list[GpuSwapInCase] = []
    for batch in BATCHES:
        cases.append(case := measure(at, batch, layers))
        print(f"{batch:5d}  {case.swap_in_us:10.0f}  {case.bare_us:7.0f}  {case.ratio:5.2f}")
    print(
        f"\nserved, contexts of {load.context_tokens:,}, device pages for {load.held} requests; "
        f"ratios are to resident\n{HEADER}"
    )
    served = throughput_cases(print_case, load, device, SERVED_S)
    if left_out := load.concurrency[len(served) :]:
        print(f"left out, for want of time: {', '.join(map(str, left_out))}")
    return {
        "device": str(at),
        "target_ratio": TARGET,
        "cases": [asdict(case) for case in cases],
        "served": [asdict(case) for case in served],
        "left_out": left_out,
    }


def measure(at: torch.device, batch: int, layers: int) -> GpuSwapInCase:
    on_gpu, rows = at.type == "cuda", PAGES * PAGE_ROWS
    size = rows * ROW_BYTES
    host = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu).fill_(1)
    there = torch.empty(size, dtype=torch.uint8, device=at)
    page = PAGE_ROWS * ROW_BYTES
    route = RowRoute(there.data_ptr(), host.data_ptr(), page, page, ROW_BYTES)
    random = np.random.default_rng(batch)
    picked = [random.choice(rows, (batch, MISSES), replace=False) for _ in range(2)]
    planned = room_of(torch.from_numpy(picked[0].astype(np.int64)).to(at), 1)
    for room, one in zip((planned.targets, planned.sources), picked, strict=True):
        room.copy_(torch.from_numpy(one.astype(np.int64)))
    planned.misses.fill_(MISSES)
    to, of = (
        torch.from_numpy(base + one.ravel() * ROW_BYTES).to(at)
        for base, one in zip((there.data_ptr(), host.data_ptr()), picked, strict=True)
    )
    sizes = torch.full((batch * MISSES,), ROW_BYTES, dtype=torch.int64, device=at)

    def swap_in() -> None:
        for _ in range(layers):
            launch_rows(route, planned, PAGE_ROWS)

    def bare() -> None:
        for _ in range(layers):
            launch_moves(to, of, sizes, largest=ROW_BYTES, wide=True)

    found = {work: _seconds(work, at) for work in (swap_in, bare)}
    assert bool((there.view(-1, ROW_BYTES)[torch.from_numpy(picked[0].ravel()).to(at)] == 1).all())
    return GpuSwapInCase(
        batch=batch,
        swap_in_us=found[swap_in] * 1e6,
        bare_us=found[bare] * 1e6,
        ratio=found[swap_in] / found[bare],
    )


def _seconds(work: Callable[[], None], at: torch.device) -> float:
    """Of what the device takes: captured as a graph, since a thread launches more slowly than small
    kernels end."""
    if at.type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    work()
    torch.cuda.synchronize(at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    laps: list[float] = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        laps.append(begin.elapsed_time(end) / 1000)
    return median(laps[1:])
