"""Computes prompts for other engines, and writes their pages there.

Owns the sessions of its requests and what is being written. Pages here may be read until their
write has ended, and until then the engine learns nothing. Must not know how words and bytes
travel (``peers``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

from stratakv.cache.footprint import TransferPages
from stratakv.cache.records import TierTokens
from stratakv.core.clock import Clock, MonotonicClock
from stratakv.core.errors import TransportError
from stratakv.core.ids import RequestId
from stratakv.disagg.deadlines import Due, HandOffLimits, prompt_identity, session_name
from stratakv.disagg.messages import Abort, Arrival, Attempt, Ended, Message, Reserve
from stratakv.disagg.peers import MessageReceived, Peers
from stratakv.disagg.session import (
    Aborted,
    Agreed,
    Arrived,
    FailureCause,
    Session,
    SessionState,
    TransferBegun,
)
from stratakv.disagg.statistics import SessionCounts, SessionStats
from stratakv.disagg.transport import Disconnected, Done, Failed, Lost, PeerId, TransferId
from stratakv.engine.request import Phase, Request
from stratakv.engine.roles import FirstToken, Sent, Start, TransferEnd, TransferFailed


@dataclass(slots=True, eq=False)
class _Sending:
    """``request``: of this engine, once it has come, with the identity of its ``prompt`` and the
    length of that, ``tokens``.
    ``asked`` and ``peer``: for whom, once that is known. A session that has ended waits here for
    the side that does not know of it, until ``until_s``."""

    session: Session
    until_s: float
    request: RequestId | None = None
    prompt: str = ""
    tokens: int = 0
    asked: Reserve | None = None
    peer: PeerId | None = None


class PrefillRole:
    """Of one rank."""

    def __init__(self, peers: Peers, limits: HandOffLimits, clock: Clock | None = None) -> None:
        self._peers, self._limits = peers, limits
        self._clock = clock or MonotonicClock()
        self._sessions: dict[str, _Sending] = {}
        self._counts = SessionCounts()
        self._written: dict[TransferId, tuple[RequestId, _Sending]] = {}
        self._ends: list[TransferEnd] = []
        self._due = Due()

    def __len__(self) -> int:
        """Sessions that have not ended, or whose end the other side does not know."""
        return len(self._sessions) + len(self._written)

    def stats(self) -> SessionStats:
        waiting = [entry.session for entry in self._sessions.values()]
        written = [entry.session for _, entry in self._written.values()]
        return self._counts.stats([*waiting, *written], None)

    # -- the engine's calls ----------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        name = session_name(request)
        entry = self._sessions.get(name)
        if entry is not None and entry.request is not None:
            if not entry.session.ended:
                taken = f"the session {name} is another request's"
                self._ends.append(TransferFailed(request.id, taken))
                return
            entry = None  # another one of that name has left
        entry = entry or self._opened(name)
        entry.request = request.id
        entry.prompt, entry.tokens = prompt_identity(request), request.prompt_tokens
        self._agree(name, entry)

    def may_start(self, request: Request) -> Start:
        entry = self._of(request)
        ready = entry is not None and entry.asked is not None and not entry.session.ended
        return Start.COMPUTE if ready else Start.WAIT

    def reserved(self, request: Request, pages: TransferPages) -> None:
        raise AssertionError(f"{request.id} receives {pages} where prompts are computed")

    def prefilled(
        self, request: Request, first: FirstToken, pages: Callable[[], TransferPages]
    ) -> Phase:
        entry = self._sessions.pop(session_name(request))
        assert entry.request == request.id, f"{request.id} was computed for another one's session"
        assert entry.asked is not None, f"{request.id} was computed for nobody"
        assert entry.peer is not None
        self._move(entry, TransferBegun())
        here, there = self._peers.places(entry.peer)
        writes = here.writes(pages(), there, entry.asked.pages)
        cached = request.cached
        device, host, storage = 0, 0, 0
        if cached is not None:
            device, host, storage = cached.device, cached.host, cached.storage
        counts = TierTokens(device, host, storage)
        proof = Arrival(entry.asked.attempt, first, counts)
        transfer = self._peers.send(entry.peer, proof, writes)
        if transfer is None:
            self._move(entry, Aborted(f"{entry.peer} is lost", FailureCause.PEER_LOST))
            self._ends.append(TransferFailed(request.id, entry.session.reason))
        else:
            self._written[transfer] = request.id, entry
        return Phase.TRANSFERRING

    def left(self, request: Request) -> None:
        self._abandon(request, Aborted("prefill has given the request up"))

    def poll(self) -> Sequence[TransferEnd]:
        for event in self._peers.poll():
            match event:
                case MessageReceived(peer, message):
                    self._on_message(peer, message)
                case Done(transfer):
                    self._written_all(transfer)
                case Failed(transfer, reason):
                    self._not_written(transfer, reason)
                case Lost(peer, reason):
                    self._lose(peer, reason)
                case Disconnected(peer):
                    self._lose(peer, "its link has ended")
                case _:
                    assert_never(event)
        now_s = self._clock.now_s()
        if self._due.passed(now_s):
            self._expire(now_s)
        ends, self._ends = self._ends, []
        return ends

    # -- for several ranks (``agreeing_role``) ---------------------------------------------------

    def concerns(self, request: Request) -> bool:
        del request  # all of them
        return True

    def state(self, request: Request) -> SessionState | None:
        entry = self._of(request)
        if entry is not None and not entry.session.ended:
            return entry.session.state
        written = any(name == request.id for name, _ in self._written.values())
        return SessionState.TRANSFERRING if written else None

    def abort(self, request: Request, reason: str) -> None:
        self._abandon(request, Aborted(reason, FailureCause.RANK))

    # -- words of decode -------------------------------------------------------------------------

    def _on_message(self, peer: PeerId, message: Message) -> None:
        match message:
            case Reserve():
                self._ask(peer, message)
            case Abort():
                self._abort(peer, message)
            case Arrival() | Ended():
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
            del self._sessions[name]
            self._refuse(peer, asked.attempt, entry.session.reason)
            return
        entry = entry or self._opened(name)
        entry.asked, entry.peer = asked, peer
        self._agree(name, entry)

    def _agree(self, name: str, entry: _Sending) -> None:
        """Both sides have come, or one of them."""
        if entry.session.ended:  # decode has given it up before it came
            if entry.request is not None:
                del self._sessions[name]
                self._ends.append(TransferFailed(entry.request, entry.session.reason))
            return
        if entry.asked is None or entry.peer is None:
            return
        try:
            self._peers.places(entry.peer)[1].verify(entry.asked.pages, self._peers.spec)
            there = entry.asked.prompt, entry.asked.pages.tokens
            if entry.request is not None and (entry.prompt, entry.tokens) != there:
                raise TransportError(f"{name} is another prompt there")
        except TransportError as error:
            self._fail(name, entry, Aborted(str(error), FailureCause.REFUSED))
            return
        self._move(entry, Agreed())

    def _abort(self, peer: PeerId, message: Abort) -> None:
        attempt = message.attempt
        name, aborted = attempt.session, Aborted(message.reason, FailureCause.PEER)
        entry = self._sessions.get(name)
        if entry is not None and entry.asked is not None:
            if (entry.asked.attempt, entry.peer) == (attempt, peer):
                self._fail(name, entry, aborted)
                return
        elif not message.reserved:
            entry = entry or self._opened(name)
            if not entry.session.ended:
                self._move(entry, aborted)
                self._agree(name, entry)
            else:
                del self._sessions[name]  # both know
            return
        if message.reserved and not self._is_written(attempt, peer):
            self._refuse(peer, attempt, message.reason)

    def _is_written(self, attempt: Attempt, peer: PeerId) -> bool:
        """Whether its bytes are on their way, and the proof behind them."""
        return any(
            entry.asked is not None and (entry.asked.attempt, entry.peer) == (attempt, peer)
            for _, entry in self._written.values()
        )

    # -- ends ------------------------------------------------------------------------------------

    def _written_all(self, transfer: TransferId) -> None:
        found = self._written.pop(transfer, None)
        if found is not None:
            self._move(found[1], Arrived(found[1].session.name))
            self._ends.append(Sent(found[0]))

    def _not_written(self, transfer: TransferId, reason: str) -> None:
        found = self._written.pop(transfer, None)
        if found is not None:
            self._move(found[1], Aborted(reason, FailureCause.PEER_LOST))
            self._ends.append(TransferFailed(found[0], reason))

    def _lose(self, peer: PeerId, reason: str) -> None:
        """What it has asked for and is not written yet; of what is, its writes tell."""
        for name, entry in list(self._sessions.items()):
            if entry.peer == peer:
                lost = Aborted(f"{peer} is lost: {reason}", FailureCause.PEER_LOST)
                self._fail(name, entry, lost)

    def _fail(self, name: str, entry: _Sending, aborted: Aborted) -> None:
        """End what is not written, for both sides."""
        ends = entry.request is not None and not entry.session.ended
        self._give_up(name, entry, aborted)
        if ends and entry.request is not None:
            self._ends.append(TransferFailed(entry.request, aborted.reason))

    def _give_up(self, name: str, entry: _Sending, aborted: Aborted) -> None:
        """Decode hears of it, now or when it asks."""
        self._move(entry, aborted)
        if entry.asked is None or entry.peer is None:
            entry.until_s = self._clock.now_s() + self._limits.sessions.bootstrap_s
            self._due.add(entry.until_s)
            return
        del self._sessions[name]
        self._refuse(entry.peer, entry.asked.attempt, aborted.reason)

    def _refuse(self, peer: PeerId, attempt: Attempt, reason: str) -> None:
        self._peers.send(peer, Ended(attempt, reason))

    def _expire(self, now_s: float) -> None:
        for name, entry in list(self._sessions.items()):
            expired = entry.session.expire(now_s)
            if entry.session.ended:
                if now_s >= entry.until_s:
                    del self._sessions[name]
                    continue
                self._due.add(entry.until_s)
            elif expired.ended:
                self._fail(name, entry, Aborted(expired.reason, FailureCause.TIMEOUT))
            else:
                self._due.add(expired.deadline_s)
        for _, entry in self._written.values():
            if now_s < entry.session.deadline_s:
                self._due.add(entry.session.deadline_s)
            elif entry.peer is not None:
                self._peers.disconnect(entry.peer, "it does not take what is written in time")

    # -- sessions --------------------------------------------------------------------------------

    def _abandon(self, request: Request, aborted: Aborted) -> None:
        entry = self._of(request)
        if entry is not None:
            self._give_up(session_name(request), entry, aborted)

    def _of(self, request: Request) -> _Sending | None:
        """Its own session, and no other one of that name."""
        entry = self._sessions.get(session_name(request))
        return None if entry is None or entry.request != request.id else entry

    def _opened(self, name: str) -> _Sending:
        now_s = self._clock.now_s()
        session = Session.opened(name, self._limits.sessions, now_s)
        entry = self._sessions[name] = _Sending(session, session.deadline_s)
        self._due.add(session.deadline_s)
        return entry

    def _move(self, entry: _Sending, event: Agreed | TransferBegun | Arrived | Aborted) -> None:
        before, entry.session = entry.session, entry.session.after(event, self._clock.now_s())
        self._counts.moved(before, entry.session)
        self._due.add(entry.session.deadline_s)
