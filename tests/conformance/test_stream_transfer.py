"""Copies on streams pass the public suite, on streams that are late at random."""

import pytest

from stratakv.testing.transfer_conformance import TransferConformance
from stratakv.testing.transfer_ends import HookedCopier
from stratakv.transfer.cpu import CpuTransferEngine
from tests.simulated_streams import SimulatedStreams, by_kernel


class TestStreamCopies(TransferConformance):
    def engine(self, spec, pools, arenas, before_copy):
        copier = SimulatedStreams().copier
        return CpuTransferEngine(spec, pools, arenas, HookedCopier(copier, before_copy), copier)


@pytest.mark.long
class TestKernelCopies(TransferConformance):
    """The same by Triton's interpreter."""

    def engine(self, spec, pools, arenas, before_copy):
        copier = SimulatedStreams(path=by_kernel).copier
        return CpuTransferEngine(spec, pools, arenas, HookedCopier(copier, before_copy), copier)


class Suite(TransferConformance):
    """``broken``: how an engine's copier is made from a right one."""

    def __init__(self, broken):
        self.broken = broken

    def engine(self, spec, pools, arenas, before_copy):
        copier = SimulatedStreams().copier
        return CpuTransferEngine(
            spec, pools, arenas, HookedCopier(copier, before_copy), self.broken(copier)
        )


class ComesAfterNothing:
    def __init__(self, order):
        self.order = order

    def after(self, direction, fence):
        pass

    def mark(self, direction):
        return self.order.mark(direction)


BUGS = {
    "a load comes too early": (
        ComesAfterNothing, Suite.test_a_load_writes_nothing_before_the_work_that_it_comes_after,
    ),
    "a backup comes too early": (
        ComesAfterNothing, Suite.test_a_backup_reads_nothing_before_the_work_that_it_comes_after,
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_order_is_caught(bug):
    broken, test = BUGS[bug]
    test(Suite(lambda order: order))
    with pytest.raises(AssertionError):
        test(Suite(broken))


def test_a_round_trip_by_the_kernel():
    TestKernelCopies().test_one_plan_merges_many_copies_of_the_same_groups()
