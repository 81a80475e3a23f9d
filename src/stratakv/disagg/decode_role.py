"""Decodes what other engines have computed the prompts of.

Owns the sessions of its requests and the leases of the pages that they write. A request's pages are
its own again when prefill has reported that it writes no more, or is behind its fence; no end is
reported to the engine before, but that prefill is lost is. Must not know how messages and bytes
travel (``peers``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from stratakv.cache.footprint import TransferPages
from stratakv.core.clock import Clock, MonotonicClock
from stratakv.core.ids import RequestId
from stratakv.disagg.arrivals import ArrivalBounds
from stratakv.disagg.deadlines import (
    Due,
    HandOffLimits,
    bounded,
    prompt_identity,
    session_name,
)
from stratakv.disagg.joining import Join, JoinedByHand
from stratakv.disagg.messages import (
    Abort,
    Arrival,
    Attempt,
    Ended,
    Leave,
    Message,
    PartWritten,
    Reserve,
)
from stratakv.disagg.page_leases import LeaseCounts, PageLeases, Writer
from stratakv.disagg.peers import MessageReceived, Peers
from stratakv.disagg.recompute import Recompute
from stratakv.disagg.session import (
    Aborted,
    Agreed,
    Arrived,
    FailureCause,
    Session,
    SessionEvent,
    SessionState,
    TransferBegun,
)
from stratakv.disagg.statistics import SessionCounts, SessionStats
from stratakv.disagg.transport import Disconnected, Done, Failed, Lost, PeerId
from stratakv.engine.request import LARGEST, Phase, Prompt, Request
from stratakv.engine.roles import (
    Computed,
    MayStart,
    Received,
    RoleEvent,
    Start,
    TransferFailed,
    TransferLost,
    computed_here,
)

Route: TypeAlias = Callable[[Request], PeerId | None]
"""Who computes a request's prompt; None: this engine does."""


@dataclass(slots=True, eq=False)
class _Receiving:
    """``again``: what prefill is to compute of a request that was retracted and goes back.
    ``reserved``: prefill may know its pages, which are leased; ``parts`` of them are to come, at
    most, and what comes behind them is within ``bounds``. ``reported``: that it is lost, the engine
    knows."""

    request: RequestId
    attempt: Attempt
    peer: PeerId
    session: Session
    again: Recompute | None
    reserved: bool = False
    parts: int = 0
    bounds: ArrivalBounds | None = None
    reported: bool = False

    @property
    def writer(self) -> Writer:
        return Writer(self.request, 0, self.attempt.generation)


