"""Sessions that one side has given up before the other one came, where prompts are computed.

Owns for how long, and of how many, that is remembered: names are a peer's, and it may invent any
number of them. Pure.
"""

from dataclasses import dataclass
from math import inf
from typing import Final

from stratakv.disagg.transport import PeerId

FAILED_OVER: Final = "prefill has failed over it"


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """``peer``: who has given the session up; None: this side."""

    peer: PeerId | None
    reason: str
    until_s: float


class EarlyEnds:
    """By name of the session; of each peer ``most``, and beyond that the oldest is forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ends: dict[str, EarlyEnd] = {}
        self._names: dict[PeerId | None, dict[str, None]] = {}  # of each, in order of their ends

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, name: str, end: EarlyEnd) -> None:
        self.pop(name)
        names = self._names.setdefault(end.peer, {})
        if len(names) == self._most:
            self.pop(next(iter(names)))
        self._ends[name] = end
        self._names.setdefault(end.peer, {})[name] = None

    def pop(self, name: str) -> EarlyEnd | None:
        """How it has ended, where it has; the other side has come, or comes no more."""
        end = self._ends.pop(name, None)
        if end is not None:
            names = self._names[end.peer]
            del names[name]
            if not names:
                del self._names[end.peer]
        return end

    def expire(self, now_s: float) -> float:
        """Forget those for which nobody has come in time; when the next one is due."""
        for name in [name for name, end in self._ends.items() if now_s >= end.until_s]:
            self.pop(name)
        return min((end.until_s for end in self._ends.values()), default=inf)
