"""Rows of host pages for a step on a GPU, over a driver that is late at random."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from stratakv.core.ids import GroupId
from stratakv.testing.compute_queue import ManualFence
from stratakv.testing.patience import PATIENCE_S, wait_until
from stratakv.testing.specs import small_spec
from stratakv.testing.transfer_ends import BackgroundSteps, TransferEnds, page_keys_of, spread
from stratakv.transfer.cuda import CudaStreams, CudaTransferEngine, PinOptions
from stratakv.transfer.cuda_host_rows import CudaHostRows
from tests.fake_cuda import BOTH_WAYS, FakeCuda, pool_arrays

ANCHOR = GroupId(0)


@contextmanager
def on_a_gpu(**driver):
    """Ends, driver, streams, rows of the anchor group; in small chunks."""
    ends = TransferEnds.of(small_spec([], page_tokens=4), pages=64)
    cuda = FakeCuda(device=pool_arrays(ends.spec, ends.pools), **driver)
    cuda.let.clear()
    streams = CudaStreams.of(cuda, BOTH_WAYS)
    engine = CudaTransferEngine(
        ends.spec, ends.pools, ends.arenas, streams, PinOptions(chunk_bytes=1)
    )
    wait = engine.pinning.wait
    rows = CudaHostRows(ANCHOR, ends.pools, ends.arenas, streams.swaps, wait)
    try:
        yield ends, cuda, streams, rows
    finally:
        cuda.let.set()
        engine.close()
        cuda.close()


def test_addresses_are_given_out_when_every_host_page_is_pinned():
    with on_a_gpu() as (ends, cuda, _, rows):
        arena, seen = ends.arenas[ANCHOR], []
        layer = arena.group.buffers[0].layers[0]

        def ask():
            rows.route(layer)
            seen.append(cuda.whole(arena.bytes.ctypes.data, arena.size_bytes))

        asked = BackgroundSteps(ask)
        assert not asked.done_within(0.02)
        cuda.let.set()
        assert asked.done_within(PATIENCE_S)
        assert seen == [True]


def test_no_address_is_given_out_where_memory_cannot_be_pinned():
    with on_a_gpu(refused=0) as (ends, cuda, _, rows):
        cuda.let.set()
        with pytest.raises(RuntimeError, match="not pinned"):
            rows.route(ends.arenas[ANCHOR].group.buffers[0].layers[0])


def test_pages_come_between_what_is_launched_before_and_after():
    with on_a_gpu() as (ends, cuda, streams, rows):
        cuda.let.set()
        keys, pages = page_keys_of("swap", 3), spread(ends, 3, 1)
        ends.fill_host(pages, keys)
        ends.poison_device()
        compute, held, seen = cuda.streams[0], ManualFence(), []
        compute.queue.launch(held.wait)
        layers = ends.arenas[ANCHOR].group.buffers[0].layers
        here = np.asarray(pages[ANCHOR], np.int32)
        with ThreadPoolExecutor(1, "compute", streams.compute.enter) as thread:
            for layer in layers:
                thread.submit(rows.load_pages, layer, here, here).result(PATIENCE_S)
            compute.queue.launch(lambda: seen.append(ends.verify_device(pages, keys, layers)))
            assert seen == []
            held.open()
            wait_until(lambda: seen, "what is launched next")
