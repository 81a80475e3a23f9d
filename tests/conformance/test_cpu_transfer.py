"""The CPU transfer engine passes the public suite, and the suite has teeth."""

import time
from dataclasses import replace

import pytest

from stratakv.testing.transfer_conformance import TransferConformance
from stratakv.testing.transfer_ends import HookedCopier
from stratakv.transfer.copy_plan import NOTHING_LAUNCHED, CopyPlan, Direction
from stratakv.transfer.cpu import CpuTransferEngine
from stratakv.transfer.numpy_copy import NumpyCopier


class TestCompiledCopies(TransferConformance):
    def engine(self, spec, pools, arenas, before_copy):
        # An installation without a compiler has no such module.
        module = pytest.importorskip("stratakv.transfer.compiled_copy", exc_type=ImportError)
        copier = HookedCopier(module.CompiledCopier(), before_copy)
        return CpuTransferEngine(spec, pools, arenas, copier)


class TestNumpyCopies(TransferConformance):
    def engine(self, spec, pools, arenas, before_copy):
        return CpuTransferEngine(spec, pools, arenas, HookedCopier(NumpyCopier(), before_copy))


class SkipsLastLayer(NumpyCopier):
    def gather(self, route, device, host):
        super().gather(cut(route, slice(0, -1)), device, host)


class OffByOneHostPage(NumpyCopier):
    def gather(self, route, device, host):
        super().gather(route, device, (host + 1) % route.arena.shape[0])


class SwapsTwoPages(NumpyCopier):
    def scatter(self, route, device, host):
        super().scatter(route, device, host[::-1].copy())


class SwapsSidecars(NumpyCopier):
    """Keys land as values: every byte is moved, and comes back, but lies in the wrong place."""

    def gather(self, route, device, host):
        super().gather(swapped(route), device, host)

    def scatter(self, route, device, host):
        super().scatter(swapped(route), device, host)


class MovesThePrefixTwice(NumpyCopier):
    """A stale page: the first device page of a plan goes everywhere."""

    def gather(self, route, device, host):
        super().gather(route, device[:1].repeat(len(device)), host)


class ForgetsTheLastByte(NumpyCopier):
    def scatter(self, route, device, host):
        last = route.device[-1][:, -1]
        before = last.copy()
        super().scatter(route, device, host)
        last[:] = before


class LagsOneLayer(NumpyCopier):
    """Gates open one layer before their bytes; all bytes arrive in the end but the last."""

    def __init__(self):
        self.late = lambda: None

    def scatter(self, route, device, host):
        self.late()
        self.late = lambda: super(LagsOneLayer, self).scatter(route, device, host)


class BrokenEngine(CpuTransferEngine):
    """Seeds bugs that no copier can have."""

    def __init__(self, spec, pools, arenas, before_copy):
        super().__init__(spec, pools, arenas, HookedCopier(NumpyCopier(), before_copy))


class TakesNewestFirst(BrokenEngine):
    def take(self, direction, count):
        return super().take(direction, count)[::-1]


class HidesFailures(BrokenEngine):
    def take(self, direction, count):
        return [replace(done, ok=True) for done in super().take(direction, count)]


class CountsSubmitted(BrokenEngine):
    """``ready`` counts a plan that has not finished."""

    submitted = 0

    def submit(self, plan):
        self.submitted += 1
        return super().submit(plan)

    def ready(self, direction):
        return self.submitted


class InventsBytes(BrokenEngine):
    """A completion for a plan that moved nothing claims bytes."""

    def take(self, direction, count):
        return [replace(done, bytes_moved=1) for done in super().take(direction, count)]


class NeverHoldsTheForwardBack(BrokenEngine):
    def gate(self, tickets):
        return super().gate([])


class WaitsForTheFirstTicketOnly(BrokenEngine):
    def gate(self, tickets):
        return super().gate(tickets[:1])


class WaitsForWholePlans(BrokenEngine):
    """Gates that open only with the last layer: safe, but nothing overlaps."""

    def gate(self, tickets):
        return WholePlanGate(super().gate(tickets))


class WholePlanGate:
    def __init__(self, inner):
        self.inner = inner

    def wait(self, layer):
        self.inner.wait(3)


class BlocksOnForeignLayers(BrokenEngine):
    def gate(self, tickets):
        inner = super().gate(tickets)
        for _, job in inner._jobs:
            job.layers = frozenset(range(100))
        return inner


class IgnoresWhatComesBefore(BrokenEngine):
    def submit(self, plan):
        return super().submit(replace(plan, after=NOTHING_LAUNCHED))


class WaitsBeforeItQueues(BrokenEngine):
    """The caller stands still, instead of the copy."""

    def submit(self, plan):
        if not plan.after.passed():
            time.sleep(0.02)
        return super().submit(replace(plan, after=NOTHING_LAUNCHED))


class GivesPagesBackUnread(BrokenEngine):
    """Gates know loads alone."""

    def gate(self, tickets):
        load = self._lanes[Direction.LOAD]
        return super().gate([ticket for ticket in tickets if self._jobs[ticket][0] is load])


class MovesRowsByPage(NumpyCopier):
    """Rows at the right pages and at the wrong places in them."""

    def scatter_rows(self, route, device, host):
        super().scatter_rows(route, replace(device, offsets=host.offsets), host)

    def gather_rows(self, route, device, host):
        super().gather_rows(route, device, replace(host, offsets=device.offsets))


