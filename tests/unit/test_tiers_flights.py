"""How a step's copies become plans, what they are called, and how they end."""

from collections.abc import Sequence

import numpy as np
import pytest

from stratakv.agreement.ballot import Ballot, Work
from stratakv.core.ids import NONE, GroupId, PageIds, TicketId
from stratakv.sim.instant_transfer import InstantTransfer
from stratakv.spec.retention import KeepWindow
from stratakv.testing.specs import small_spec
from stratakv.tiers import flights
from stratakv.tiers.flights import Flights, Part
from stratakv.transfer.copy_plan import CopyPlan, Direction, nothing_launched
from stratakv.transfer.engine import Completion

BACKUP, LOAD = Direction.BACKUP, Direction.LOAD
PAGE_BYTES = 2


class Copier(InstantTransfer):
    """Remembers its plans, and ends the oldest ones of each direction when it is told to; those
    that ``fail`` names, badly. Its tickets are not the cache's."""

    def __init__(self) -> None:
        super().__init__()
        self._last = 100
        self.plans: list[CopyPlan] = []
        self.gated: list[list[TicketId]] = []
        self.ended = dict.fromkeys(Direction, 0)
        self.fail: set[TicketId] = set()

    def submit(self, plan: CopyPlan) -> TicketId:
        self.plans.append(plan)
        return super().submit(plan)

    def gate(self, tickets: Sequence[TicketId]):
        self.gated.append(list(tickets))
        return super().gate(tickets)

    def ready(self, direction: Direction) -> int:
        return self.ended[direction]

    def peek(self, direction: Direction, count: int) -> list[Completion]:
        return [
            Completion(done.ticket, ok=done.ticket not in self.fail, bytes_moved=0)
            for done in super().peek(direction, count)
        ]

    def take(self, direction: Direction, count: int) -> list[Completion]:
        self.ended[direction] -= count
        return super().take(direction, count)


def ids(*pages: int) -> PageIds:
    return np.array(pages, np.int32)


def part(group: int, *pages: int) -> Part:
    """Host page n beside device page n + 50, of node n + 100."""
    host = ids(*pages)
    return Part(GroupId(group), host.astype(np.intp) + 100, host + 50, host)


def shape(plan: CopyPlan) -> dict[int, list[int]]:
    """Host pages by group, in the plan's order."""
    for copy in plan.copies:
        assert copy.device.tolist() == (copy.host + 50).tolist()
    return {int(copy.group): copy.host.tolist() for copy in plan.copies}


@pytest.fixture
def copier() -> Copier:
    return Copier()


@pytest.fixture
def under(copier: Copier) -> Flights:
    return Flights(small_spec([KeepWindow(1)], page_tokens=1), copier, nothing_launched)


def test_the_loads_of_a_step_are_one_plan_under_one_ticket(under: Flights, copier: Copier) -> None:
    first = under.begin_load([part(1, 3), part(0, 1, 2)])
    assert under.begin_load([part(0, 7), part(1, 8)]) == first
    assert not copier.plans
    under.submit_loads()
    under.submit_loads()  # of none
    (plan,) = copier.plans
    assert plan.direction is LOAD
    assert list(shape(plan).items()) == [(0, [1, 2, 7]), (1, [3, 8])]
    again = under.begin_load([part(0, 9)])
    assert again > first
    under.submit_loads()
    assert shape(copier.plans[1]) == {0: [9]}


@pytest.mark.parametrize(
    ("room", "cut"),
    [
        (PAGE_BYTES - 1, [{0: [1]}, {0: [2]}, {1: [3]}, {1: [4]}, {0: [5]}, {0: [6]}, {0: [7]}]),
        (3 * PAGE_BYTES, [{0: [1, 2], 1: [3]}, {0: [5, 6], 1: [4]}, {0: [7]}]),
        (3 * PAGE_BYTES + 1, [{0: [1, 2], 1: [3]}, {0: [5, 6], 1: [4]}, {0: [7]}]),
        (7 * PAGE_BYTES, [{0: [1, 2, 5, 6, 7], 1: [3, 4]}]),
    ],
)
def test_backups_are_cut_into_plans_of_so_many_bytes_or_one_page(
    under: Flights,
    copier: Copier,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
    cut: list[dict[int, list[int]]],
) -> None:
    monkeypatch.setattr(flights, "PLAN_BYTES", room)
    tickets = under.back_up([part(0, 1, 2), part(1, 3, 4), part(0, 5, 6, 7)])
    assert [shape(plan) for plan in copier.plans] == cut
    assert {plan.direction for plan in copier.plans} == {BACKUP}
    assert len(set(tickets)) == len(tickets) == len(cut)
    copier.ended[BACKUP] = len(cut)
    taken = [flight for _, flight in under.taken(BACKUP, len(cut))]
    assert [flight.ticket for flight in taken] == list(tickets)
    assert [flight.pages for flight in taken] == [sum(map(len, plan.values())) for plan in cut]
    parts = [part for flight in taken for part in flight.parts]
    assert [row for part in parts for row in part.rows.tolist()] == list(range(101, 108))
    assert [page for part in parts for page in part.host.tolist()] == list(range(1, 8))


