"""DeepSeek-V4-Flash in ``stratakv bench transfer``: three cache groups with nine sidecars.

Owns the measurement with the model's real sizes: copies of what a long prefix needs while layers
compute, the bytes that the cache itself moves for it, and what the host tier costs a prefill that
reuses nothing. Takes about 1 GiB beside the yardstick.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from transformers import DeepseekV4Config

from stratakv.bench.rig import Laps, first_token_s, in_turn
from stratakv.bench.transfer_case import TransferCase, TransferYardstick
from stratakv.core.ids import LayerId, PageIds, TokenIds
from stratakv.engine.huggingface.model_facts import plain_config
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.sim.accelerator import VOCABULARY, Accelerator, Simulated
from stratakv.spec.derive import spec_of
from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import needed, peak_pages
from stratakv.transfer.copier import Copier, CopyRoute
from stratakv.transfer.copy_plan import CopyPlan, Direction, GroupCopy, PageRows
from stratakv.transfer.cpu import DEFAULT_COPIER, CpuTransferEngine

PREFILL_TARGET: Final = 0.97
LAYERS: Final = 43
PAGE_TOKENS: Final = 256
PREFIX_TOKENS: Final = 16384
CHUNK_TOKENS: Final = 512
LAYER_S: Final = 0.8e-3
"""One layer of a chunk: 2 operations for each of 13e9 active parameters / 43 layers and each of 512
tokens, at 400e12 operations a second."""
SPARE_PAGES: Final = 4
"""More than a prefix needs, so that copies come from anywhere."""
REPEATS: Final = 7
PREFILLS: Final = 5
_POLL_S: Final = 0.0005


def v4_flash_spec(page_tokens: int = PAGE_TOKENS) -> CacheSpec:
    """From the published sizes: windows alone in the first two layers, then compressed by 4 and by
    128 in turn."""
    names = ("compressed_sparse_attention", "heavily_compressed_attention")
    types = ["sliding_attention"] * 2 + [names[layer % 2] for layer in range(2, LAYERS)]
    config = DeepseekV4Config(num_hidden_layers=LAYERS, layer_types=types)
    return spec_of(plain_config(config), page_tokens=page_tokens, dtype="bfloat16")


def needed_pages(spec: CacheSpec, end_tokens: int) -> list[int]:
    return [len(needed(g.retention, end_tokens, spec.page_tokens)) for g in spec.groups]


def whole_pages(spec: CacheSpec, end_tokens: int) -> list[int]:
    """Every page of the prefix, and one of a group whose page is a state."""
    pages = -(-end_tokens // spec.page_tokens)
    return [1 if group.stateful else pages for group in spec.groups]


def bytes_of(spec: CacheSpec, pages: Sequence[int]) -> int:
    return sum(n * group.page_bytes for n, group in zip(pages, spec.groups, strict=True))


# --- copies, with layers that compute meanwhile --------------------------------------------------


class _Timed:
    """A copier that notes when it was done last: nobody has to watch a load for its end."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self.done_s = 0.0

    def gather(self, route: CopyRoute, device: PageIds, host: PageIds) -> None:
        self._copier.gather(route, device, host)
        self.done_s = time.perf_counter()

    def scatter(self, route: CopyRoute, device: PageIds, host: PageIds) -> None:
        self._copier.scatter(route, device, host)
        self.done_s = time.perf_counter()

    def gather_rows(self, route: CopyRoute, device: PageRows, host: PageRows) -> None:
        self._copier.gather_rows(route, device, host)
        self.done_s = time.perf_counter()

    def scatter_rows(self, route: CopyRoute, device: PageRows, host: PageRows) -> None:
        self._copier.scatter_rows(route, device, host)
        self.done_s = time.perf_counter()


@dataclass(frozen=True, slots=True, eq=False)
class V4Copies:
    """Both tiers with room for one prefix, and the engine between them."""

    spec: CacheSpec
    pages: Sequence[int]
    engine: CpuTransferEngine
    timed: _Timed
    accelerator: Accelerator

    @classmethod
    def of(cls, spec: CacheSpec) -> "V4Copies":
        pages = needed_pages(spec, PREFIX_TOKENS)
        room = [count + SPARE_PAGES for count in pages]
        pools = DevicePools(spec, room)
        arenas = [HostArena(g, n) for g, n in zip(spec.groups, room, strict=True)]
        for group, arena in zip(spec.groups, arenas, strict=True):
            arena.bytes.fill(2)
            for buffer in group.buffers:
                pools.raw(group.id, buffer.name).fill(1)
        timed = _Timed(DEFAULT_COPIER)
        engine = CpuTransferEngine(spec, pools, arenas, timed)
        return cls(spec, pages, engine, timed, accelerator(spec))

    def ends(self, rng: np.random.Generator) -> tuple[GroupCopy, ...]:
        """What the prefix needs of every group, at pages anywhere."""
        return tuple(
            GroupCopy(group.id, *(_some(rng, count + SPARE_PAGES, count) for _ in range(2)))
            for group, count in zip(self.spec.groups, self.pages, strict=True)
        )

    def back_up(self, copies: tuple[GroupCopy, ...]) -> tuple[float, int]:
        """Seconds and bytes of one backup."""
        begin_s = time.perf_counter()
        self.engine.submit(CopyPlan(Direction.BACKUP, copies))
        return self._end(Direction.BACKUP, begin_s)

    def load(self, copies: tuple[GroupCopy, ...]) -> tuple[float, int]:
        """Seconds and bytes of one load, while a chunk is computed layer by layer behind it."""
        begin_s = time.perf_counter()
        ticket = self.engine.submit(CopyPlan(Direction.LOAD, copies))
        self.accelerator.run(self.engine.gate([ticket]), CHUNK_TOKENS)
        return self._end(Direction.LOAD, begin_s)

    def _end(self, direction: Direction, begin_s: float) -> tuple[float, int]:
        while not self.engine.ready(direction):
            time.sleep(_POLL_S)
        (done,) = self.engine.take(direction, 1)
        assert done.ok
        return self.timed.done_s - begin_s, done.bytes_moved