class ForgetsRows(BrokenEngine):
    def submit(self, plan):
        return super().submit(replace(plan, rows=()))


class DropsItsQueueOnClose(BrokenEngine):
    def close(self):
        self._lanes[Direction.BACKUP]._queue.clear()
        super().close()


class RunsNewestFirst(BrokenEngine):
    """The newest of two queued plans runs first; completions keep their order."""

    def __init__(self, *ends):
        super().__init__(*ends)
        self.held = None

    def submit(self, plan):
        if self.held is None:
            self.held = plan
            return super().submit(CopyPlan(plan.direction, ()))
        super().submit(plan)
        held, self.held = self.held, None
        return super().submit(held)


def cut(route, part):
    return replace(
        route, segments=route.segments[part], device=route.device[part], rows=route.rows[part]
    )


def swapped(route):
    """The route with the device ends of the first two segments of one length exchanged."""
    device = list(route.device)
    if len(device) > 1 and device[0].shape == device[1].shape:
        device[:2] = device[1], device[0]
    return replace(route, device=tuple(device))


def with_copier(copier):
    def make(spec, pools, arenas, before_copy):
        return CpuTransferEngine(spec, pools, arenas, HookedCopier(copier(), before_copy))

    return make


def run_suite_test(name, make):
    class Suite(TransferConformance):
        def engine(self, spec, pools, arenas, before_copy):
            return make(spec, pools, arenas, before_copy)

    test = getattr(Suite(), name)
    marks = getattr(test, "pytestmark", [])
    cases = next((mark.args for mark in marks if mark.name == "parametrize"), None)
    if cases is None:
        test()
        return
    names, values = cases
    for value in values:
        test(*(value if isinstance(names, tuple) else (value,)))


ROUND_TRIP = "test_a_round_trip_is_exact_and_writes_nothing_else"
MERGED = "test_one_plan_merges_many_copies_of_the_same_groups"
GATES = "test_gates_open_layer_by_layer_once_the_bytes_are_there"
AFTER_BACKUP = "test_a_backup_reads_nothing_before_the_work_that_it_comes_after"
AFTER_LOAD = "test_a_load_writes_nothing_before_the_work_that_it_comes_after"
WALK = "test_copies_and_forwards_that_take_any_time_keep_their_order"
ROWS = "test_rows_of_pages_go_where_they_belong_and_nothing_else_moves"
ORDER = "test_plans_finish_in_submission_order"


@pytest.mark.parametrize(
    ("bug", "caught_by"),
    [
        (with_copier(SkipsLastLayer), MERGED),
        (with_copier(OffByOneHostPage), ROUND_TRIP),
        (with_copier(OffByOneHostPage), MERGED),
        (with_copier(SwapsTwoPages), MERGED),
        (with_copier(SwapsSidecars), MERGED),
        (with_copier(MovesThePrefixTwice), MERGED),
        (with_copier(ForgetsTheLastByte), ROUND_TRIP),
        (with_copier(LagsOneLayer), GATES),
        (with_copier(LagsOneLayer), "test_no_reader_sees_a_torn_page"),
        (NeverHoldsTheForwardBack, GATES),
        (WaitsForWholePlans, GATES),
        (WaitsForTheFirstTicketOnly, "test_a_gate_waits_for_each_of_its_tickets"),
        (BlocksOnForeignLayers, "test_a_gate_ignores_layers_that_its_plans_do_not_bring"),
        (TakesNewestFirst, ORDER),
        (CountsSubmitted, ORDER),
        (RunsNewestFirst, "test_a_later_plan_sees_what_an_earlier_one_wrote"),
        (HidesFailures, "test_a_failed_backup_is_reported_and_the_next_one_is_not_harmed"),
        (DropsItsQueueOnClose, "test_close_finishes_what_is_queued_and_refuses_more"),
        (IgnoresWhatComesBefore, AFTER_BACKUP),
        (IgnoresWhatComesBefore, AFTER_LOAD),
        (IgnoresWhatComesBefore, WALK),
        (WaitsBeforeItQueues, AFTER_LOAD),
        (GivesPagesBackUnread, "test_a_gate_over_a_backup_opens_when_its_pages_have_been_read"),
        (NeverHoldsTheForwardBack, WALK),
        (with_copier(MovesRowsByPage), ROWS),
        (ForgetsRows, ROWS),
        (ForgetsRows, "test_rows_land_with_their_layer"),
        (InventsBytes, "test_empty_plans_finish_and_open_their_gates"),
    ],
)
def test_the_suite_has_teeth(bug, caught_by, monkeypatch):
    """Bugs of timing need the right moment: on a busy machine a try may pass."""
    for place in ("transfer_conformance", "patience"):
        monkeypatch.setattr(f"stratakv.testing.{place}.PATIENCE_S", 0.3)
    with pytest.raises(AssertionError):
        run_often(caught_by, bug)


def run_often(name, engine):
    for _ in range(10):
        run_suite_test(name, engine)


@pytest.mark.parametrize("name", [n for n in dir(TransferConformance) if n.startswith("test_")])
def test_the_harness_that_seeds_bugs_is_sound(name):
    run_suite_test(name, BrokenEngine)
