"""``stratakv bench transfer``: pages between device pools and host arena against a plain copy.

Owns the measurement. Everything goes through ``CpuTransferEngine``: queue, worker threads, loads
layer by layer. The yardstick is single-threaded ``torch.Tensor.copy_`` of 512 MiB, interleaved with
the measured runs so that a busy machine slows both. Takes about 2 GiB.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import torch

from stratakv.core.ids import GroupId, LayerId
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll
from stratakv.transfer.cpu import DEFAULT_COPIER, CpuTransferEngine
from stratakv.transfer.plan import CopyPlan, Direction, GroupCopy

TARGET_RATIO: Final = 0.7
_KIB: Final = 1 << 10
_COPY_BYTES: Final = 512 << 20
_TIER_BYTES: Final = 256 << 20
_PLAN_BYTES: Final = 128 << 20
_REPEATS: Final = 7
_POLL_S: Final = 0.0005
"""Under 2% of a plan, and rare enough not to take the worker's core."""
_SHAPES: Final = tuple(
    (page_tokens, page_kib * _KIB, segment_kib * _KIB)
    for page_tokens, page_kib in ((16, 256), (64, 1024))
    for segment_kib in (2, 8, 32)
)
"""(tokens, bytes) of a page, bytes of one layer of one buffer in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Medians; a ratio is that of the medians. GB are 10^9 bytes."""

    spec: str
    page_tokens: int
    page_bytes: int
    segment_bytes: int
    d2h_ratio: float
    h2d_ratio: float
    d2h_gb_s: float
    h2d_gb_s: float
    copy_gb_s: float


def run(json_path: str | None) -> dict[str, object]:
    """Measure every shape, print a table, write the JSON to ``json_path`` if given; ~20 s."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        source, target = _touched(_COPY_BYTES), _touched(_COPY_BYTES)
        cases = [_measure(*shape, lambda: target.copy_(source)) for shape in _SHAPES]
    finally:
        torch.set_num_threads(threads)
    copier = type(DEFAULT_COPIER).__name__
    _print_table(cases, copier)
    report: dict[str, object] = {
        "copier": copier,
        "target_ratio": TARGET_RATIO,
        "cases": [asdict(case) for case in cases],
    }
    if json_path is not None:
        Path(json_path).write_text(json.dumps(report, indent=2) + "\n")
    return report


def _print_table(cases: Sequence[Case], copier: str) -> None:
    print(f"device <-> host through CpuTransferEngine ({copier}); ratio to copy_ of 512 MiB")
    print("page KiB  segment KiB  d2h GB/s  h2d GB/s  copy GB/s  d2h ratio  h2d ratio")
    for case in cases:
        print(
            f"{case.page_bytes // _KIB:8d}  {case.segment_bytes // _KIB:11d}"
            f"  {case.d2h_gb_s:8.2f}  {case.h2d_gb_s:8.2f}  {case.copy_gb_s:9.2f}"
            f"  {case.d2h_ratio:9.2f}  {case.h2d_ratio:9.2f}"
        )


def _measure(
    page_tokens: int, page_bytes: int, segment_bytes: int, copy: Callable[[], object]
) -> Case:
    spec = _spec(page_tokens, page_bytes, segment_bytes)
    pages = _TIER_BYTES // page_bytes
    pools = DevicePools(spec, [pages], torch.device("cpu"))
    arena = HostArena(spec.groups[0], pages)
    for buffer in spec.groups[0].buffers:
        pools.raw(GroupId(0), buffer.name).fill_(1)
    arena.bytes.fill_(2)
    layers = page_bytes // segment_bytes // 2
    engine = CpuTransferEngine(spec, pools, [arena])
    rng = np.random.default_rng(page_bytes + segment_bytes)
    seconds: dict[str, list[float]] = {"copy": [], "d2h": [], "h2d": []}
    for _ in range(_REPEATS + 1):
        count = _PLAN_BYTES // page_bytes
        device, host = (rng.permutation(pages)[:count].astype(np.int32) for _ in range(2))
        seconds["copy"].append(_seconds(copy))
        pair = GroupCopy(GroupId(0), device, host)
        seconds["d2h"].append(_seconds(partial(_move, engine, Direction.BACKUP, pair)))
        seconds["h2d"].append(_seconds(partial(_move, engine, Direction.LOAD, pair)))
    engine.close()
    # The first round warms the caches, the clock and the branch predictors.
    copy_s, d2h_s, h2d_s = (median(seconds[name][1:]) for name in ("copy", "d2h", "h2d"))
    copy_gb_s, d2h_gb_s, h2d_gb_s = (
        size / taken_s / 1e9
        for size, taken_s in ((_COPY_BYTES, copy_s), (_PLAN_BYTES, d2h_s), (_PLAN_BYTES, h2d_s))
    )
    return Case(
        spec=f"{layers} layers x (k, v), bfloat16",
        page_tokens=page_tokens,
        page_bytes=page_bytes,
        segment_bytes=segment_bytes,
        d2h_ratio=d2h_gb_s / copy_gb_s,
        h2d_ratio=h2d_gb_s / copy_gb_s,
        d2h_gb_s=d2h_gb_s,
        h2d_gb_s=h2d_gb_s,
        copy_gb_s=copy_gb_s,
    )


def _move(engine: CpuTransferEngine, direction: Direction, copy: GroupCopy) -> None:
    """One plan, submitted and taken. Nobody stands at the gates, which open all the same: waking a
    reader for each of 256 layers would measure how busy the machine's cores are."""
    engine.submit(CopyPlan(direction, (copy,)))
    while not engine.ready(direction):
        time.sleep(_POLL_S)
    (done,) = engine.take(direction, 1)
    assert done.ok


def _spec(page_tokens: int, page_bytes: int, segment_bytes: int) -> CacheSpec:
    layers = tuple(LayerId(layer) for layer in range(page_bytes // segment_bytes // 2))
    elements = segment_bytes // page_tokens // 2
    buffers = tuple(
        BufferSpec(
            name=name,
            layers=layers,
            rows_per_page=page_tokens,
            row_shape=(elements,),
            dtype="bfloat16",
        )
        for name in ("k", "v")
    )
    group = CacheGroup(id=GroupId(0), name="full", retention=KeepAll(), buffers=buffers)
    return CacheSpec(page_tokens=page_tokens, groups=(group,))


def _touched(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8).fill_(1)


def _seconds(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s