class DecodeRole:
    """Of one rank. A retracted request whose pages nobody has saved goes back to prefill, in a
    session of its own; where that fails, or nobody is there, it is computed again here. ``join``:
    makes a peer known that a request needs. ``vocab_size``: token ids are below it."""

    def __init__(
        self,
        peers: Peers,
        route: Route,
        limits: HandOffLimits,
        clock: Clock | None = None,
        join: Join | None = None,
        vocab_size: int = LARGEST,
    ) -> None:
        self._peers, self._route, self._limits = peers, route, limits
        self._join, self._vocab_size = join or JoinedByHand(), vocab_size
        self._clock = clock or MonotonicClock()
        self._sessions: dict[RequestId, _Receiving] = {}
        self._attempts: dict[Attempt, _Receiving] = {}
        self._joining: dict[PeerId, dict[RequestId, _Receiving]] = {}  # who waits for a peer
        self._here: set[RequestId] = set()  # which prefill has not computed again
        self._counts = SessionCounts()
        self._leases = PageLeases()
        self._events: list[RoleEvent] = []
        self._due = Due()
        self._generation = 0

    def __len__(self) -> int:
        """Sessions that have not ended, or whose pages may still be written."""
        return len(self._sessions)

    def lease_counts(self) -> LeaseCounts:
        return self._leases.counts()

    def stats(self) -> SessionStats:
        sessions = [entry.session for entry in self._sessions.values()]
        return self._counts.stats(sessions, self._leases.counts(), self._peers.counts())

    # -- the engine's calls ----------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        peer = self._route(request)
        if peer is None:
            return
        entry = self._opened(request, peer, session_name(request.prompt), None)
        if self._peers.knows(peer):
            self._move(entry, Agreed())
        else:
            self._joining.setdefault(peer, {})[request.id] = entry
            self._join.ask(peer)

    def may_start(self, request: Request) -> Start:
        if request.phase is Phase.RETRACTED and request.id not in self._sessions:
            self._send_back(request)
        entry = self._sessions.get(request.id)
        if entry is None:
            return Start.COMPUTE
        ready = entry.session.state is SessionState.WAITING_FOR_INPUT
        return Start.RECEIVE if ready else Start.WAIT

    def _send_back(self, request: Request) -> None:
        """Nothing of it was saved: whoever computes prompts is to compute all that it knows; if
        that has failed before, or nobody is there, this engine does."""
        peer = self._route(request)
        again = None if peer is None else Recompute.of(request)
        if peer is None or again is None:
            return
        if request.id in self._here or not self._peers.knows(peer):
            self._generation += 1  # as other ranks do, which may know it: names have it
            return
        name = bounded(f"{session_name(request.prompt)}+{self._generation + 1}")
        self._move(self._opened(request, peer, name, again), Agreed())

    def _opened(
        self, request: Request, peer: PeerId, name: str, again: Recompute | None
    ) -> _Receiving:
        self._generation += 1
        attempt = Attempt(name, self._generation)
        session = Session.opened(str(attempt), self._limits.sessions, self._clock.now_s())
        entry = _Receiving(request.id, attempt, peer, session, again)
        self._sessions[request.id] = self._attempts[attempt] = entry
        self._peers.uses.use(peer)
        self._due.add(session.deadline_s)
        return entry

    def reserved(self, request: Request, pages: TransferPages) -> None:
        entry = self._sessions[request.id]
        self._move(entry, TransferBegun())
        until_s = entry.session.deadline_s + self._limits.answer_s
        self._leases.lease(request.id, pages, {entry.writer: entry.peer}, until_s)
        self._due.add(until_s)
        entry.reserved, entry.parts = True, pages.count  # no part is without a page
        sampling = request.prompt.sampling if entry.again is None else entry.again.sampling
        entry.bounds = ArrivalBounds(
            tokens=pages.tokens, logprobs=sampling.logprobs, vocab_size=self._vocab_size
        )
        prompt = prompt_identity(request, sampling)
        self._peers.send(entry.peer, Reserve(entry.attempt, prompt, pages, entry.again))

    def computed(
        self, request: Request, computed: Computed, pages: Callable[[], TransferPages]
    ) -> Phase:
        """Of one that is computed here, or that was retracted and computes what it lacked."""
        del request, pages
        return computed_here(computed)

    def left(self, prompt: Prompt) -> None:
        request = prompt.id
        self._abandon(request, "decode has no use for it any more", FailureCause.ABORTED)
        if (entry := self._sessions.get(request)) is not None:
            entry.again = None  # nobody computes it here
        self._here.discard(request)

    def poll(self) -> Sequence[RoleEvent]:
        for event in self._peers.poll():
            match event:
                case MessageReceived(peer, message):
                    self._on_message(peer, message)
                case Lost(peer, reason):
                    self._lose(peer, reason)
                case Disconnected(peer):
                    self._lose(peer, "its link has ended")
                    for request in self._leases.disconnected(peer):
                        self._fail(self._sessions[request])
                case Done() | Failed():
                    pass  # of words alone: where one fails, its link ends
                case _:
                    assert_never(event)
        for peer, reason in self._join.refused():
            self._refused(peer, reason)
        self._agree()
        for peer in self._peers.uses.overdue():
            self._join.part(peer)
        now_s = self._clock.now_s()
        if self._due.passed(now_s):
            self._expire(now_s)
        events, self._events = self._events, []
        return events

    def _agree(self) -> None:
        """Sessions of peers that are known by now may start; the others' peers are asked again."""
        for peer in list(self._joining):
            if not self._peers.knows(peer):
                self._join.ask(peer)
                continue
            for entry in self._joining.pop(peer).values():
                self._move(entry, Agreed())
                self._events.append(MayStart(entry.request))

    # -- for several ranks (``agreeing_role``) ---------------------------------------------------

    def concerns(self, request: Request) -> bool:
        return self._route(request) is not None

    def state(self, request: Request) -> SessionState | None:
        entry = self._sessions.get(request.id)
        return None if entry is None else entry.session.state

    def abort(self, request: Request, reason: str) -> None:
        self._abandon(request.id, reason, FailureCause.RANK)

    # -- words of prefill ------------------------------------------------------------------------

    def _on_message(self, peer: PeerId, message: Message) -> None:
        match message:
            case PartWritten(attempt):
                entry = self._attempts.get(attempt)
                if entry is not None and entry.peer == peer and not entry.session.ended:
                    self._extend(entry)
            case Arrival(attempt) | Ended(attempt):
                entry = self._attempts.get(attempt)
                if entry is None or entry.peer != peer:
                    return  # of an attempt that is over
                if entry.reserved:
                    self._answered(entry, message)
                else:
                    self._peers.disconnect(peer, f"it answers {attempt}, of which it was not asked")
            case Leave():
                self._peers.uses.choose(peer)
            case Reserve() | Abort():
                self._peers.disconnect(peer, "it asks for pages of an engine that decodes")
            case _:
                assert_never(message)

    def _extend(self, entry: _Receiving) -> None:
        if entry.session.state is SessionState.TRANSFERRING:
            if not entry.parts:
                reason = f"it has written more parts of {entry.attempt} than that has pages"
                self._peers.disconnect(entry.peer, reason)
                return
            entry.parts -= 1
            entry.session = entry.session.extended(self._clock.now_s())
            until_s = entry.session.deadline_s + self._limits.answer_s
            self._leases.extend(entry.request, until_s)
            self._due.add(entry.session.deadline_s)

    def _answered(self, entry: _Receiving, message: Arrival | Ended) -> None:
        """Nobody writes its pages any more."""
        freed = self._leases.acknowledge(entry.writer)
        assert freed is not None, f"{entry.attempt} was not leased"
        match message:
            case Ended():
                self._move(entry, Aborted(message.reason, FailureCause.PEER))
            case Arrival():
                assert entry.bounds is not None, f"{entry.attempt} was not reserved"
                if reason := entry.bounds.refusal(message):
                    self._move(entry, Aborted(reason, FailureCause.PROTOCOL))
                self._move(entry, Arrived(str(message.attempt)))
            case _:
                assert_never(message)
        if entry.session.state is not SessionState.SUCCESS or isinstance(message, Ended):
            self._fail(entry)
            return
        self._forget(entry)
        self._events.append(Received(entry.request, message.first, message.cached))

    # -- failures --------------------------------------------------------------------------------

    def _refused(self, peer: PeerId, reason: str) -> None:
        """Nobody can join it; a later request may try again."""
        for entry in list(self._joining.get(peer, {}).values()):
            self._move(entry, Aborted(reason, FailureCause.REFUSED))
            self._fail(entry)

    def _lose(self, peer: PeerId, reason: str) -> None:
        """Its sessions fail, at once; those whose pages it may write end behind its fence. What was
        sent back may be computed here then, and is given up only when it is overdue."""
        self._leases.lost(peer)
        for entry in [each for each in self._sessions.values() if each.peer == peer]:
            if entry.session.state is SessionState.BOOTSTRAPPING:
                continue  # it may join again
            self._move(entry, Aborted(f"{peer} is lost: {reason}", FailureCause.PEER_LOST))
            if not entry.reserved:
                self._fail(entry)
            elif entry.again is None:
                self._report(entry)

    def _report(self, entry: _Receiving) -> None:
        if not entry.reported:
            entry.reported = True
            self._events.append(TransferLost(entry.request, entry.session.reason))

    def _expire(self, now_s: float) -> None:
        for entry in list(self._sessions.values()):
            expired = entry.session.expire(now_s)
            if expired.ended and not entry.session.ended:
                self._give_up(entry, self._overdue(entry, expired.reason), FailureCause.TIMEOUT)
                if not entry.reserved:
                    self._fail(entry)
                    continue
            if not expired.ended:
                self._due.add(expired.deadline_s)
        for peer in self._leases.expire(now_s):
            self._peers.disconnect(peer, "it has not answered in time")
        # What is leased and overdue waits for its fence; what is not yet, for its deadline.
        for entry in self._sessions.values():
            until_s = entry.session.deadline_s + self._limits.answer_s
            if entry.reserved and now_s < until_s:
                self._due.add(until_s)
            elif entry.reserved:
                self._report(entry)

    def _overdue(self, entry: _Receiving, reason: str) -> str:
        if entry.session.state is not SessionState.BOOTSTRAPPING:
            return reason
        why = self._join.waits_for(entry.peer)
        return f"{reason}: {entry.peer} is not joined" + (f", {why}" if why else "")

    def _abandon(self, request: RequestId, reason: str, cause: FailureCause) -> None:
        entry = self._sessions.get(request)
        if entry is None or entry.session.ended:
            return
        self._give_up(entry, reason, cause)
        if not entry.reserved:
            self._forget(entry)

    def _give_up(self, entry: _Receiving, reason: str, cause: FailureCause) -> None:
        self._move(entry, Aborted(reason, cause))
        if entry.reserved or entry.again is None:  # else prefill has never heard of it
            self._peers.send(entry.peer, Abort(entry.attempt, entry.reserved, reason))

    def _fail(self, entry: _Receiving) -> None:
        """Nobody touches its pages."""
        self._forget(entry)
        self._events.append(TransferFailed(entry.request, entry.session.reason))

    def _forget(self, entry: _Receiving) -> None:
        if entry.again is not None and entry.session.state is not SessionState.SUCCESS:
            self._here.add(entry.request)
        del self._sessions[entry.request]
        del self._attempts[entry.attempt]
        self._peers.uses.leave(entry.peer)
        joining = self._joining.get(entry.peer, {})
        if joining.pop(entry.request, None) is not None and not joining:
            del self._joining[entry.peer]

    def _move(self, entry: _Receiving, event: SessionEvent) -> None:
        before, entry.session = entry.session, entry.session.after(event, self._clock.now_s())
        self._counts.moved(before, entry.session)
        self._due.add(entry.session.deadline_s)
