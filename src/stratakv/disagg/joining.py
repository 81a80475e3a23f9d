"""How a side that decodes comes to know one that computes prompts, when a request needs it.

Owns the exchange of introductions, one of each rank, and what is asked again while an old link is
being torn down; ``ranked_joining`` does the same for several ranks, ``rests`` says who is asked.
Only the engine's thread calls it; how bytes travel is its ``Carry``, on threads of its own. Must
not know sessions.
"""

import base64
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, assert_never

from stratakv.core.errors import TransportError
from stratakv.disagg.messages import Leave
from stratakv.disagg.peer_limits import REASON_CHARS, short
from stratakv.disagg.peers import Peers, StillEndingError
from stratakv.disagg.rests import NOT_YET, Rests
from stratakv.disagg.transport import PeerId

JOIN_BYTES: Final = 8 << 20
"""The longest introduction that is read."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The other side knows this one; ``introductions`` are its own, by rank."""

    introductions: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class JoinRefused:
    """The two cannot work together."""

    reason: str


@dataclass(frozen=True, slots=True)
class Again:
    """The last link of this name is still being torn down there, or one that makes room for it."""


JoinAnswer: TypeAlias = Joined | JoinRefused | Again
Carry: TypeAlias = Callable[[PeerId, Sequence[bytes]], "Future[JoinAnswer]"]
"""Bring introductions, of each rank, to a peer; never fails and never blocks, its future never
raises."""


class Join(Protocol):
    def ask(self, peer: PeerId) -> None:
        """Make ``peer`` known. Asked again and again while somebody waits for it."""
        ...

    def refused(self) -> Sequence[tuple[PeerId, str]]:
        """Whom nobody can join, and why, since the last call."""
        ...

    def part(self, peer: PeerId) -> None:
        """End the link of ``peer``, which has no session. Asked again and again until it has
        one, or is gone."""
        ...

    def waits_for(self, peer: PeerId) -> str:
        """What keeps ``peer`` from being known, where it has said so; "" otherwise."""
        ...


class JoinedByHand:
    """Somebody else introduces peers to each other."""

    def ask(self, peer: PeerId) -> None:
        pass

    def refused(self) -> Sequence[tuple[PeerId, str]]:
        return ()

    def part(self, peer: PeerId) -> None:
        pass  # whoever has introduced it does

    def waits_for(self, peer: PeerId) -> str:
        return ""


class PeerJoiner:
    """Asks the peer itself, for a side of one rank."""

    def __init__(self, peers: Peers, carry: Carry, rests: Rests) -> None:
        self._peers, self._carry, self._rests = peers, carry, rests
        self._asked: dict[PeerId, Future[JoinAnswer] | None] = {}  # None: not described to it yet
        self._resting: dict[PeerId, str] = {}  # who are refused again, for the last reason
        self._refused: list[tuple[PeerId, str]] = []

    def ask(self, peer: PeerId) -> None:
        if peer in self._asked or self._peers.knows(peer) or self._rests.pauses(peer):
            return
        reason = self._rests.reason(peer)
        if reason is not None:
            self._resting[peer] = reason
            return
        try:
            self._peers.introduce_then(peer, partial(self._introduced, peer))
        except StillEndingError:
            return
        except TransportError as error:
            self._refused.append((peer, reason_of(error)))
            return
        self._asked[peer] = None

    def _introduced(self, peer: PeerId, introduction: bytes | TransportError) -> None:
        if isinstance(introduction, TransportError):
            del self._asked[peer]
            self._refused.append((peer, reason_of(introduction)))
        else:
            self._asked[peer] = self._carry(peer, (introduction,))

    def refused(self) -> Sequence[tuple[PeerId, str]]:
        answered = {peer: one for peer, one in self._asked.items() if one is not None}
        for peer in [peer for peer, answer in answered.items() if answer.done()]:
            del self._asked[peer]
            self._answered(peer, answered[peer].result())
        found, self._refused = self._refused, []
        for peer, reason in found:
            self._rests.add(peer, reason)
        resting, self._resting = self._resting, {}
        return [*resting.items(), *found]

    def _answered(self, peer: PeerId, answer: JoinAnswer) -> None:
        match answer:
            case Joined(introductions):
                try:
                    self._peers.meet(peer, one_of(introductions))
                except TransportError as error:
                    self._peers.disconnect(peer)  # also where nobody is introduced
                    self._refused.append((peer, reason_of(error)))
                else:
                    self._rests.joined(peer)
            case Again():
                self._peers.disconnect(peer)
                self._rests.pause(peer)
            case JoinRefused(reason):
                self._peers.disconnect(peer)
                self._refused.append((peer, reason or "it refuses"))
            case _:
                assert_never(answer)

    def part(self, peer: PeerId) -> None:
        self._peers.disconnect(peer, "it had no session")

    def waits_for(self, peer: PeerId) -> str:
        return self._rests.waits_for(peer)


