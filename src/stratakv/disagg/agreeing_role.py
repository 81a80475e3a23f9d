"""One role on several ranks: what each rank's own role finds becomes true when it is so on all. A
rank that stands for several of the other side's has a role for each of them (``lanes``).

Owns the slots of sessions in the ballot, the state that ranks agree on, and the ends that an engine
learns of: the same on every rank, in the same step. A session is where its last rank is, so one
rank's failure is a failure on all, and its pages are the engine's own when no rank's are touched
any more. Must not know peers or bytes, nor let anything but an agreed state decide.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, Protocol

import numpy as np

from stratakv.agreement.agreement import DigestInputs
from stratakv.agreement.ballot import SLOTS, Ballot, BallotResult, SlotKind
from stratakv.cache.footprint import TransferPages
from stratakv.core.ids import RequestId
from stratakv.disagg.session import SessionState
from stratakv.engine.request import Phase, Prompt, Request
from stratakv.engine.roles import (
    ChunkComputed,
    Computed,
    MayStart,
    PartSent,
    Received,
    Role,
    RoleEvent,
    Sent,
    Start,
    TransferEvent,
    TransferFailed,
    TransferLost,
)

ELSEWHERE: Final = "its transfer has failed on another rank"
_TOUCHED, _LOST, _FREE = range(3)
"""Pages of a session that has failed: somebody else touches them and is asked not to; nobody knows
for how long; nobody does any more."""
_KINDS: Final = SlotKind.SESSION, SlotKind.PART, SlotKind.LEAST_TOKEN, SlotKind.MOST_TOKEN


class LocalSessions(Protocol):
    """What one rank's role has of its requests, beside the verbs of a role."""

    def concerns(self, request: Request) -> bool:
        """Whether another engine has a part in it: the same on every rank."""
        ...

    def state(self, request: Request) -> SessionState | None:
        """Of its session here; None: it has ended, and nobody else touches its pages."""
        ...

    def abort(self, request: Request, reason: str) -> None:
        """It has failed on another rank. Nothing where it has ended here."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """``role`` and ``sessions``: the same object."""

    role: Role
    sessions: LocalSessions


@dataclass(slots=True, eq=False)
class _Entry:
    """``agreed``: its state on all ranks. ``engaged``: its pages are, or were, named to somebody.
    ``ends``: how it has ended here, by lane, and ``lost``: why it is lost there, before it ends,
    which the engine may know (``lost_reported``). ``slot``: None while it waits for one. ``again``:
    of a request that was retracted. Parts of its pages: ``given`` to be read, ``sent`` from
    each lane, ``all_sent`` from all ranks, and ``reported`` so."""

    request: Request
    sent: list[int]
    agreed: SessionState = SessionState.BOOTSTRAPPING
    engaged: bool = False
    ends: dict[int, TransferEvent] = field(default_factory=dict[int, TransferEvent])
    lost: dict[int, str] = field(default_factory=dict[int, str])
    lost_reported: bool = False
    slot: int | None = None
    again: bool = False
    given: int = 0
    all_sent: int = 0
    reported: int = 0

    def vote(self, lane: int, state: SessionState | None) -> int:
        """Its state on a lane; once all know that it has failed, how far its end is there."""
        if self.agreed is SessionState.FAILED:
            if state is None:
                return _FREE
            return _LOST if lane in self.lost else _TOUCHED
        if state is not None:
            return state
        well = isinstance(self.ends.get(lane), Received | Sent)
        return SessionState.SUCCESS if well else SessionState.FAILED

    def tokens(self) -> tuple[int, int]:
        """The least and the most of the first tokens that its lanes have received; 0 where none
        has."""
        found = [end.first.token for end in self.ends.values() if isinstance(end, Received)]
        return min(found, default=0), max(found, default=0)

    def success(self, least: int, most: int) -> TransferEvent:
        """Of all ranks, which must have received one first token."""
        if least != most:
            reason = f"its first token is {least} to one rank and {most} to another"
            return TransferFailed(self.request.id, reason)
        return self.ends[0]

    def failure(self) -> TransferFailed:
        ends = (self.ends[lane] for lane in sorted(self.ends))
        reasons = [end.reason for end in ends if isinstance(end, TransferFailed)]
        reasons += self.lost.values()
        own = (reason for reason in reasons if reason != ELSEWHERE)
        return TransferFailed(self.request.id, next(own, ELSEWHERE))


class AgreeingRole:
    """``lanes``: this rank's roles. Votes in every ballot. What has no slot waits, in order of
    arrival."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = tuple(lanes)
        self._entries: dict[RequestId, _Entry] = {}
        self._seated: dict[int, _Entry] = {}
        self._waiting: deque[_Entry] = deque()
        self._free = list(range(SLOTS[SlotKind.SESSION]))
        self._votes = {kind: np.zeros(SLOTS[kind], np.int64) for kind in _KINDS}
        self._events: list[RoleEvent] = []
        self._over: set[RequestId] = set()  # whose ends are among them
        self._here: set[RequestId] = set()  # which were sent back in vain
        self._parts: list[_Entry] = []
        self._ended = 0

    def __len__(self) -> int:
        """Sessions whose end the engine does not know."""
        return len(self._entries)

    # -- the engine's calls ----------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        for lane in self._lanes:
            lane.role.arrived(request)
        if self._concerns(request):
            self._open(request)

    def may_start(self, request: Request) -> Start:
        entry = self._entries.get(request.id)
        if entry is None:
            if request.id in self._over:
                return Start.WAIT
            return self._start_again(request)
        if entry.agreed <= SessionState.BOOTSTRAPPING:
            return Start.WAIT
        start = self._asked(request)
        assert start is not Start.WAIT, f"{request.id} may start on all ranks, and waits here"
        return start

    def _asked(self, request: Request) -> Start:
        """What a lane that waits says, or any where none does."""
        starts = [lane.role.may_start(request) for lane in self._lanes]
        return Start.WAIT if Start.WAIT in starts else starts[0]

    def _concerns(self, request: Request) -> bool:
        return self._lanes[0].sessions.concerns(request)  # the same on every one

    def _start_again(self, request: Request) -> Start:
        """Of one without a session: new, or retracted and nothing of it saved. It goes back where
        all ranks can send it."""
        if request.phase is not Phase.RETRACTED or not self._concerns(request):
            return self._asked(request)
        if request.id in self._here:
            return Start.COMPUTE
        self._asked(request)  # whatever it says: ranks may know other peers
        self._open(request, again=True)
        return Start.WAIT

    def _open(self, request: Request, *, again: bool = False) -> None:
        entry = _Entry(request, [0] * len(self._lanes), again=again)
        self._entries[request.id] = entry
        self._waiting.append(entry)
        self._give_slots()

    def reserved(self, request: Request, pages: TransferPages) -> None:
        entry = self._entries.get(request.id)
        if entry is None:
            assert request.id in self._over, f"{request.id} has no session"
            return  # it failed while pages were taken, and nobody knows of them
        entry.engaged = True
        if entry.agreed is not SessionState.FAILED:
            for lane in self._lanes:
                lane.role.reserved(request, pages)

    def computed(
        self, request: Request, computed: Computed, pages: Callable[[], TransferPages]
    ) -> Phase:
        """Pages are read on all ranks from here on or on none, whatever this one makes of them.
        Ballots come within a step, too, where it waits for a copy: a session may have ended of
        which the engine learns at the step's end."""
        ends = Phase.PREFILLING if isinstance(computed, ChunkComputed) else Phase.TRANSFERRING
        entry = self._entries.get(request.id)
        if entry is not None:
            entry.engaged = True
        if self._has_ended(request):
            return ends
        if entry is None:
            return self._computed(request, computed, pages)
        given = pages()  # which may wait, and so vote: this part is not among those that were sent
        if self._has_ended(request):
            return ends
        entry.given += 1
        return self._computed(request, computed, lambda: given)

    def _computed(
        self, request: Request, computed: Computed, pages: Callable[[], TransferPages]
    ) -> Phase:
        phases = {lane.role.computed(request, computed, pages) for lane in self._lanes}
        assert len(phases) == 1, f"{request.id} is {phases}"
        return phases.pop()

    def _has_ended(self, request: Request) -> bool:
        """Whether its failure is reported to the engine, or will be."""
        entry = self._entries.get(request.id)
        if entry is None:
            return request.id in self._over
        return entry.agreed is SessionState.FAILED

    def poll(self) -> Sequence[RoleEvent]:
        events, self._events = self._events, []
        self._over.clear()
        parts, self._parts = self._parts, []
        for entry in parts:
            here = self._entries.get(entry.request.id) is entry
            if (
                here and entry.reported < entry.given == entry.all_sent
            ):  # and no more was given since
                entry.reported = entry.given
                events.append(PartSent(entry.request.id))
        return events

    def left(self, prompt: Prompt) -> None:
        request = prompt.id
        for lane in self._lanes:
            lane.role.left(prompt)
        entry = self._entries.get(request)
        if entry is not None:
            entry.again = False
            if not entry.engaged:
                self._forget(entry)
        self._here.discard(request)

    # -- ballots ---------------------------------------------------------------------------------

    def figures(self) -> DigestInputs:
        """For ranks to compare."""
        return {
            "sessions": len(self._entries),
            "without a slot": len(self._waiting),
            "ended": self._ended,
        }

    def vote(self, ballot: Ballot) -> None:
        for at, lane in enumerate(self._lanes):
            for event in lane.role.poll():
                if isinstance(event, MayStart):
                    continue  # its state says so
                if (entry := self._entries.get(event.request)) is None:
                    continue
                if isinstance(event, TransferLost):
                    entry.lost[at] = event.reason
                elif isinstance(event, PartSent):
                    entry.sent[at] = entry.given
                else:
                    entry.ends[at] = event
        votes = self._votes
        for slot, entry in self._seated.items():
            votes[SlotKind.SESSION][slot] = min(
                entry.vote(at, lane.sessions.state(entry.request))
                for at, lane in enumerate(self._lanes)
            )
            votes[SlotKind.PART][slot] = min(entry.sent)
            least, most = entry.tokens()
            votes[SlotKind.LEAST_TOKEN][slot] = least
            votes[SlotKind.MOST_TOKEN][slot] = -most
        for kind in _KINDS:
            ballot.vote(kind, votes[kind])

    def agreed(self, result: BallotResult) -> None:
        least = {kind: result.least(kind) for kind in _KINDS}
        for slot, entry in list(self._seated.items()):
            entry.all_sent = least[SlotKind.PART].item(slot)
            if entry.reported < entry.given == entry.all_sent:
                self._parts.append(entry)
            state = least[SlotKind.SESSION].item(slot)
            if entry.agreed is not SessionState.FAILED:
                tokens = (
                    least[SlotKind.LEAST_TOKEN].item(slot),
                    -least[SlotKind.MOST_TOKEN].item(slot),
                )
                self._move(entry, SessionState(state), tokens)
            elif state == _FREE:
                self._end(entry, entry.failure())
            elif state == _LOST and not entry.lost_reported:
                entry.lost_reported = True
                self._events.append(TransferLost(entry.request.id, entry.failure().reason))

    def _move(self, entry: _Entry, state: SessionState, tokens: tuple[int, int]) -> None:
        """``tokens``: the least and the most of the first tokens that ranks have received."""
        if entry.agreed is SessionState.BOOTSTRAPPING < state < SessionState.SUCCESS:
            self._events.append(MayStart(entry.request.id))
        entry.agreed = state
        if state is SessionState.FAILED:
            for lane in self._lanes:
                lane.sessions.abort(entry.request, ELSEWHERE)
        elif state is SessionState.SUCCESS:
            self._end(entry, entry.success(*tokens))

    def _end(self, entry: _Entry, end: TransferEvent) -> None:
        """No rank's pages are touched any more."""
        self._over.add(entry.request.id)
        self._events.append(end)
        if entry.again and isinstance(end, TransferFailed):
            self._here.add(entry.request.id)
        self._forget(entry)

    # -- slots -----------------------------------------------------------------------------------

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.request.id]
        self._ended += 1
        if entry.slot is None:
            self._waiting.remove(entry)
            return
        del self._seated[entry.slot]
        heappush(self._free, entry.slot)
        self._give_slots()

    def _give_slots(self) -> None:
        while self._free and self._waiting:
            entry = self._waiting.popleft()
            entry.slot = heappop(self._free)
            self._seated[entry.slot] = entry
