"""An engine whose forward computes nothing and takes the time of one that does.

Owns the simulated device. Pages, copies, gates and every decision are the production's; only the
layers' arithmetic is not there. The thread sleeps while the device would compute, as it does beside
a real one.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from stratakv.assembly.build import MappedMemory, build
from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.sizing import Sizes
from stratakv.core.config import EngineConfig
from stratakv.core.ids import LayerId
from stratakv.engine.batch import StepBatch
from stratakv.engine.forward import Forward
from stratakv.engine.loop import Engine
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.spec.groups import CacheSpec
from stratakv.transfer.copy_plan import Direction
from stratakv.transfer.cpu import CpuTransferEngine
from stratakv.transfer.engine import Completion, LayerGate

VOCABULARY: Final = 64


class Accelerator:
    """A forward of ``layers`` layers, each of which waits for its gate and then takes ``layer_s``
    for ``chunk_tokens`` tokens, in proportion for more or fewer. Token 0, always."""

    def __init__(self, layers: Sequence[LayerId], layer_s: float, chunk_tokens: int) -> None:
        self._layers = layers
        self._token_s = layer_s / chunk_tokens

    def forward(self, batch: StepBatch) -> Forward:
        self.run(batch.gate, len(batch.tokens))
        return Forward.of_numbers(torch.zeros(int(batch.sampled.sum()), VOCABULARY), batch)

    def run(self, gate: LayerGate | None, tokens: int) -> None:
        """The device is at work until ``done_s``, whenever this thread wakes up: what a thread
        oversleeps is not added layer by layer."""
        done_s = time.perf_counter()
        for layer in self._layers:
            if gate is not None:
                gate.wait(layer)
                done_s = max(done_s, time.perf_counter())
            done_s += tokens * self._token_s
            if gate is not None:
                _sleep_until(done_s)
        _sleep_until(done_s)


class CountingTransfer(CpuTransferEngine):
    """Knows how many bytes it has moved in each direction."""

    def __init__(
        self, spec: CacheSpec, device_pools: DevicePools, arenas: Sequence[HostArena]
    ) -> None:
        super().__init__(spec, device_pools, arenas)
        self.bytes_moved = dict.fromkeys(Direction, 0)

    def take(self, direction: Direction, count: int) -> list[Completion]:
        taken = super().take(direction, count)
        self.bytes_moved[direction] += sum(done.bytes_moved for done in taken)
        return taken


@dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """An engine beside an ``Accelerator``."""

    engine: Engine
    transfer: CountingTransfer

    @classmethod
    def of(
        cls,
        spec: CacheSpec,
        pages: tuple[Sequence[int], Sequence[int]],
        accelerator: Accelerator,
        longest_tokens: int,
    ) -> "Simulated":
        """For one request at a time of at most ``longest_tokens``. ``pages``: per group, on the
        device and on the host, which is off where it has none."""
        config = EngineConfig(max_running=1, reserve_tokens=1)
        plan = EnginePlan.of(config, Sizes.of(spec, *pages, longest_tokens), b"bench")
        memory = MappedMemory.of(plan, DevicePools, CountingTransfer)
        for group in spec.groups:  # memory is there before the clock runs
            for buffer in group.buffers:
                memory.pools.raw(group.id, buffer.name).fill(1)
            memory.arenas[group.id].bytes.fill(2)
        engine, _ = build(plan, memory, lambda _: accelerator)
        return cls(engine, memory.transfer)

    def close(self) -> None:
        self.engine.close()
        self.transfer.close()


def _sleep_until(moment_s: float) -> None:
    left_s = moment_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
