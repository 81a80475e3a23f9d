"""Plans of copies under way: what each moves, what it is called, and the order in which they end.

Owns the merging of a step's copies into plans, and their tickets: a load has one from the moment it
is begun, before its plan is whole. Must not know a policy, nor what an end means
(``transfer_manager``).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stratakv.agreement.agreement import DigestInputs
from stratakv.agreement.ballot import Ballot, Work
from stratakv.core.ids import NONE, GroupId, NodeIds, PageIds, TicketId
from stratakv.spec.groups import CacheSpec
from stratakv.transfer.copy_plan import CopyPlan, Direction, GroupCopy, Launched
from stratakv.transfer.engine import Completion, LayerGate, TransferEngine

PLAN_BYTES: Final = 64 * 2**20
"""The most that one backup plan moves; a retraction may have gigabytes to save."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Nodes of one path in one group, whose pages one copy moves; live pages have no nodes."""

    group: GroupId
    rows: NodeIds
    device: PageIds
    host: PageIds


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A plan under way. ``ticket``: what the cache calls it; ``submitted``: what the transfer
    engine does."""

    ticket: TicketId
    submitted: TicketId
    parts: list[Part]

    @property
    def pages(self) -> int:
        return sum(len(part.device) for part in self.parts)


class Flights:
    """The loads that a step begins are one plan, whatever its size: it goes layer by layer over all
    requests, as the forward does. Cut in two, the second's first layer would come after the first's
    last. The load-back budget bounds it. Nobody waits for a backup, so a huge one is cut.
    ``launched``: the device's work so far, after which every plan comes: a page that was freed may
    still be read by a forward, and one to be saved written."""

    def __init__(self, spec: CacheSpec, transfer: TransferEngine, launched: Launched) -> None:
        self._spec = spec
        self._transfer = transfer
        self._launched = launched
        self._tickets = 0
        self._loads: list[Part] = []  # begun and not yet submitted, under ``_next_load``
        self._next_load: TicketId | None = None
        self._in_flight: dict[Direction, deque[Flight]] = {way: deque() for way in Direction}

    def wait_for_device(self) -> None:
        """Until the device has done all that it was given so far. For pages that were freed and
        that somebody who has no fence, another engine, is to write now."""
        self._launched().wait()

    def __bool__(self) -> bool:
        """Whether a plan has not ended, or a load waits to be submitted."""
        return self._next_load is not None or any(self._in_flight.values())

    def gate(self, tickets: Sequence[TicketId]) -> LayerGate | None:
        """Hand over the loads that were begun, as one plan; a gate over those of ``tickets`` that
        are still in flight, None when none is. A forward waits at it, layer by layer."""
        self.submit_loads()
        loads = self._in_flight[Direction.LOAD]
        waiting = [flight.submitted for flight in loads if flight.ticket in tickets]
        return self._transfer.gate(waiting) if waiting else None

    def under_way(self, tickets: Sequence[TicketId]) -> bool:
        """Whether any of ``tickets`` has not ended."""
        if not tickets:
            return False
        live = {flight.ticket for queue in self._in_flight.values() for flight in queue}
        return self._next_load in tickets or not live.isdisjoint(tickets)

    def under_way_by_direction(self) -> dict[Direction, int]:
        """Plans that have not ended; loads that were begun leave as one."""
        begun = {Direction.LOAD: self._next_load is not None}
        return {way: len(left) + begun.get(way, 0) for way, left in self._in_flight.items()}

    def figures(self) -> DigestInputs:
        """What is under way, for ranks to compare."""
        backups, loads = self._in_flight[Direction.BACKUP], self._in_flight[Direction.LOAD]
        return {
            "backups": len(backups),
            "newest backup": backups[-1].ticket if backups else NONE,
            "loads": len(loads),
            "newest load": loads[-1].ticket if loads else NONE,
            "loads begun": len(self._loads),
        }

    # -- leaving ---------------------------------------------------------------------------------

    def begin_load(self, parts: Sequence[Part]) -> TicketId:
        """These pages are loading from now on, and leave with the next plan of loads."""
        if self._next_load is None:
            self._next_load = self._new_ticket()
        self._loads += parts
        return self._next_load

    def submit_loads(self) -> None:
        """Hand over all loads that were begun, as one plan."""
        if self._next_load is None:
            return
        ticket, parts = self._next_load, self._loads
        self._next_load, self._loads = None, []
        self._send(Direction.LOAD, ticket, parts)

    def back_up(self, parts: Sequence[Part]) -> tuple[TicketId, ...]:
        """Hand over backups, as one plan, or as several where it would keep the copier from
        everything else for long."""
        tickets: list[TicketId] = []
        for plan in self._bounded(parts):
            tickets.append(self._new_ticket())
            self._send(Direction.BACKUP, tickets[-1], plan)
        return tuple(tickets)

    def _new_ticket(self) -> TicketId:
        self._tickets += 1
        return TicketId(self._tickets)

    def _bounded(self, parts: Sequence[Part]) -> Iterator[list[Part]]:
        """Cut into plans of at most ``PLAN_BYTES``, or of one page."""
        plan: list[Part] = []
        room = PLAN_BYTES
        for part in parts:
            page_bytes = self._spec.groups[part.group].page_bytes
            at = 0
            while at < len(part.device):
                fits = len(part.device) if not page_bytes else max(not plan, room // page_bytes)
                some = slice(at, at + fits)
                if fits:
                    plan.append(
                        Part(part.group, part.rows[some], part.device[some], part.host[some])
                    )
                    at += fits
                    room -= len(plan[-1].device) * page_bytes
                if room <= 0 or not fits:
                    yield plan
                    plan, room = [], PLAN_BYTES
        if plan:
            yield plan

    def _send(self, direction: Direction, ticket: TicketId, parts: list[Part]) -> None:
        groups = sorted({part.group for part in parts})
        copies = tuple(
            GroupCopy(
                group,
                np.concatenate([part.device for part in parts if part.group == group]),
                np.concatenate([part.host for part in parts if part.group == group]),
            )
            for group in groups
        )
        submitted = self._transfer.submit(CopyPlan(direction, copies, after=self._launched()))
        self._in_flight[direction].append(Flight(ticket, submitted, parts))

    # -- ending ----------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a plan has ended here that was not taken."""
        return any(map(self._transfer.ready, Direction))

    def vote(self, ballot: Ballot) -> None:
        """Say which plans have ended here, and which backups with success."""
        for direction in Direction:
            count = self._transfer.ready(direction)
            if not count:
                continue
            match direction:
                case Direction.BACKUP:
                    ended = self._transfer.peek(direction, count)
                    ballot.cast(Work.BACKUP, (np.array([done.ok]) for done in ended))
                case Direction.LOAD:
                    ballot.count(Work.LOAD, count)

    def taken(self, direction: Direction, count: int) -> list[tuple[Completion, Flight]]:
        """The oldest ``count`` plans of a direction, which have ended on every rank."""
        if not count:
            return []
        found: list[tuple[Completion, Flight]] = []
        for done in self._transfer.take(direction, count):
            flight = self._in_flight[direction].popleft()
            assert flight.submitted == done.ticket, "completions out of order"
            found.append((done, flight))
        return found