def accelerator(spec: CacheSpec) -> Accelerator:
    layers = {layer for group in spec.groups for buffer in group.buffers for layer in buffer.layers}
    return Accelerator([LayerId(layer) for layer in sorted(layers)], LAYER_S, CHUNK_TOKENS)


def measure_v4(yardstick: TransferYardstick) -> TransferCase:
    """The case of V4-Flash. ``bytes_moved`` is what the cache itself loaded for one prefix."""
    spec = v4_flash_spec()
    copies = V4Copies.of(spec)
    rng = np.random.default_rng(PREFIX_TOKENS)
    laps = Laps()
    plan_bytes = bytes_of(spec, copies.pages)
    try:
        for _ in range(REPEATS + 1):
            ends = copies.ends(rng)
            yardstick.time(laps)
            for name, move in (("d2h", copies.back_up), ("h2d", copies.load)):
                taken_s, moved = move(ends)
                assert moved == plan_bytes, f"{name}: {moved} of {plan_bytes} bytes"
                laps.add(name, taken_s)
    finally:
        copies.engine.close()
    segments = sum(
        count * len(buffer.layers)
        for count, group in zip(copies.pages, spec.groups, strict=True)
        for buffer in group.buffers
    )
    return TransferCase(
        spec=f"DeepSeek-V4-Flash, {LAYERS} layers, bfloat16, {PREFIX_TOKENS} tokens",
        page_tokens=spec.page_tokens,
        page_bytes=spec.groups[0].page_bytes,
        segment_bytes=plan_bytes // segments,
        **yardstick.rates(laps, plan_bytes),
        bytes_moved=loaded_bytes(spec),
        bytes_needed=plan_bytes,
        bytes_whole=bytes_of(spec, whole_pages(spec, PREFIX_TOKENS)),
    )


# --- what the cache moves, and what its backups cost ---------------------------------------------


def loaded_bytes(spec: CacheSpec) -> int:
    """Bytes that the cache loads for a prefix of ``PREFIX_TOKENS`` that only the host has."""
    simulated = _simulated(spec, host_prompts=3)
    first, *others = _prompts(3)
    try:
        for prompt in (first, *others):  # the device has no room for the first beside the others
            first_token_s(simulated.engine, prompt, (0, 0, 0))
        before = simulated.transfer.bytes_moved[Direction.LOAD]
        first_token_s(simulated.engine, first, (0, PREFIX_TOKENS, 0))
        return simulated.transfer.bytes_moved[Direction.LOAD] - before
    finally:
        simulated.close()


def prefill_host_on_ratio() -> float:
    """Tokens a second of a prefill that reuses nothing with the host tier on to those with it off:
    the median over pairs of runs, in turns."""
    spec = v4_flash_spec()
    sides = {host: _simulated(spec, host_prompts=host) for host in (0, 1)}
    laps = Laps()
    prompts = _prompts(2 * (PREFILLS + 1))
    try:
        for turn in range(PREFILLS + 1):
            for host in in_turn((0, 1), turn):
                taken_s = first_token_s(sides[host].engine, prompts.pop(), (0, 0, 0))
                laps.add("with" if host else "without", taken_s)
    finally:
        for side in sides.values():
            side.close()
    assert sides[1].transfer.bytes_moved[Direction.BACKUP] > 0, "nothing was backed up"
    return laps.ratio("without", "with")


def _simulated(spec: CacheSpec, host_prompts: int) -> Simulated:
    """Room for one prompt on the device, and for ``host_prompts`` on the host; none is no host."""
    longest = PREFIX_TOKENS + 2
    device = [
        peak_pages(group.retention, longest, CHUNK_TOKENS, spec.page_tokens)
        for group in spec.groups
    ]
    host = [host_prompts * count for count in device]
    return Simulated.of(spec, (device, host), accelerator(spec), longest)


def _prompts(count: int) -> list[TokenIds]:
    """One token more than a prefix, for there must be something to compute."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, PREFIX_TOKENS + 1, dtype=np.int32) for _ in range(count)]


def _some(rng: np.random.Generator, room: int, count: int) -> PageIds:
    return rng.permutation(room)[:count].astype(np.int32)
