"""One request's hand-off on one side, as a state machine over events. No I/O, no clock, no pages.

Owns the order of its states and which message moves it, in every state. What is combined over
ranks is the number of a state: the minimum over ranks, so that a failure of one is a failure of all
and success needs all (``agreement``). Time comes in with ``expire``.
"""

from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Final, TypeAlias, assert_never


class SessionState(IntEnum):
    """In order: what a request is on all ranks is the minimum over them."""

    FAILED = 0
    BOOTSTRAPPING = 1  # the two sides do not know each other yet
    WAITING_FOR_INPUT = 2  # they do; pages and prompt are to come
    TRANSFERRING = 3
    SUCCESS = 4


ENDED: Final = frozenset({SessionState.FAILED, SessionState.SUCCESS})

_WAITS: Final = {
    SessionState.BOOTSTRAPPING: "waiting for the other side",
    SessionState.WAITING_FOR_INPUT: "waiting for pages and the prompt",
    SessionState.TRANSFERRING: "the transfer of its pages",
}
"""As people read of them."""


class FailureCause(Enum):
    """Why a session failed, for those who count."""

    ABORTED = (
        "aborted"  # this side has given it up: a client left, or another request's page failed
    )
    PEER = "peer"  # the other side has
    PEER_LOST = "peer_lost"
    REFUSED = "refused"  # the two sides, or their prompts, do not fit together
    TIMEOUT = "timeout"
    RANK = "rank"  # another rank of this side has
    PROTOCOL = "protocol"  # a message that does not go with its state


@dataclass(frozen=True, slots=True)
class Agreed:
    """The handshake was accepted by both sides."""


@dataclass(frozen=True, slots=True)
class TransferBegun:
    """Pages of both sides are named, and bytes may be on their way."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """What proves that every byte is there has come: the metadata row of ``session``."""

    session: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """Somebody has given the request up, here or there. ``reason``: for the log and the client."""

    reason: str
    cause: FailureCause = FailureCause.ABORTED


SessionEvent: TypeAlias = Agreed | TransferBegun | Arrived | Aborted


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How long each state may take, in seconds."""

    bootstrap_s: float = 300.0
    waiting_s: float = 300.0
    transfer_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Session:
    """``deadline_s``: when the state has taken too long, by the clock of ``opened``. ``reason``:
    why it failed, "" otherwise, and ``cause``, None otherwise."""

    name: str
    state: SessionState
    deadline_s: float
    limits: SessionLimits
    reason: str = ""
    cause: FailureCause | None = None

    @staticmethod
    def opened(name: str, limits: SessionLimits, now_s: float) -> "Session":
        deadline_s = now_s + limits.bootstrap_s
        return Session(name, SessionState.BOOTSTRAPPING, deadline_s, limits)

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def after(self, event: SessionEvent, now_s: float) -> "Session":
        """What it is after ``event``. An end is one: nothing moves it any more. A message that
        comes late or twice moves nothing back; one that comes too early is a failure, since whoever
        sent it believes in another session."""
        if self.ended:
            return self
        match event:
            case Agreed():
                wanted = SessionState.WAITING_FOR_INPUT
            case TransferBegun():
                wanted = SessionState.TRANSFERRING
            case Arrived():
                if event.session != self.name:
                    return self._failed(
                        f"the pages of {event.session} have arrived for it", FailureCause.PROTOCOL
                    )
                wanted = SessionState.SUCCESS
            case Aborted():
                return self._failed(event.reason, event.cause)
            case _:
                assert_never(event)
        if wanted <= self.state:
            return self
        if wanted > self.state + 1:
            return self._failed(
                f"{type(event).__name__} in {self.state.name}", FailureCause.PROTOCOL
            )
        return replace(self, state=wanted, deadline_s=now_s + self._limit_s(wanted))

    def extended(self, now_s: float) -> "Session":
        """More of its bytes are on their way: the time for a transfer begins anew."""
        assert self.state is SessionState.TRANSFERRING, "a part of what has not begun"
        return replace(self, deadline_s=now_s + self.limits.transfer_s)

    def expire(self, now_s: float) -> "Session":
        """Failed where its state has taken too long."""
        if self.ended or now_s < self.deadline_s:
            return self
        return self._failed(f"{_WAITS[self.state]} took too long", FailureCause.TIMEOUT)

    def _limit_s(self, state: SessionState) -> float:
        if state is SessionState.WAITING_FOR_INPUT:
            return self.limits.waiting_s
        return self.limits.transfer_s

    def _failed(self, reason: str, cause: FailureCause) -> "Session":
        return replace(self, state=SessionState.FAILED, reason=reason, cause=cause)
