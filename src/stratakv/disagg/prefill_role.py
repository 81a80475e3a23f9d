"""Computes prompts for other engines, and writes their pages there: each chunk's while the next one
is computed.

Owns the sessions of its requests and what is being written. Pages here may be read until their
writes have ended, and until then the engine learns nothing. Must not know how words and bytes
travel (``peers``).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from stratakv.cache.footprint import TransferPages
from stratakv.cache.records import CachedTokens, TierTokens
from stratakv.core.clock import Clock, MonotonicClock
from stratakv.core.errors import TransportError
from stratakv.core.ids import RequestId
from stratakv.disagg.deadlines import Due, HandOffLimits, prompt_identity, session_name
from stratakv.disagg.messages import Abort, Arrival, Attempt, Ended, Message, PartWritten, Reserve
from stratakv.disagg.peers import MessageReceived, Peers
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
from stratakv.disagg.transport import Disconnected, Done, Failed, Lost, PeerId, TransferId, Writes
from stratakv.engine.request import Phase, Request
from stratakv.engine.roles import (
    ChunkComputed,
    Computed,
    FirstToken,
    PartSent,
    Sent,
    Start,
    TransferEvent,
    TransferFailed,
)


@dataclass(slots=True, eq=False)
class _Sending:
    """``request``: of this engine, once it has come, with the identity of its ``prompt`` and the
    length of that, ``tokens``.
    ``asked`` and ``peer``: for whom, once that is known. ``sent``: the page index up to which each
    group's pages were written, and ``writes`` those under way; ``proved``: the last one is among
    them, with the proof behind it. A session that has ended waits here for the side that does not
    know of it, until ``until_s``."""

    session: Session
    until_s: float
    request: RequestId | None = None
    prompt: str = ""
    tokens: int = 0
    asked: Reserve | None = None
    peer: PeerId | None = None
    sent: list[int] = field(default_factory=list[int])
    writes: set[TransferId] = field(default_factory=set[TransferId])
    proved: bool = False

    def is_of(self, attempt: Attempt, peer: PeerId) -> bool:
        return self.asked is not None and (self.asked.attempt, self.peer) == (attempt, peer)


class PrefillRole:
    """Of one rank."""

    def __init__(self, peers: Peers, limits: HandOffLimits, clock: Clock | None = None) -> None:
        self._peers, self._limits = peers, limits
        self._clock = clock or MonotonicClock()
        self._sessions: dict[str, _Sending] = {}  # those that are not all written, by name
        self._requests: dict[RequestId, _Sending] = {}  # of which the engine knows no end
        self._writes: dict[TransferId, _Sending] = {}
        self._given: dict[
            _Sending, None
        ] = {}  # of which a part was given, and not reported as sent
        self._counts = SessionCounts()
        self._events: list[TransferEvent] = []
        self._due = Due()

    def __len__(self) -> int:
        """Sessions that have not ended, or whose end the other side does not know."""
        return len(self._all())

    def stats(self) -> SessionStats:
        return self._counts.stats([entry.session for entry in self._all()], None)

    def _all(self) -> list[_Sending]:
        return list(dict.fromkeys([*self._sessions.values(), *self._writes.values()]))

    # -- the engine's calls ----------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        name = session_name(request)
        entry = self._sessions.get(name)
        if entry is not None and entry.request is not None:
            if not entry.session.ended:
                taken = f"the session {name} is another request's"
                self._events.append(TransferFailed(request.id, taken))
                return
            entry = None  # another one of that name has left
        entry = entry or self._opened(name)
        entry.request = request.id
        entry.prompt, entry.tokens = prompt_identity(request), request.prompt_tokens
        self._requests[request.id] = entry
        self._agree(entry)

    def may_start(self, request: Request) -> Start:
        entry = self._requests.get(request.id)
        ready = entry is not None and entry.asked is not None and not entry.session.ended
        return Start.COMPUTE if ready else Start.WAIT

    def reserved(self, request: Request, pages: TransferPages) -> None:
        raise AssertionError(f"{request.id} receives {pages} where prompts are computed")

    def computed(
        self, request: Request, computed: Computed, pages: Callable[[], TransferPages]
    ) -> Phase:
        entry = self._requests.get(request.id)
        if entry is not None and entry.session.ended:
            entry = None  # ``poll`` reports it, or does when what is written has ended
        match computed:
            case ChunkComputed():
                if entry is not None:
                    self._write(entry, pages())
                return Phase.PREFILLING
            case FirstToken():
                if entry is not None:
                    self._write_last(entry, pages(), computed, request.cached)
                return Phase.TRANSFERRING
            case _:
                assert_never(computed)

    def left(self, request: Request) -> None:
        self._abandon(request, Aborted("prefill has given the request up"))

    def poll(self) -> Sequence[TransferEvent]:
        for event in self._peers.poll():
            match event:
                case MessageReceived(peer, message):
                    self._on_message(peer, message)
                case Done(transfer):
                    self._written(transfer, None)
                case Failed(transfer, reason):
                    self._written(transfer, reason)
                case Lost(peer, reason):
                    self._lose(peer, reason)
                case Disconnected(peer):
                    self._lose(peer, "its link has ended")
                case _:
                    assert_never(event)
        now_s = self._clock.now_s()
        if self._due.passed(now_s):
            self._expire(now_s)
        events, self._events = self._events, []
        return [*events, *self._parts_sent()]

    def _parts_sent(self) -> Iterator[TransferEvent]:
        """Of requests whose pages were given, and that no write reads any more."""
        for entry in [entry for entry in self._given if not entry.writes]:
            del self._given[entry]
            assert entry.request is not None
            yield PartSent(entry.request)

    # -- writing ---------------------------------------------------------------------------------

    def _write(self, entry: _Sending, source: TransferPages) -> None:
        """What of ``source`` is wanted and was not written before."""
        self._given[entry] = None
        writes = self._next(entry, source)
        if len(writes.sizes):
            assert entry.asked is not None
            assert entry.peer is not None
            more = PartWritten(entry.asked.attempt)
            self._begin(entry, self._peers.send(entry.peer, more, writes))

    def _write_last(
        self,
        entry: _Sending,
        source: TransferPages,
        first: FirstToken,
        cached: CachedTokens | None,
    ) -> None:
        """The rest, and behind it the proof that all is there."""
        self._given.pop(entry, None)  # its end is the answer
        writes = self._next(entry, source)
        assert entry.asked is not None
        assert entry.peer is not None
        had = TierTokens(0, 0, 0)
        if cached is not None:
            had = TierTokens(cached.device, cached.host, cached.storage)
        proof = Arrival(entry.asked.attempt, first, had)
        if self._begin(entry, self._peers.send(entry.peer, proof, writes)):
            entry.proved = True
            del self._sessions[entry.session.name]

    def _next(self, entry: _Sending, source: TransferPages) -> Writes:
        assert entry.asked is not None, f"{entry.request} was computed for nobody"
        assert entry.peer is not None
        entry.sent = entry.sent or [0] * len(source.groups)
        target = entry.asked.pages.part(entry.sent, source)
        entry.sent = source.reached(entry.sent)
        here, there = self._peers.places(entry.peer)
        return here.writes(source, there, target)

    def _begin(self, entry: _Sending, transfer: TransferId | None) -> bool:
        """``transfer``: None where the peer is lost, which ends the session; False then."""
        if entry.session.state is SessionState.TRANSFERRING:
            entry.session = entry.session.extended(self._clock.now_s())
        else:
            self._move(entry, TransferBegun())
        if transfer is None:
            self._fail(entry, Aborted(f"{entry.peer} is lost", FailureCause.PEER_LOST))
            return False
        entry.writes.add(transfer)
        self._writes[transfer] = entry
        return True

    def _written(self, transfer: TransferId, failure: str | None) -> None:
        """A write has ended, and perhaps it was the last one that reads the request's pages."""
        entry = self._writes.pop(transfer, None)
        if entry is None:
            return  # words alone
        entry.writes.remove(transfer)
        if failure is not None:
            self._move(entry, Aborted(failure, FailureCause.PEER_LOST))
        if entry.writes:
            return
        if entry.proved:
            self._move(entry, Arrived(entry.session.name))
        match entry.session.state:
            case SessionState.SUCCESS:
                assert entry.request is not None
                self._requests.pop(entry.request, None)
                self._events.append(Sent(entry.request))
            case SessionState.FAILED:
                self._report_failure(entry)
            case _:
                pass  # a part

    def _report_failure(self, entry: _Sending) -> None:
        """Where the engine does not know of it."""
        if entry.request is not None and self._requests.pop(entry.request, None) is not None:
            self._given.pop(entry, None)
            self._events.append(TransferFailed(entry.request, entry.session.reason))

    # -- for several ranks (``agreeing_role``) ---------------------------------------------------

    def concerns(self, request: Request) -> bool:
        del request  # all of them
        return True

    def state(self, request: Request) -> SessionState | None:
        entry = self._requests.get(request.id)
        if entry is None:
            return None
        return SessionState.TRANSFERRING if entry.session.ended else entry.session.state

    def abort(self, request: Request, reason: str) -> None:
        self._abandon(request, Aborted(reason, FailureCause.RANK))

    # -- words of decode -------------------------------------------------------------------------

    def _on_message(self, peer: PeerId, message: Message) -> None:
        match message:
            case Reserve():
                self._ask(peer, message)
            case Abort():
                self._abort(peer, message)
            case Arrival() | Ended() | PartWritten():
                self._peers.disconnect(peer, "it sends pages to an engine that computes prompts")
            case _:
                assert_never(message)

    def _ask(self, peer: PeerId, asked: Reserve) -> None:
        name = asked.attempt.session
        entry = self._sessions.get(name)
        if entry is not None and entry.asked is not None:
            self._refuse(peer, asked.attempt, f"{name} is computed for {entry.peer}")
            return
        if entry is not None and entry.session.ended:
            del self._sessions[entry.session.name]
            self._refuse(peer, asked.attempt, entry.session.reason)
            return
        entry = entry or self._opened(name)
        entry.asked, entry.peer = asked, peer
        self._agree(entry)

    def _agree(self, entry: _Sending) -> None:
        """Both sides have come, or one of them."""
        if entry.session.ended:  # decode has given it up before it came
            if entry.request is not None:
                del self._sessions[entry.session.name]
                self._report_failure(entry)
            return
        if entry.asked is None or entry.peer is None:
            return
        try:
            self._peers.places(entry.peer)[1].verify(entry.asked.pages, self._peers.spec)
            there = entry.asked.prompt, entry.asked.pages.tokens
            if entry.request is not None and (entry.prompt, entry.tokens) != there:
                raise TransportError(f"{entry.session.name} is another prompt there")
        except TransportError as error:
            self._fail(entry, Aborted(str(error), FailureCause.REFUSED))
            return
        self._move(entry, Agreed())

    def _abort(self, peer: PeerId, message: Abort) -> None:
        attempt = message.attempt
        name, aborted = attempt.session, Aborted(message.reason, FailureCause.PEER)
        entry = self._sessions.get(name)
        if entry is not None and entry.is_of(attempt, peer):
            self._fail(entry, aborted)
            return
        if not message.reserved and (entry is None or entry.asked is None):
            entry = entry or self._opened(name)
            if entry.session.ended:
                del self._sessions[entry.session.name]  # both know
            else:
                self._move(entry, aborted)
                self._agree(entry)
            return
        writes = any(each.is_of(attempt, peer) for each in self._writes.values())
        if message.reserved and not writes:  # otherwise the answer is behind them
            self._refuse(peer, attempt, message.reason)

    # -- ends ------------------------------------------------------------------------------------

    def _lose(self, peer: PeerId, reason: str) -> None:
        """What it has asked for and is not proved; of what is, its writes tell."""
        for entry in list(self._sessions.values()):
            if entry.peer == peer:
                lost = Aborted(f"{peer} is lost: {reason}", FailureCause.PEER_LOST)
                self._fail(entry, lost)

    def _fail(self, entry: _Sending, aborted: Aborted) -> None:
        """End what is not proved, for both sides."""
        self._give_up(entry, aborted)
        if not entry.writes:
            self._report_failure(entry)

    def _give_up(self, entry: _Sending, aborted: Aborted) -> None:
        """Decode hears of it, behind what is being written, or when it asks."""
        self._move(entry, aborted)
        if entry.asked is None or entry.peer is None:
            entry.until_s = self._clock.now_s() + self._limits.sessions.bootstrap_s
            self._due.add(entry.until_s)
            return
        del self._sessions[entry.session.name]
        self._refuse(entry.peer, entry.asked.attempt, entry.session.reason)

    def _refuse(self, peer: PeerId, attempt: Attempt, reason: str) -> None:
        self._peers.send(peer, Ended(attempt, reason))

    def _expire(self, now_s: float) -> None:
        for entry in self._all():
            expired = entry.session.expire(now_s)
            if entry.writes:
                if now_s < entry.session.deadline_s:
                    self._due.add(entry.session.deadline_s)
                elif entry.peer is not None:
                    self._peers.disconnect(entry.peer, "it does not take what is written in time")
            elif entry.session.ended:
                if now_s >= entry.until_s:
                    del self._sessions[entry.session.name]
                else:
                    self._due.add(entry.until_s)
            elif expired.ended:
                self._fail(entry, Aborted(expired.reason, FailureCause.TIMEOUT))
            else:
                self._due.add(expired.deadline_s)

    # -- sessions --------------------------------------------------------------------------------

    def _abandon(self, request: Request, aborted: Aborted) -> None:
        entry = self._requests.get(request.id)
        if entry is None or entry.proved or entry.session.ended:
            return  # what is written with its proof is not called off
        if not entry.writes:
            del self._requests[request.id]
        self._give_up(entry, aborted)

    def _opened(self, name: str) -> _Sending:
        now_s = self._clock.now_s()
        session = Session.opened(name, self._limits.sessions, now_s)
        entry = self._sessions[name] = _Sending(session, session.deadline_s)
        self._due.add(session.deadline_s)
        return entry

    def _move(self, entry: _Sending, event: SessionEvent) -> None:
        before, entry.session = entry.session, entry.session.after(event, self._clock.now_s())
        self._counts.moved(before, entry.session)
        self._due.add(entry.session.deadline_s)
