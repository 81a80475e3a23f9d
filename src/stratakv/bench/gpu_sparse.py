"""``stratakv bench sparse --device cuda``: missing rows from pinned host memory in a decode step.

Owns the measurement: rows of DeepSeek-V3.2's size for a whole batch and all layers, by the kernel
of the swap-in, beside a bare one that is given the addresses of the same rows.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Final

import numpy as np
import torch

from stratakv.assembly.device import Device
from stratakv.engine.torch_pools import TensorPools
from stratakv.engine.triton_swap_ins import room_of
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSwapInCase:
    """Medians of a step of ``LAYERS`` layers. ``ratio``: to the bare kernel."""

    batch: int
    swap_in_us: float
    bare_us: float
    ratio: float


def run_on(device: Device[TensorPools], layers: int = LAYERS) -> dict[str, object]:
    """Measure, and print a table; seconds."""
    at = device.at
    print(
        f"{MISSES} misses per request, {layers} layers, rows of {ROW_BYTES} bytes; at most {TARGET}"
    )
    print("batch  swap-in us  bare us  ratio")
    cases: list[GpuSwapInCase] = []
    for batch in BATCHES:
        cases.append(case := measure(at, batch, layers))
        print(f"{batch:5d}  {case.swap_in_us:10.0f}  {case.bare_us:7.0f}  {case.ratio:5.2f}")
    return {"device": str(at), "target_ratio": TARGET, "cases": [asdict(c) for c in cases]}


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
