"""What the sessions of both roles have in common: their limits, and when one is next to be looked
at. Owns no session.
"""

import hashlib
from dataclasses import dataclass, field
from math import inf

from stratakv.disagg.session import SessionLimits
from stratakv.engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffLimits:
    """``sessions``: how long each state may take. ``answer_s``: how much later the pages of a
    transfer that has taken too long are in quarantine and its peer's link is torn down."""

    sessions: SessionLimits = field(default_factory=SessionLimits)
    answer_s: float = 30.0


class Due:
    """The earliest of many deadlines, so that a step without any looks at none."""

    def __init__(self) -> None:
        self._at_s = inf

    def add(self, deadline_s: float) -> None:
        self._at_s = min(self._at_s, deadline_s)

    def passed(self, now_s: float) -> bool:
        """Whether one may have; if so all that are left are to be added again."""
        if now_s < self._at_s:
            return False
        self._at_s = inf
        return True


def session_name(request: Request) -> str:
    """What both sides call its hand-off."""
    session = request.prompt.session
    return request.id if session is None else session.name


def prompt_identity(request: Request) -> str:
    """Of a prompt's tokens, model, adapter and tenant, hexadecimal: what is computed for one is
    right for no other."""
    found = hashlib.sha256(request.prefix.namespace.root())
    found.update(request.prompt.tokens.tobytes())
    return found.hexdigest()
