"""The transfer engine of a GPU passes the public suite, over a driver that is late at random."""

import pytest

from stratakv.testing.transfer_conformance import TransferConformance
from stratakv.testing.transfer_ends import HookedCopier
from stratakv.transfer.cuda import CudaStreams, CudaTransferEngine, PinOptions
from tests.fake_cuda import BOTH_WAYS, BY_TRITON, PATHS, FakeCuda, pool_arrays

CHUNK_BYTES = 8192
"""Small ones: copies come while memory is still being pinned."""


class Closing(CudaTransferEngine):
    """Whatever the driver has refused is an error when the engine closes."""

    def __init__(self, spec, pools, arenas, before_copy, driver):
        self._driver = driver
        super().__init__(
            spec,
            pools,
            arenas,
            CudaStreams.of(driver, BOTH_WAYS),
            PinOptions(chunk_bytes=CHUNK_BYTES),
            hooked=lambda copier: HookedCopier(copier, before_copy),
        )

    def close(self):
        super().close()
        assert not self._driver.registered, "host memory stays pinned"
        self._driver.close()


class TestCudaCopies(TransferConformance):
    paths = PATHS

    def engine(self, spec, pools, arenas, before_copy):
        driver = FakeCuda(seed=len(arenas), device=pool_arrays(spec, pools), paths=self.paths)
        return Closing(spec, pools, arenas, before_copy, driver)


@pytest.mark.long
class TestKernelCopies(TestCudaCopies):
    """The same with small pieces by Triton's interpreter."""

    paths = BY_TRITON


class Suite(TestCudaCopies):
    pass


BUGS = {
    "a stream does not wait for its fence": (
        Suite.test_a_load_writes_nothing_before_the_work_that_it_comes_after,
        "stratakv.transfer.cuda.CudaCopyStream.after",
        lambda self, fence: None,
    ),
    "a gate holds nobody": (
        Suite.test_no_reader_sees_a_torn_page,
        "stratakv.transfer.cuda.EventFence.wait",
        lambda self: None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_order_is_caught(bug, monkeypatch):
    test, place, wrong = BUGS[bug]
    monkeypatch.setattr(place, wrong)
    with pytest.raises(AssertionError):
        test(Suite())
