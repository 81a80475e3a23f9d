"""Joining where each side has several ranks: rank r of one works with rank r of the other, and a
peer is known on all ranks or on none. One process may stand for several ranks (``lanes``).

Owns the exchange as rank 0 leads it, in calls that every rank carries out in the same step, and the
slots of links in the ballot, by which all give up a peer that one has lost. Must not know sessions,
nor how introductions travel.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeAlias, assert_never

import numpy as np

from stratakv.agreement.agreement import DigestInputs
from stratakv.agreement.ballot import SLOTS, Ballot, BallotResult, SlotKind
from stratakv.core.errors import TransportError
from stratakv.disagg.joining import (
    Again,
    Carry,
    JoinAnswer,
    Joined,
    JoinRefused,
    decode_answer,
    encode_answer,
    one_of,
)
from stratakv.disagg.peers import Peers, StillEndingError
from stratakv.disagg.transport import PeerId
from stratakv.engine.peer_calls import PeerCall, PeerVerb

MOST: Final = SLOTS[SlotKind.LINK]
"""Peers at a time."""
OnAnswered: TypeAlias = Callable[[PeerCall, JoinAnswer], None]
CallPeers: TypeAlias = Callable[[PeerCall], Sequence[str]]
"""Have every rank do it; their reports. Rank 0's, between two steps."""


def _nothing(asked: PeerCall, answer: JoinAnswer) -> None:
    pass


class RankedPeers:
    """One process's part: of its ``peers``, of a rank each, it does what all ranks are asked to.
    ``first``: the first of these ranks. Votes in every ballot on those that are joined. ``then``:
    what follows here from what all have answered."""

    def __init__(self, peers: Sequence[Peers], first: int, then: OnAnswered = _nothing) -> None:
        self._peers, self._first, self._then = tuple(peers), first, then
        self._links: list[PeerId] = []

    # -- calls of all ranks ----------------------------------------------------------------------

    def call(self, asked: PeerCall) -> str:
        try:
            answer = self._answer(asked, PeerId(asked.peer))
        except StillEndingError:
            answer = Again()
        except TransportError as error:
            answer = JoinRefused(str(error))
        return encode_answer(answer).decode()

    def _answer(self, asked: PeerCall, peer: PeerId) -> JoinAnswer:
        match asked.verb:
            case PeerVerb.INTRODUCE:
                if asked.introductions:
                    for rank, one in enumerate(self._peers, self._first):
                        one.verify(peer, one_of(asked.introductions, rank))
                return Joined(tuple(one.introduce(peer) for one in self._peers))
            case PeerVerb.MEET:
                if len(self._links) == MOST:
                    return JoinRefused(f"{MOST} peers are joined already")
                for rank, one in enumerate(self._peers, self._first):
                    one.meet(peer, one_of(asked.introductions, rank))
                return Joined(())
            case PeerVerb.LEAVE:
                return JoinRefused(asked.reason) if asked.reason else Again()
            case PeerVerb.PART:
                used = any(one.uses.in_use(peer) for one in self._peers)
                return JoinRefused("it has a session") if used else Joined(())
            case _:
                assert_never(asked.verb)

    def answered(self, asked: PeerCall, reports: Sequence[str]) -> None:
        answer, peer = together(reports), PeerId(asked.peer)
        if asked.verb is PeerVerb.PART:
            self._part(peer, answer)
        elif not isinstance(answer, Joined):
            self._disconnect(peer)
        elif asked.verb is PeerVerb.MEET:
            self._links.append(peer)
        self._then(asked, answer)

    def _part(self, peer: PeerId, answer: JoinAnswer) -> None:
        if isinstance(answer, Joined):
            self._disconnect(peer, "it had no session")
            return
        for one in self._peers:
            one.uses.kept(peer)

    # -- ballots ---------------------------------------------------------------------------------

    def figures(self) -> DigestInputs:
        """For ranks to compare."""
        return {"links": len(self._links)}

    def vote(self, ballot: Ballot) -> None:
        known = [self.knows(peer) for peer in self._links]
        ballot.vote(SlotKind.LINK, np.array(known, np.int64))

    def agreed(self, result: BallotResult) -> None:
        known = result.least(SlotKind.LINK)[: len(self._links)].tolist()
        for peer, everywhere in zip(self._links, known, strict=True):
            if not everywhere:
                self._disconnect(peer, "another rank has lost it")
        self._links = [peer for peer, kept in zip(self._links, known, strict=True) if kept]

    def knows(self, peer: PeerId) -> bool:
        """Whether messages can be sent to all its ranks."""
        return all(one.knows(peer) for one in self._peers)

    def _disconnect(self, peer: PeerId, reason: str = "") -> None:
        for one in self._peers:
            one.disconnect(peer, reason)


