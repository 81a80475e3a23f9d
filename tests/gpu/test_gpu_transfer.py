"""Copies on a real GPU's streams: the public suite, by each way of a copy, and random delays."""

from contextlib import ExitStack
from functools import cache
from random import Random

import numpy as np
import pytest
import torch

from stratakv.core.ids import GroupId, LayerId
from stratakv.engine.attention.torch_pools import TensorPools
from stratakv.engine.cuda.driver import TorchCuda, trial_memory
from stratakv.memory.host_arena import HostArena
from stratakv.testing.specs import small_spec
from stratakv.testing.transfer_conformance import TransferConformance
from stratakv.testing.transfer_ends import HookedCopier, finish
from stratakv.transfer.copy_paths import NEVER, PIECE_BYTES, CopyChoice, CopyPath
from stratakv.transfer.copy_plan import CopyPlan, Direction, GroupCopy
from stratakv.transfer.copy_trials import copy_trials
from stratakv.transfer.cuda import CudaStreams, CudaTransferEngine, PinOptions
from tests.fake_cuda import pool_arrays

AT = torch.device("cuda", 0)
CHUNK = PinOptions(chunk_bytes=8192)
BY_KERNEL = CopyChoice({Direction.LOAD: NEVER, Direction.BACKUP: NEVER}, CopyPath.KERNEL)
BY_ENGINE = CopyChoice({Direction.LOAD: 0, Direction.BACKUP: 0}, CopyPath.ENGINE)
MOST_CYCLES = 2_000_000
"""About a millisecond."""


@cache
def driver():
    return TorchCuda(AT)


class Mapped(CudaTransferEngine):
    """Its device pages are mapped host memory, which the suite can look into."""

    def __init__(self, spec, pools, arenas, before_copy, choice):
        self._undo = ExitStack()
        for one in pool_arrays(spec, pools):
            if one.nbytes:
                driver().register(one.ctypes.data, one.nbytes)
                self._undo.callback(driver().unregister, one.ctypes.data)
        streams = CudaStreams.of(driver(), choice)
        super().__init__(
            spec, pools, arenas, streams, CHUNK, lambda copier: HookedCopier(copier, before_copy)
        )

    def close(self):
        super().close()
        self._undo.close()


class TestByKernel(TransferConformance):
    choice = BY_KERNEL

    def engine(self, spec, pools, arenas, before_copy):
        return Mapped(spec, pools, arenas, before_copy, self.choice)


class TestByCopyEngine(TestByKernel):
    choice = BY_ENGINE


def test_both_ways_bring_the_bytes_and_one_is_chosen(summary):
    found = copy_trials(driver().stream(urgent=False), trial_memory(AT))
    assert all(one.seconds is not None for one in found)
    assert {one.piece_bytes for one in found} == set(PIECE_BYTES)
    summary(f"copies on {torch.cuda.get_device_name(AT)}: {CopyChoice.of(found)}")


@pytest.mark.parametrize("choice", [BY_KERNEL, BY_ENGINE], ids=["kernel", "copy engine"])
def test_pages_are_whole_under_random_delays(choice):
    """A step that is late writes a page; its backup comes after it, a load after that, and the next
    step reads what came."""
    random, spec = Random(1), small_spec([], page_tokens=4)
    pools, arenas = TensorPools(spec, [16], AT), [HostArena(spec.groups[0], 16)]
    streams = CudaStreams.of(driver(), choice)
    engine = CudaTransferEngine(spec, pools, arenas, streams, CHUNK)
    streams.compute.enter()  # this thread computes
    layer = pools.layer(GroupId(0), "rows", LayerId(0)).view(torch.uint8).flatten(1)
    for turn in range(200):
        page, host, landing = (np.array([random.randrange(16)], np.int32) for _ in range(3))
        torch.cuda._sleep(random.randrange(MOST_CYCLES))
        layer[page[0]] = turn % 251
        copy = GroupCopy(GroupId(0), page, host)
        saved = engine.submit(CopyPlan(Direction.BACKUP, (copy,), after=streams.compute.mark()))
        engine.gate([saved]).wait(LayerId(0))  # holds the stream alone
        torch.cuda._sleep(random.randrange(MOST_CYCLES))
        layer[page[0]] = 255
        finish(engine, Direction.BACKUP, 1)
        copy = GroupCopy(GroupId(0), landing, host)
        loaded = engine.submit(CopyPlan(Direction.LOAD, (copy,), after=streams.compute.mark()))
        engine.gate([loaded]).wait(LayerId(0))
        read = layer[landing[0]].clone()
        finish(engine, Direction.LOAD, 1)
        assert set(read.tolist()) == {turn % 251}, turn
    engine.close()