def test_pages_without_bytes_go_together_whatever_else_there_is(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flights, "PLAN_BYTES", PAGE_BYTES)
    under = Flights(
        small_spec([KeepWindow(1)], page_tokens=1, anchor_bytes=False), copier, nothing_launched
    )
    under.back_up([part(0, *range(9)), part(1, 20, 21), part(0, 30, 31)])
    assert [shape(plan) for plan in copier.plans] == [
        {0: list(range(9)), 1: [20]}, {1: [21]}, {0: [30, 31]},
    ]  # fmt: skip


def test_a_backup_of_nothing_is_no_plan(under: Flights, copier: Copier) -> None:
    assert under.back_up([]) == under.back_up([part(0)]) == ()
    assert not copier.plans
    assert not under


def test_a_load_is_under_way_from_its_beginning_to_the_end_of_its_plan(
    under: Flights, copier: Copier
) -> None:
    assert not under
    load = under.begin_load([part(0, 1)])
    (backup,) = under.back_up([part(0, 2)])
    assert under
    assert [under.under_way(of) for of in ((), (load,), (backup,), (backup, load))] == [
        False, True, True, True,
    ]  # fmt: skip
    copier.ended[BACKUP] = 1
    under.taken(BACKUP, 1)
    assert under
    under.submit_loads()
    assert under.under_way((backup, load))
    assert not under.under_way((backup,))
    copier.ended[LOAD] = 1
    assert under.under_way((load,)), "not before every rank has heard of it"
    under.taken(LOAD, 1)
    assert not under.under_way((load,))
    assert not under


def test_a_gate_is_over_what_is_in_flight_in_the_copiers_words(
    under: Flights, copier: Copier
) -> None:
    tickets: list[TicketId] = []
    for page in range(3):
        tickets.append(under.begin_load([part(0, page)]))
        under.submit_loads()
    (backup,) = under.back_up([part(0, 9)])
    copier.ended[LOAD] = 1
    under.taken(LOAD, 1)
    assert under.gate(tickets[:1]) is None
    assert under.gate([backup]) is None
    assert under.gate([]) is None
    assert not copier.gated
    assert under.gate([tickets[0], tickets[2]]) is not None
    assert under.gate(tickets) is not None
    assert copier.gated == [[103], [102, 103]]
    waiting = under.begin_load([part(0, 5)])
    assert under.gate([waiting]) is not None, "its load leaves first"
    assert copier.gated[-1] == [105]


def test_ranks_vote_on_how_many_have_ended_and_on_how_backups_did(
    under: Flights, copier: Copier
) -> None:
    def votes() -> tuple[int, list[list[bool]]]:
        ballot = Ballot()
        under.vote(ballot)
        result = ballot.result(ballot.lanes)
        return result.ended(Work.LOAD), [flags.tolist() for flags in result.flags(Work.BACKUP)]

    for page in range(3):
        under.back_up([part(0, page)])
        under.begin_load([part(0, 10 + page)])
        under.submit_loads()
    assert not under.ready
    assert votes() == (0, [])
    copier.ended[LOAD] = 2
    assert under.ready
    assert votes() == (2, [])
    copier.ended[BACKUP] = 2
    copier.fail = {TicketId(103)}
    assert votes() == (2, [[True], [False]])
    assert [done.ok for done, _ in under.taken(BACKUP, 2)] == [True, False]
    assert under.taken(BACKUP, 0) == []


def test_ranks_compare_what_is_under_way(under: Flights, copier: Copier) -> None:
    assert under.figures() == {
        "backups": 0, "newest backup": NONE, "loads": 0, "newest load": NONE, "loads begun": 0,
    }  # fmt: skip
    for page in range(2):
        (backup,) = under.back_up([part(0, page)])
    load = under.begin_load([part(0, 5), part(1, 6)])
    under.submit_loads()
    under.begin_load([part(0, 7), part(1, 8)])
    assert under.figures() == {
        "backups": 2, "newest backup": backup, "loads": 1, "newest load": load, "loads begun": 2,
    }  # fmt: skip


def test_an_engine_that_ends_out_of_order_is_a_fault(under: Flights, copier: Copier) -> None:
    under.back_up([part(0, 1)])
    under.back_up([part(0, 2)])
    copier.ended[BACKUP] = 2
    copier.take(BACKUP, 1)
    with pytest.raises(AssertionError, match="out of order"):
        under.taken(BACKUP, 1)


class Launch:
    """Work of the device that has not ended."""

    def wait(self) -> None: ...

    def passed(self) -> bool:
        return False


def test_every_plan_comes_after_what_the_device_was_given_when_it_left(copier: Copier) -> None:
    given: list[Launch] = []

    def launched() -> Launch:
        given.append(Launch())
        return given[-1]

    under = Flights(small_spec([KeepWindow(1)], page_tokens=1), copier, launched)
    under.begin_load([part(0, 1)])
    assert not given, "more may be launched until the step's loads leave"
    under.submit_loads()
    under.back_up([part(0, 2)])
    assert [plan.after for plan in copier.plans] == given
    assert len(given) == 2
