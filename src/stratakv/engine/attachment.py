"""What becomes of an engine's store: the life of an attachment, and the calls that move it on.

Owns the table of states and the one call that goes to every rank. Pure: whoever holds an attachment
(``storage_control``) opens, attaches and closes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final


class AttachmentState(Enum):
    """Of one rank. While ranks open or close their stores, each has its own."""

    DETACHED = "detached"
    OPENING = "opening"
    OPENED = "opened"  # and not used yet: other ranks may still open theirs
    REFUSED = "refused"  # it is not allowed
    FAILED = "failed"  # it cannot be reached
    ATTACHED = "attached"
    DRAINING = "draining"  # nothing new is begun, and what is under way has not ended
    CLOSING = "closing"


class Verb(Enum):
    """What rank 0 has every rank do."""

    OPEN = auto()  # begin to
    CANCEL = auto()  # close what has opened, or will
    ATTACH = auto()  # use what has opened on every rank
    DETACH = auto()  # use it no more; again and again, until it is drained
    RESUME = auto()  # a detach is given up: go on as before
    CLEAR = auto()  # forget every object
    LOOK = auto()  # report how it stands


BESIDE_STEPS: Final = frozenset((Verb.OPEN, Verb.CANCEL, Verb.LOOK))
"""What touches nothing that a step does: an engine that is alone may be called at any time."""


class Outcome(Enum):
    """What has come of something that a rank has begun."""

    OPENED = auto()
    REFUSED = auto()
    FAILED = auto()
    GIVEN = auto()  # an open store, to an engine that does not run yet
    DRAINED = auto()
    CLOSED = auto()


@dataclass(frozen=True, slots=True)
class StorageCall:
    """``url``: of OPEN; it may have a password. ``force``: of DETACH: give up what is queued."""

    verb: Verb
    url: str = field(default="", repr=False)
    force: bool = False


@dataclass(frozen=True, slots=True)
class AttachmentReport:
    """How a rank's attachment stands after a call. ``why``: of REFUSED and FAILED, without a
    password. ``done``: False of a CLEAR for which too much is queued."""

    state: AttachmentState
    why: str = ""
    done: bool = True

    def pack(self) -> str:
        return f"{self.state.value} {self.done:d} {self.why}"

    @classmethod
    def unpack(cls, text: str) -> "AttachmentReport":
        state, done, why = text.split(" ", 2)
        return cls(AttachmentState(state), why, done == "1")


Transition = tuple[AttachmentState, Verb | Outcome]
_S, _V, _O = AttachmentState, Verb, Outcome
_GONE: Final = (_S.OPENING, _S.OPENED, _S.REFUSED, _S.FAILED, _S.DETACHED)
_HELD: Final = (_S.ATTACHED, _S.DRAINING)
TABLE: Final[Mapping[Transition, AttachmentState]] = {
    (_S.DETACHED, _V.OPEN): _S.OPENING,
    (_S.OPENING, _O.OPENED): _S.OPENED,
    (_S.OPENING, _O.REFUSED): _S.REFUSED,
    (_S.OPENING, _O.FAILED): _S.FAILED,
    **{(state, _V.CANCEL): _S.DETACHED for state in _GONE},
    (_S.OPENED, _V.ATTACH): _S.ATTACHED,
    (_S.DETACHED, _O.GIVEN): _S.ATTACHED,
    **{(state, _V.DETACH): _S.DRAINING for state in _HELD},
    **{(state, _V.RESUME): _S.ATTACHED for state in _HELD},
    **{(state, _V.CLEAR): state for state in _HELD},
    (_S.DRAINING, _O.DRAINED): _S.CLOSING,
    (_S.CLOSING, _O.CLOSED): _S.DETACHED,
    **{(state, _V.LOOK): state for state in AttachmentState},
}
"""Every other pair is a fault of ours."""


def after(state: AttachmentState, event: Verb | Outcome) -> AttachmentState:
    """The next state; AssertionError for what cannot happen."""
    found = TABLE.get((state, event))
    assert found is not None, f"{event} while a store is {state.value}"
    return found
