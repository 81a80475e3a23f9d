"""Joining where each side has several ranks, as rank 0 leads it: a call of all ranks after the
other, none of which waits for anything.

Owns the exchange on both sides. Must not know sessions, what a rank does when it is called
(``ranked_peers``), nor how introductions travel.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from stratakv.core.errors import TransportError
from stratakv.disagg.joining import (
    Again,
    Carry,
    JoinAnswer,
    Joined,
    JoinRefused,
    ask_to_leave,
    one_of,
    reason_of,
)
from stratakv.disagg.peers import Peers
from stratakv.disagg.ranked_peers import Describing, RankedPeers, RanksAnswer
from stratakv.disagg.rests import Rests
from stratakv.disagg.transport import PeerId
from stratakv.engine.ranks.peer_calls import PeerCall, PeerVerb

Send: TypeAlias = Callable[[PeerCall], None]
"""Have every rank do it at the end of a step."""


class RankedJoiner:
    """As ``PeerJoiner``, of a side of several ranks. ``carry``: rank 0's, None on the
    others, which only do as they are asked; ``rests``: rank 0's are those that count."""

    def __init__(
        self, peers: Sequence[Peers], first: int, send: Send, carry: Carry | None, rests: Rests
    ) -> None:
        self.links = RankedPeers(peers, first, self._answered, self._described)
        self._send, self._carry, self._rests = send, carry, rests
        self._asked: dict[PeerId, Future[JoinAnswer] | None] = {}  # None: a call is under way
        self._resting: set[PeerId] = set()  # who are refused again, for the last reason
        self._describing: set[PeerId] = set()
        self._parting: set[PeerId] = set()  # of which the ranks are being asked
        self._refused: list[tuple[PeerId, str]] = []

    def ask(self, peer: PeerId) -> None:
        if self._carry is None or peer in self._asked or self.links.knows(peer):
            return
        if self._rests.pauses(peer):
            return
        self._asked[peer] = None
        reason = self._rests.reason(peer)
        if reason is None:
            self._send(PeerCall(PeerVerb.INTRODUCE, peer))
        else:
            self._resting.add(peer)
            self._send(_refusal(peer, reason))

    def refused(self) -> Sequence[tuple[PeerId, str]]:
        """The same on every rank, in the same step."""
        for peer, answer in self._asked.items():
            if answer is not None and answer.done():
                self._asked[peer] = None
                self._send(_next_call(peer, answer.result()))
        refused, self._refused = self._refused, []
        return refused

    def part(self, peer: PeerId) -> None:
        if self._carry is not None and peer not in self._parting:
            self._parting.add(peer)
            self._send(PeerCall(PeerVerb.PART, peer))

    def waits_for(self, peer: PeerId) -> str:
        return self._rests.waits_for(peer)

    def _described(self, peer: PeerId) -> None:
        if peer in self._describing:
            self._describing.remove(peer)
            self._send(PeerCall(PeerVerb.INTRODUCE, peer))

    def _answered(self, asked: PeerCall, answer: RanksAnswer) -> None:
        peer = PeerId(asked.peer)
        match asked.verb:
            case PeerVerb.PART:
                self._parting.discard(peer)
            case PeerVerb.INTRODUCE if not isinstance(answer, JoinRefused | Again):
                if self._carry is not None:
                    self._go_on(peer, answer, self._carry)
            case PeerVerb.INTRODUCE | PeerVerb.MEET | PeerVerb.LEAVE:
                self._asked.pop(peer, None)
                if isinstance(answer, JoinRefused):
                    self._refuse(peer, answer.reason)
                elif isinstance(answer, Joined):
                    self._rests.joined(peer)
                elif asked.verb is PeerVerb.LEAVE:  # else this side itself is not ready
                    self._rests.pause(peer)
            case _:
                assert_never(asked.verb)

    def _go_on(self, peer: PeerId, answer: Joined | Describing, carry: Carry) -> None:
        """Rank 0, with a peer that no rank refuses."""
        if isinstance(answer, Joined):
            self._asked[peer] = carry(peer, answer.introductions)
            return
        self._describing.add(peer)
        if self.links.is_described(peer):  # another rank is not
            self._described(peer)

    def _refuse(self, peer: PeerId, reason: str) -> None:
        self._refused.append((peer, reason))
        if peer in self._resting:
            self._resting.remove(peer)
        else:
            self._rests.add(peer, reason)


def _next_call(peer: PeerId, answer: JoinAnswer) -> PeerCall:
    match answer:
        case Joined(introductions):
            return PeerCall(PeerVerb.MEET, peer, introductions)
        case JoinRefused(reason):
            return _refusal(peer, reason)
        case Again():
            return PeerCall(PeerVerb.LEAVE, peer)
        case _:
            assert_never(answer)


def _refusal(peer: PeerId, reason: str) -> PeerCall:
    return PeerCall(PeerVerb.LEAVE, peer, reason=reason or "it refuses")


@dataclass(slots=True, eq=False)
class _Call:
    """Of a peer that introduces itself. ``ours``: what it is answered with when all have met it."""

    theirs: tuple[bytes, ...]
    answer: "Future[JoinAnswer]"
    ours: Joined | None = None
    describing: bool = False


class RankedHost:
    """The other side of it: works with those that introduce themselves. Only rank 0's is asked."""

    def __init__(self, peers: Sequence[Peers], first: int, send: Send) -> None:
        self.links = RankedPeers(peers, first, self._answered, self._described)
        self._leads, self._send = peers[0], send
        self._calls: dict[PeerId, _Call] = {}

    def join(self, peer: PeerId, introductions: Sequence[bytes]) -> "Future[JoinAnswer]":
        """As ``join`` of one rank: later steps bring the answer."""
        answer: Future[JoinAnswer] = Future()
        answer.set_running_or_notify_cancel()  # who waits may leave
        theirs = tuple(introductions)
        try:
            one_of(theirs)
        except TransportError as error:
            answer.set_result(JoinRefused(reason_of(error)))
            return answer
        if peer in self._calls:
            answer.set_result(Again())
            return answer
        self._calls[peer] = _Call(theirs, answer)
        self._send(PeerCall(PeerVerb.INTRODUCE, peer, theirs))
        return answer

    def _described(self, peer: PeerId) -> None:
        call = self._calls.get(peer)
        if call is not None and call.describing:
            call.describing = False
            self._send(PeerCall(PeerVerb.INTRODUCE, peer, call.theirs))

    def _answered(self, asked: PeerCall, answer: RanksAnswer) -> None:
        peer = PeerId(asked.peer)
        call = self._calls.get(peer)
        if call is None:
            return  # of another rank's
        match answer:
            case Describing():
                call.describing = True
                if self.links.is_described(peer):  # another rank is not
                    self._described(peer)
            case Joined():
                if call.ours is None:
                    call.ours = answer
                    self._send(PeerCall(PeerVerb.MEET, peer, call.theirs))
                else:
                    self._end(peer, call.ours)
            case Again():
                ask_to_leave(self._leads)
                self._end(peer, answer)
            case JoinRefused():
                self._end(peer, answer)
            case _:
                assert_never(answer)

    def _end(self, peer: PeerId, answer: JoinAnswer) -> None:
        self._calls.pop(peer).answer.set_result(answer)
