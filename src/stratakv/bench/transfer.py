"""``stratakv bench transfer``: pages between device pools and host arena against a plain copy.

Owns the measurement with uniform layers; a model with several groups is ``transfer_v4``'s.
Everything goes through ``CpuTransferEngine``: queue, worker threads, loads layer by layer. The
yardstick is single-threaded ``torch.Tensor.copy_`` of 512 MiB, interleaved with the measured runs
so that a busy machine slows both. Takes about 2 GiB.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Final

import numpy as np

from stratakv.assembly.devices import device_of
from stratakv.bench.gpu_transfer import run_on
from stratakv.bench.rig import Laps, one_thread
from stratakv.bench.transfer_case import TransferCase, TransferYardstick
from stratakv.bench.transfer_v4 import PREFILL_TARGET, measure_v4, prefill_host_on_ratio
from stratakv.core.config import EngineConfig
from stratakv.core.ids import GroupId, LayerId
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll
from stratakv.transfer.copy_plan import CopyPlan, Direction, GroupCopy
from stratakv.transfer.cpu import DEFAULT_COPIER, CpuTransferEngine

TARGET_RATIO: Final = 0.85
_KIB: Final = 1 << 10
COPY_BYTES: Final = 512 << 20
TIER_BYTES: Final = 256 << 20
PLAN_BYTES: Final = 128 << 20
REPEATS: Final = 7
_POLL_S: Final = 0.0005
"""Under 2% of a plan, and rare enough not to take the worker's core."""
_SHAPES: Final = tuple(
    (page_tokens, page_kib * _KIB, segment_kib * _KIB)
    for page_tokens, page_kib in ((16, 256), (64, 1024))
    for segment_kib in (2, 8, 32)
)
"""(tokens, bytes) of a page, bytes of one layer of one buffer in it."""


def run(*, device: str = "cpu") -> dict[str, object]:
    """Measure every shape, and print a table; ~40 s. ``device``: cuda has shapes of its own."""
    if device != "cpu":
        return run_on(device_of(EngineConfig(device=device)))
    with one_thread():
        yardstick = TransferYardstick.of(COPY_BYTES)
        cases = [_measure(*shape, yardstick) for shape in _SHAPES]
        cases.append(measure_v4(yardstick))
        del yardstick
        prefill_ratio = prefill_host_on_ratio()
    copier = type(DEFAULT_COPIER).__name__
    _print_table(cases, copier)
    _print_prefix(cases[-1], prefill_ratio)
    return {
        "copier": copier,
        "target_ratio": TARGET_RATIO,
        "cases": [asdict(case) for case in cases],
        "prefill_target_ratio": PREFILL_TARGET,
        "prefill_host_on_ratio": prefill_ratio,
    }


def _print_table(cases: Sequence[TransferCase], copier: str) -> None:
    print(f"device <-> host through CpuTransferEngine ({copier}); ratio to copy_ of 512 MiB")
    print("page KiB  segment KiB  d2h GB/s  h2d GB/s  copy GB/s  d2h ratio  h2d ratio")
    for case in cases:
        print(
            f"{case.page_bytes // _KIB:8d}  {case.segment_bytes // _KIB:11d}"
            f"  {case.d2h_gb_s:8.2f}  {case.h2d_gb_s:8.2f}  {case.copy_gb_s:9.2f}"
            f"  {case.d2h_ratio:9.2f}  {case.h2d_ratio:9.2f}"
        )


def _print_prefix(case: TransferCase, prefill_ratio: float) -> None:
    mib = 1 << 20
    print(f"last row: {case.spec}")
    print(
        f"  loaded {case.bytes_moved / mib:.1f} MiB, needed {case.bytes_needed / mib:.1f} MiB, "
        f"all pages of every pool {case.bytes_whole / mib:.1f} MiB"
    )
    print(f"  prefill without reuse, host tier on to off: {prefill_ratio:.3f} of its speed")


def _measure(
    page_tokens: int, page_bytes: int, segment_bytes: int, yardstick: TransferYardstick
) -> TransferCase:
    spec = uniform_spec(page_tokens, page_bytes, segment_bytes)
    pages = TIER_BYTES // page_bytes
    pools = DevicePools(spec, [pages])
    arena = HostArena(spec.groups[0], pages)
    for buffer in spec.groups[0].buffers:
        pools.raw(GroupId(0), buffer.name).fill(1)
    arena.bytes.fill(2)
    layers = page_bytes // segment_bytes // 2
    engine = CpuTransferEngine(spec, pools, [arena])
    rng = np.random.default_rng(page_bytes + segment_bytes)
    laps = Laps()
    for _ in range(REPEATS + 1):
        count = PLAN_BYTES // page_bytes
        device, host = (rng.permutation(pages)[:count].astype(np.int32) for _ in range(2))
        yardstick.time(laps)
        pair = GroupCopy(GroupId(0), device, host)
        laps.time("d2h", partial(move, engine, Direction.BACKUP, pair, page_bytes))
        laps.time("h2d", partial(move, engine, Direction.LOAD, pair, page_bytes))
    engine.close()
    moved_bytes = PLAN_BYTES // page_bytes * page_bytes
    return TransferCase(
        spec=f"{layers} layers x (k, v), bfloat16",
        page_tokens=page_tokens,
        page_bytes=page_bytes,
        segment_bytes=segment_bytes,
        **yardstick.rates(laps, moved_bytes),
        # One group that keeps all: what is moved is what is needed, and is everything.
        bytes_moved=moved_bytes,
        bytes_needed=moved_bytes,
        bytes_whole=moved_bytes,
    )


def move(engine: CpuTransferEngine, direction: Direction, copy: GroupCopy, page_bytes: int) -> None:
    """One plan, submitted and taken. Nobody stands at the gates, which open all the same: waking a
    reader for each of 256 layers would measure how busy the machine's cores are."""
    engine.submit(CopyPlan(direction, (copy,)))
    while not engine.ready(direction):
        time.sleep(_POLL_S)
    (done,) = engine.take(direction, 1)
    assert done.ok
    assert done.bytes_moved == len(copy.device) * page_bytes


def uniform_spec(page_tokens: int, page_bytes: int, segment_bytes: int) -> CacheSpec:
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