def ask_to_leave(peers: Peers) -> None:
    """Who decodes is to end links that stand in the way of new ones; on rank 0."""
    for peer in peers.uses.overdue():
        peers.send(peer, Leave())


def join(peers: Peers, peer: PeerId, introductions: Sequence[bytes]) -> "Future[JoinAnswer]":
    """The other side of it: work with a ``peer`` that has introduced itself. Who does not fit is
    refused before anything is made for it; the answer comes with a later ``poll`` of ``peers``."""
    answer: Future[JoinAnswer] = Future()
    answer.set_running_or_notify_cancel()  # who waits may leave

    def introduced(ours: bytes | TransportError) -> None:
        try:
            if isinstance(ours, TransportError):
                raise ours
            peers.meet(peer, theirs)
        except TransportError as error:
            answer.set_result(JoinRefused(reason_of(error)))
        else:
            answer.set_result(Joined((ours,)))

    try:
        theirs = one_of(introductions)
        peers.verify(peer, theirs)
        peers.introduce_then(peer, introduced)
    except StillEndingError:
        ask_to_leave(peers)
        answer.set_result(Again())
    except TransportError as error:
        answer.set_result(JoinRefused(reason_of(error)))
    return answer


def reason_of(error: TransportError) -> str:
    """For people: what is in it may be a peer's, and as long as its introduction."""
    return str(error)[:REASON_CHARS]


def one_of(introductions: Sequence[bytes], rank: int = 0) -> bytes:
    """That of the peer's rank ``rank``. Where it has fewer ranks another one's, whose handshake is
    refused; TransportError where there is none at all."""
    if not introductions:
        raise TransportError("the peer introduces none of its ranks")
    return introductions[min(rank, len(introductions) - 1)]


# -- as bytes ------------------------------------------------------------------------------------


def encode_call(name: PeerId, introductions: Sequence[bytes]) -> bytes:
    return json.dumps({"peer": name, "introductions": _texts(introductions)}).encode()


def decode_call(data: bytes) -> tuple[PeerId, tuple[bytes, ...]]:
    """TransportError where it is none."""
    try:
        fields: Any = json.loads(data)
        return PeerId(short(fields["peer"])), _bytes(fields["introductions"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TransportError(f"the peer's call cannot be read: {error!r:.500}") from error


def encode_answer(answer: JoinAnswer) -> bytes:
    match answer:
        case Joined(introductions):
            fields: dict[str, Any] = {"introductions": _texts(introductions)}
        case JoinRefused(reason):
            fields = {"refused": reason}
        case Again():
            fields = {"again": NOT_YET}
        case _:
            assert_never(answer)
    return json.dumps(fields).encode()


def decode_answer(data: bytes) -> JoinAnswer:
    """Of a peer. TransportError where it is none, or introduces nobody."""
    answer = decode_report(data)
    if answer == Joined(()):
        raise TransportError("the peer's answer introduces none of its ranks")
    return answer


def decode_report(data: bytes) -> JoinAnswer:
    """Of one rank of this side, which may have nobody to introduce. TransportError where it is
    none."""
    try:
        fields: Any = json.loads(data)
        match list(fields):
            case ["introductions"]:
                return Joined(_bytes(fields["introductions"]))
            case ["refused"]:
                return JoinRefused(str(fields["refused"])[:REASON_CHARS])
            case ["again"]:
                return Again()
            case names:
                raise ValueError(f"fields {names}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TransportError(f"the peer's answer cannot be read: {error!r}") from error


def _texts(introductions: Sequence[bytes]) -> list[str]:
    return [base64.b64encode(one).decode() for one in introductions]


def _bytes(texts: Any) -> tuple[bytes, ...]:  # noqa: ANN401 - from a peer
    return tuple(base64.b64decode(one, validate=True) for one in texts)
