"""Computes prompts for other engines, and writes each chunk's pages there while it goes on.

Owns the sessions of its requests and what is being written. Pages here may be read until their
writes have ended, and until then the engine learns nothing. Must not know how words and bytes
travel (``peers``).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import assert_never

from stratakv.cache.footprint import TransferPages
from stratakv.cache.records import CachedTokens
from stratakv.core.clock import Clock, MonotonicClock
from stratakv.core.errors import RequestError, TransportError
from stratakv.core.ids import RequestId
from stratakv.disagg.deadlines import Due, HandOffLimits, session_name
from stratakv.disagg.ended_sessions import FAILED_OVER, HANDED_OVER, EndedSessions, How
from stratakv.disagg.messages import Abort, Arrival, Ended, Leave, Message, PartWritten, Reserve
from stratakv.disagg.open_sessions import OpenSessions
from stratakv.disagg.peers import MessageReceived, Peers
from stratakv.disagg.sending import CLAIM_LOOKS, ClaimDue, PagesWanted, Sending, tiers_of
from stratakv.disagg.session import (
    Aborted,
    Agreed,
    Arrived,
    FailureCause,
    Session,
    SessionEvent,
    SessionState,
)
from stratakv.disagg.statistics import SessionCounts, SessionStats
from stratakv.disagg.transport import Disconnected, Done, Failed, Lost, PeerId, TransferId
from stratakv.engine.request import Phase, Prompt, Request
from stratakv.engine.roles import (
    ChunkComputed,
    Computed,
    FirstToken,
    MayStart,
    PartSent,
    RoleEvent,
    Sent,
    Start,
    TransferFailed,
)


class PrefillRole:
    """Of one rank."""

    def __init__(self, peers: Peers, limits: HandOffLimits, clock: Clock | None = None) -> None:
        self._peers, self._limits = peers, limits
        self._clock = clock or MonotonicClock()
        self._sessions = OpenSessions(limits.peer, peers.uses)  # not all written
        self._requests: dict[RequestId, Sending] = {}  # of which the engine knows no end
        self._returned: dict[RequestId, Sending] = {}  # given to it, and not yet arrived
        self._arrived: set[RequestId] = set()
        self._writes: dict[TransferId, Sending] = {}
        self._given: dict[Sending, None] = {}  # of which a part is not reported as sent
        self._ended = EndedSessions(limits.peer.ended, limits.sessions.bootstrap_s)
        self._counts = SessionCounts()
        self._submit: Callable[[Prompt], None] | None = None
        self._events: list[RoleEvent] = []
        self._due, self._looks = Due(), 0

    def __len__(self) -> int:
        """Sessions that have not ended, or whose end the other side does not know."""
        return len(self._all()) + len(self._ended)

    def submit_to(self, submit: Callable[[Prompt], None]) -> None:
        """Who takes what decode sends back, on the first rank; RequestError: it never could."""
        self._submit = submit

    def stats(self) -> SessionStats:
        sessions = [entry.session for entry in self._all()]
        return self._counts.stats(sessions, None, self._peers.counts())

    def _all(self) -> list[Sending]:
        return list(dict.fromkeys([*self._sessions.entries(), *self._writes.values()]))

    # -- the engine's calls ----------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        self._returned.pop(request.id, None)
        self._arrived.add(request.id)
        name = session_name(request.prompt)
        entry, reason = self._sessions.get(name), self._ended.arrived(name, self._clock.now_s())
        if reason is not None:
            self._events.append(TransferFailed(request.id, reason))
            return
        if entry is not None and entry.request is not None:
            taken = f"the session {name} is another request's"
            self._events.append(TransferFailed(request.id, taken))
            return
        entry = entry or self._opened(name)
        entry.bind(request)
        self._requests[request.id] = entry
        self._agree(entry)

    def may_start(self, request: Request) -> Start:
        entry = self._requests.get(request.id)
        ready = entry is not None and entry.wanted is not None and not entry.session.ended
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

    def left(self, prompt: Prompt) -> None:
        if prompt.id in self._returned:
            self._never_comes(prompt.id, FAILED_OVER)
        elif prompt.id in self._arrived:
            self._arrived.remove(prompt.id)
            self._abandon(prompt.id, Aborted("prefill has given the request up"))
        else:
            self._end_before_it_came(session_name(prompt))

    def _end_before_it_came(self, name: str) -> None:
        """The engine has failed over a client's request: decode waits for it, or will ask."""
        entry = self._sessions.get(name)
        if entry is not None and entry.request is None:
            self._fail(entry, Aborted(FAILED_OVER))
        elif entry is None and self._ended.arrived(name, self._clock.now_s()) is None:
            self._ended_early(name, None, FAILED_OVER)

    def poll(self) -> Sequence[RoleEvent]:
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
        now_s, self._looks = self._clock.now_s(), self._looks + 1
        if self._due.passed(now_s):
            self._expire(now_s)
        events, self._events = self._events, []
        return [*events, *self._parts_sent()]

    def _parts_sent(self) -> Iterator[RoleEvent]:
        """Of requests whose pages were given, and that no write reads any more."""
        for entry in [entry for entry in self._given if not entry.writes]:
            del self._given[entry]
            assert entry.request is not None
            yield PartSent(entry.request)

    # -- writing ---------------------------------------------------------------------------------

    def _write(self, entry: Sending, source: TransferPages) -> None:
        """What is not yet written; where another rank does that, the message alone."""
        self._given[entry] = None
        target = entry.advance(source)
        if any(len(group.pages) for group in target.groups):
            wanted = entry.computed_for
            writes = self._peers.pairing(wanted.peer).writes(source, target)
            more = PartWritten(wanted.attempt)
            self._begin(entry, self._peers.send(wanted.peer, more, writes))

    def _write_last(
        self,
        entry: Sending,
        source: TransferPages,
        first: FirstToken,
        cached: CachedTokens | None,
    ) -> None:
        """The rest, and behind it the proof that all is there."""
        self._given.pop(entry, None)  # its end is the answer
        wanted, target = entry.computed_for, entry.advance(source)
        writes = self._peers.pairing(wanted.peer).writes(source, target)
        proof = Arrival(wanted.attempt, first, tiers_of(cached))
        if self._begin(entry, self._peers.send(wanted.peer, proof, writes)):
            entry.prove()
            self._sessions.remove(entry)

    def _begin(self, entry: Sending, transfer: TransferId | None) -> bool:
        """``transfer``: None where the peer is lost, which ends the session; False then."""
        self._count(entry, entry.transfer(self._clock.now_s()))
        if transfer is None:
            self._fail(entry, Aborted("the peer is lost", FailureCause.PEER_LOST))
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
                name, peer = entry.session.name, entry.computed_for.peer
                self._ended.add(name, How.HANDED_OVER, peer, HANDED_OVER, self._clock.now_s())
            case SessionState.FAILED:
                self._report_failure(entry)
            case _:
                pass  # a part

    def _report_failure(self, entry: Sending) -> None:
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
        self._abandon(request.id, Aborted(reason, FailureCause.RANK))

    # -- words of decode -------------------------------------------------------------------------

    def _on_message(self, peer: PeerId, message: Message) -> None:
        match message:
            case Reserve():
                self._ask(peer, message)
            case Abort():
                self._abort(peer, message)
            case Arrival() | Ended() | PartWritten() | Leave():
                self._peers.disconnect(peer, "it sends pages to an engine that computes prompts")
            case _:
                assert_never(message)

    def _ask(self, peer: PeerId, asked: Reserve) -> None:
        name = asked.attempt.session
        over = self._ended.asked(name, self._clock.now_s())
        if reason := self._sessions.refusal(peer, asked) if over is None else over:
            if over is None:
                self._counts.refused()
            self._peers.send(peer, Ended(asked.attempt, reason))
            return
        entry = self._sessions.get(name) or self._opened(name)
        claim = ClaimDue(self._clock.now_s() + self._limits.claim_s, self._looks + CLAIM_LOOKS)
        self._sessions.want(entry, PagesWanted(peer, asked, claim))
        self._agree(entry)
        if asked.again is not None and not entry.session.ended:
            self._compute_again(entry, asked.again.prompt(name))

    def _compute_again(self, entry: Sending, prompt: Prompt) -> None:
        """Give this engine a prompt of which decode alone knows all tokens."""
        if self._submit is None:
            return  # of several ranks the first one submits
        self._returned[prompt.id] = entry
        try:
            self._submit(prompt)
        except RequestError as error:
            self._never_comes(prompt.id, str(error))

    def _never_comes(self, request: RequestId, reason: str) -> None:
        """What decode has sent back is refused, or has failed on its way into this engine."""
        entry = self._returned.pop(request)
        if not entry.session.ended:
            self._fail(entry, Aborted(reason, FailureCause.REFUSED))
        self._ended.forget(entry.session.name)

    def _agree(self, entry: Sending) -> None:
        """Both sides have come, or one of them."""
        if entry.wanted is None:
            return
        try:
            there = self._peers.pairing(entry.wanted.peer).places
            there.verify(entry.wanted.reserve.pages, self._peers.spec)
            entry.verify()
        except TransportError as error:
            self._fail(entry, Aborted(str(error), FailureCause.REFUSED))
            return
        self._move(entry, Agreed())
        if entry.request is not None:
            self._events.append(MayStart(entry.request))

    def _abort(self, peer: PeerId, message: Abort) -> None:
        attempt = message.attempt
        name, aborted = attempt.session, Aborted(message.reason, FailureCause.PEER)
        if (entry := self._sessions.get(name)) is not None and entry.is_of(attempt, peer):
            self._fail(entry, aborted)
            return
        if not message.reserved and (entry is None or entry.wanted is None):
            if self._ended.given_up(name, self._clock.now_s()):
                return  # both know
            entry = entry or self._opened(name)
            self._move(entry, aborted)
            self._sessions.remove(entry)
            if entry.request is None:
                self._ended_early(name, peer, message.reason)
            self._report_failure(entry)
            return
        writes = any(each.is_of(attempt, peer) for each in self._writes.values())
        if message.reserved and not writes:  # otherwise the answer is behind them
            self._peers.send(peer, Ended(attempt, message.reason))

    # -- ends ------------------------------------------------------------------------------------

    def _lose(self, peer: PeerId, reason: str) -> None:
        """What it has asked for and is not proved; what is, its writes report."""
        for entry in list(self._sessions.entries()):
            if entry.wanted is not None and entry.wanted.peer == peer:
                self._fail(entry, Aborted(f"{peer} is lost: {reason}", FailureCause.PEER_LOST))

    def _fail(self, entry: Sending, aborted: Aborted) -> None:
        """End what is not proved, for both sides."""
        self._give_up(entry, aborted)
        if not entry.writes:
            self._report_failure(entry)

    def _give_up(self, entry: Sending, aborted: Aborted) -> None:
        """Decode is notified of it, behind what is being written, or when it asks."""
        self._move(entry, aborted)
        self._sessions.remove(entry)
        if entry.wanted is None:
            self._ended_early(entry.session.name, None, entry.session.reason)
            return
        self._peers.send(entry.wanted.peer, Ended(entry.wanted.attempt, entry.session.reason))
        again = entry.wanted.reserve.again is not None
        if entry.request is None and (again or aborted.cause is FailureCause.TIMEOUT):
            # It may be on its way to this engine, which several ranks take a step for.
            self._ended_early(entry.session.name, entry.wanted.peer, entry.session.reason)

    def _ended_early(self, name: str, peer: PeerId | None, reason: str) -> None:
        """``peer``: who knows; None: this side alone."""
        how = How.GIVEN_UP_HERE if peer is None else How.GIVEN_UP_THERE
        self._due.add(self._ended.add(name, how, peer, reason, self._clock.now_s()))

    def _expire(self, now_s: float) -> None:
        for entry in self._all():
            expired = entry.expire(now_s, self._looks)
            if entry.writes:
                if now_s < entry.session.deadline_s:
                    self._due.add(entry.session.deadline_s)
                else:
                    late = "it does not take what is written in time"
                    self._peers.disconnect(entry.computed_for.peer, late)
            elif expired.ended:
                self._fail(entry, Aborted(expired.reason, FailureCause.TIMEOUT))
            else:
                self._due.add(entry.deadline_s)
        self._due.add(self._ended.expire(now_s))

    # -- sessions --------------------------------------------------------------------------------

    def _abandon(self, request: RequestId, aborted: Aborted) -> None:
        entry = self._requests.get(request)
        if entry is None or entry.proved or entry.session.ended:
            return  # what is written with its proof is not called off
        if not entry.writes:
            del self._requests[request]
        self._give_up(entry, aborted)

    def _opened(self, name: str) -> Sending:
        session = Session.opened(name, self._limits.sessions, self._clock.now_s())
        self._due.add(session.deadline_s)
        return self._sessions.add(Sending(session))

    def _move(self, entry: Sending, event: SessionEvent) -> None:
        self._count(entry, entry.move(event, self._clock.now_s()))

    def _count(self, entry: Sending, before: Session) -> None:
        self._counts.moved(before, entry.session)
        self._due.add(entry.deadline_s)
