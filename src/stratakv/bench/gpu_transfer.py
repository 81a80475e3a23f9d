"""``stratakv bench transfer --device cuda``: pages of two models between a GPU and pinned memory.

Owns the measurement; the yardstick is one large copy of pinned memory in the same direction and
run, interleaved with what is measured. Everything goes through the device's own transfer engine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from stratakv.assembly.device import Device
from stratakv.bench.rig import Laps
from stratakv.bench.transfer_v4 import v4_flash_spec
from stratakv.core.ids import GroupId, LayerId
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll
from stratakv.transfer.copy_plan import CopyPlan, Direction, GroupCopy
from stratakv.transfer.engine import TransferEngine

TARGET: Final = 0.9
COPY_BYTES: Final = 512 << 20
PLAN_BYTES: Final = 512 << 20
PAGE_TOKENS: Final = 64
V4_PAGE_TOKENS: Final = 128
"""The least: it compresses so many to a row."""
REPEATS: Final = 9
_POLL_S: Final = 0.00005


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTransferCase:
    """Medians; GB are 10^9 bytes. ``*_ratio``: to one large pinned copy of that direction."""

    model: str
    page_tokens: int
    bytes_moved: int
    d2h_gb_s: float
    h2d_gb_s: float
    d2h_ratio: float
    h2d_ratio: float


def llama_8b_spec(page_tokens: int = PAGE_TOKENS) -> CacheSpec:
    """32 layers of 8 key heads of 128 dims, bfloat16: 8 MiB a page of 64 tokens."""
    layers = tuple(LayerId(layer) for layer in range(32))
    buffers = tuple(
        BufferSpec(
            name=name, layers=layers, rows_per_page=page_tokens, row_shape=(8, 128),
            dtype="bfloat16",
        )
        for name in ("k", "v")
    )  # fmt: skip
    group = CacheGroup(id=GroupId(0), name="full", retention=KeepAll(), buffers=buffers)
    return CacheSpec(page_tokens=page_tokens, groups=(group,))


def run_on(
    device: Device[Any],
    specs: Sequence[tuple[str, CacheSpec]] | None = None,
    plan_bytes: int = PLAN_BYTES,
    copy_bytes: int = COPY_BYTES,
) -> dict[str, object]:
    """Measure, and print a table; about a minute on a GPU."""
    if specs is None:
        specs = (
            ("llama 8B", llama_8b_spec()),
            ("DeepSeek-V4-Flash", v4_flash_spec(V4_PAGE_TOKENS)),
        )
    large = LargeCopy(device.at, copy_bytes)
    print(f"{device.at} <-> pinned memory; ratio to one pinned copy, at least {TARGET}")
    print("model              d2h GB/s  h2d GB/s  d2h ratio  h2d ratio")
    cases: list[GpuTransferCase] = []
    for name, spec in specs:
        cases.append(case := measure(device, name, spec, large, plan_bytes))
        print(
            f"{name:17s}  {case.d2h_gb_s:8.2f}  {case.h2d_gb_s:8.2f}  {case.d2h_ratio:9.2f}"
            f"  {case.h2d_ratio:9.2f}",
            flush=True,
        )
    return {"device": str(device.at), "target_ratio": TARGET, "cases": [asdict(c) for c in cases]}


class LargeCopy:
    """One copy each way between the device and memory that is pinned, where there is a GPU."""

    def __init__(self, at: torch.device, size_bytes: int) -> None:
        pinned = at.type == "cuda"
        self.size_bytes = size_bytes
        self._host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned).fill_(1)
        self._device = torch.empty(size_bytes, dtype=torch.uint8, device=at).fill_(2)
        self._wait: Callable[[], None] = partial(torch.cuda.synchronize, at) if pinned else _nothing

    def time(self, laps: Laps) -> None:
        laps.time("copy d2h", partial(self._copy, self._host, self._device))
        laps.time("copy h2d", partial(self._copy, self._device, self._host))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        self._wait()


def _nothing() -> None:
    pass


def measure(
    device: Device[Any], name: str, spec: CacheSpec, large: LargeCopy, plan_bytes: int
) -> GpuTransferCase:
    pages = [max(2, plan_bytes // len(spec.groups) // max(1, g.page_bytes)) for g in spec.groups]
    pools = device.pools(spec, pages)
    arenas = [device.arenas(group, count) for group, count in zip(spec.groups, pages, strict=True)]
    engine = device.transfer(spec, pools, arenas)
    random, laps = np.random.default_rng(0), Laps()
    moved = sum(count * group.page_bytes for count, group in zip(pages, spec.groups, strict=True))
    for _ in range(REPEATS + 1):
        copies = tuple(
            GroupCopy(group.id, *(random.permutation(count).astype(np.int32) for _ in "dh"))
            for group, count in zip(spec.groups, pages, strict=True)
        )
        large.time(laps)
        laps.time("d2h", partial(_move, engine, CopyPlan(Direction.BACKUP, copies)))
        laps.time("h2d", partial(_move, engine, CopyPlan(Direction.LOAD, copies)))
    engine.close()
    rates = {way: moved / laps.median_s(way) / 1e9 for way in ("d2h", "h2d")}
    whole = {way: large.size_bytes / laps.median_s(f"copy {way}") / 1e9 for way in rates}
    return GpuTransferCase(
        model=name,
        page_tokens=spec.page_tokens,
        bytes_moved=moved,
        d2h_gb_s=rates["d2h"],
        h2d_gb_s=rates["h2d"],
        d2h_ratio=rates["d2h"] / whole["d2h"],
        h2d_ratio=rates["h2d"] / whole["h2d"],
    )


def _move(engine: TransferEngine, plan: CopyPlan) -> None:
    engine.submit(plan)
    while not engine.ready(plan.direction):
        time.sleep(_POLL_S)
    (done,) = engine.take(plan.direction, 1)
    assert done.ok