class RankedJoiner:
    """As ``PeerJoiner``, of a side of several ranks. ``send``: have all do it at the end of a step;
    ``carry``: rank 0's, None on the others, which only do as they are asked."""

    def __init__(
        self,
        peers: Sequence[Peers],
        first: int,
        send: Callable[[PeerCall], None],
        carry: Carry | None,
    ) -> None:
        self.links = RankedPeers(peers, first, self._answered)
        self._send, self._carry = send, carry
        self._asked: dict[PeerId, Future[JoinAnswer] | None] = {}  # None: a call is under way
        self._refused: list[tuple[PeerId, str]] = []
        self._parting: set[PeerId] = set()  # of which the ranks are being asked

    def ask(self, peer: PeerId) -> None:
        if self._carry is None or peer in self._asked or self.links.knows(peer):
            return
        self._asked[peer] = None
        self._send(PeerCall(PeerVerb.INTRODUCE, peer))

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

    def _answered(self, asked: PeerCall, answer: JoinAnswer) -> None:
        peer = PeerId(asked.peer)
        if asked.verb is PeerVerb.PART:
            self._parting.discard(peer)
            return
        match answer:
            case Joined(introductions):
                if asked.verb is PeerVerb.INTRODUCE:
                    if self._carry is not None:
                        self._asked[peer] = self._carry(peer, introductions)
                    return
            case JoinRefused(reason):
                self._refused.append((peer, reason))
            case Again():
                pass
            case _:
                assert_never(answer)
        self._asked.pop(peer, None)


def _next_call(peer: PeerId, answer: JoinAnswer) -> PeerCall:
    match answer:
        case Joined(introductions):
            return PeerCall(PeerVerb.MEET, peer, introductions)
        case JoinRefused(reason):
            return PeerCall(PeerVerb.LEAVE, peer, reason=reason or "it refuses")
        case Again():
            return PeerCall(PeerVerb.LEAVE, peer)
        case _:
            assert_never(answer)


def join_ranks(call: CallPeers, peer: PeerId, introductions: Sequence[bytes]) -> JoinAnswer:
    """As ``join``, at once: on rank 0 of a side that computes prompts."""
    theirs = tuple(introductions)
    try:
        one_of(theirs)
    except TransportError as error:
        return JoinRefused(str(error))
    ours = together(call(PeerCall(PeerVerb.INTRODUCE, peer, theirs)))
    if not isinstance(ours, Joined):
        return ours
    met = together(call(PeerCall(PeerVerb.MEET, peer, theirs)))
    return ours if isinstance(met, Joined) else met


def together(reports: Sequence[str]) -> JoinAnswer:
    """What all ranks answer: who refuses does so for all, and introductions are in their order."""
    answers = [decode_answer(report.encode()) for report in reports]
    for answer in answers:
        if isinstance(answer, JoinRefused):
            return answer
    found = tuple(one for each in answers if isinstance(each, Joined) for one in each.introductions)
    return Again() if any(isinstance(each, Again) for each in answers) else Joined(found)
