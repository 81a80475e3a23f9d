"""One process's part in what all ranks of a side do with a peer: rank r of one side works with rank
r of the other, and a peer is known on all ranks or on none. One process may stand for several ranks
(``lanes``).

Owns the calls that every rank carries out in the same step, and the slots of links in the ballot,
by which all give up a peer that one has lost. A rank is described to a peer on a thread: calls only
begin that, and collect it. Must not know sessions, nor who asks (``ranked_joining``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias, assert_never

import numpy as np

from stratakv.agreement.agreement import DigestInputs
from stratakv.agreement.ballot import SLOTS, Ballot, BallotResult, SlotKind
from stratakv.core.errors import TransportError
from stratakv.disagg.joining import (
    Again,
    JoinAnswer,
    Joined,
    JoinRefused,
    decode_report,
    encode_answer,
    one_of,
    reason_of,
)
from stratakv.disagg.peers import Peers, StillEndingError
from stratakv.disagg.transport import PeerId
from stratakv.engine.ranks.peer_calls import PeerCall, PeerVerb

MOST: Final = SLOTS[SlotKind.LINK]
"""Peers at a time."""


@dataclass(frozen=True, slots=True)
class Describing:
    """Some rank is still being described to the peer: ask again when it is."""


RanksAnswer: TypeAlias = JoinAnswer | Describing
OnAnswered: TypeAlias = Callable[[PeerCall, RanksAnswer], None]
OnDescribed: TypeAlias = Callable[[PeerId], None]
_DESCRIBING: Final = ""
"""As a report: any other is an answer's."""


def _nothing(*_: object) -> None:
    pass


class RankedPeers:
    """Of ``peers``, of a rank each, it does what all ranks are asked to. ``first``: the first of
    these ranks. Votes in every ballot on those that are joined. ``then``: what follows here from
    what all have answered; ``described``: from the end of what an answer has waited for here."""

    def __init__(
        self,
        peers: Sequence[Peers],
        first: int,
        then: OnAnswered = _nothing,
        described: OnDescribed = _nothing,
    ) -> None:
        self._peers, self._first = tuple(peers), first
        self._then, self._on_described = then, described
        self._links: list[PeerId] = []
        self._words: dict[PeerId, list[bytes | TransportError | None]] = {}  # None: not yet

    # -- calls of all ranks ----------------------------------------------------------------------

    def call(self, asked: PeerCall) -> str:
        try:
            answer = self._answer(asked, PeerId(asked.peer))
        except StillEndingError:
            answer = Again()
        except TransportError as error:
            answer = JoinRefused(reason_of(error))
        return _DESCRIBING if isinstance(answer, Describing) else encode_answer(answer).decode()

    def _answer(self, asked: PeerCall, peer: PeerId) -> RanksAnswer:
        match asked.verb:
            case PeerVerb.INTRODUCE:
                if peer in self._words:
                    return self._introduced(peer)
                self._expect_place(peer, asked.introductions)
                return Describing()
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

    def _expect_place(self, peer: PeerId, theirs: Sequence[bytes]) -> None:
        """Nobody begins where another rank cannot: it would have to be undone, and the next attempt
        would find it so."""
        for rank, one in enumerate(self._peers, self._first):
            if theirs:
                one.verify(peer, one_of(theirs, rank))
            one.expect_place(peer)

    def _begin(self, peer: PeerId) -> None:
        for at, one in enumerate(self._peers):
            one.introduce_then(peer, partial(self._described, peer, at))
        self._words[peer] = [None] * len(self._peers)

    def _described(self, peer: PeerId, at: int, found: bytes | TransportError) -> None:
        words = self._words.get(peer)
        if words is None:
            return  # it has been given up
        words[at] = found
        if self.is_described(peer):
            self._on_described(peer)

    def _introduced(self, peer: PeerId) -> RanksAnswer:
        found = list[bytes]()
        for words in self._words[peer]:
            match words:
                case None:
                    return Describing()
                case TransportError():
                    raise words
                case bytes():
                    found.append(words)
        return Joined(tuple(found))

    def is_described(self, peer: PeerId) -> bool:
        """Whether no rank of this process is being described to it."""
        return None not in self._words.get(peer, ())

    def answered(self, asked: PeerCall, reports: Sequence[str]) -> None:
        answer, peer = together(reports), PeerId(asked.peer)
        if asked.verb is PeerVerb.PART:
            self._part(peer, answer)
        elif isinstance(answer, Describing):
            if peer not in self._words:
                self._begin(peer)
        else:
            self._words.pop(peer, None)
            if not isinstance(answer, Joined):
                self._disconnect(peer)
            elif asked.verb is PeerVerb.MEET:
                self._links.append(peer)
        self._then(asked, answer)

    def _part(self, peer: PeerId, answer: RanksAnswer) -> None:
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


def together(reports: Sequence[str]) -> RanksAnswer:
    """What all ranks answer: who refuses does so for all, and introductions are in their order."""
    answers = [decode_report(report.encode()) for report in reports if report != _DESCRIBING]
    for answer in answers:
        if isinstance(answer, JoinRefused):
            return answer
    if any(isinstance(each, Again) for each in answers):
        return Again()
    if len(answers) < len(reports):
        return Describing()
    return Joined(
        tuple(one for each in answers if isinstance(each, Joined) for one in each.introductions)
    )
