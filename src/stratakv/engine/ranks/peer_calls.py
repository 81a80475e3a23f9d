"""What the ranks of one engine do together with a peer of theirs, as rank 0 asks for it in a step
message. Owns the records; what they lead to is a role's (``disagg``). Torch-free.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol


class PeerVerb(Enum):
    INTRODUCE = auto()  # say what the peer must know of this rank
    MEET = auto()  # work with the peer's rank of the same number
    LEAVE = auto()  # do not
    PART = auto()  # no more, if no rank has a session with it


@dataclass(frozen=True, slots=True)
class PeerCall:
    """``introductions``: of the peer's ranks, to MEET them; to INTRODUCE, those that have to fit,
    () where none has come yet. ``reason``: to LEAVE; "" where it may be asked again at once."""

    verb: PeerVerb
    peer: str
    introductions: tuple[bytes, ...] = ()
    reason: str = ""


class PeerCalls(Protocol):
    """A role's end of them, on every rank."""

    def call(self, asked: PeerCall) -> str:
        """Do this rank's part; its report for all."""
        ...

    def answered(self, asked: PeerCall, reports: Sequence[str]) -> None:
        """What every rank reports, in order: the same on all of them."""
        ...


class NoPeers:
    """Of an engine that works with no other."""

    def call(self, asked: PeerCall) -> str:
        raise AssertionError(f"{asked.peer} is no peer of an engine that works alone")

    def answered(self, asked: PeerCall, reports: Sequence[str]) -> None:
        raise AssertionError(f"{reports} of an engine that works alone")
