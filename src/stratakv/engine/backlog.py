"""Requests that do not run: new ones, and ahead of them those that were retracted.

Owns the order in which they get their turn, first come first served in both. Torch-free; must not
decide whether one fits.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable

from stratakv.engine.request import Phase, Request


class Backlog:
    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self._retracted: list[Request] = []  # by order of submission

    def __len__(self) -> int:
        return len(self._waiting) + len(self._retracted)

    @property
    def retracted(self) -> int:
        return len(self._retracted)

    @property
    def head(self) -> Request | None:
        """Whose turn comes next."""
        if self._retracted:
            return self._retracted[0]
        return self._waiting[0] if self._waiting else None

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def pop(self) -> Request:
        """Whose turn it is."""
        return self._retracted.pop(0) if self._retracted else self._waiting.popleft()

    def put_back(self, requests: Iterable[Request]) -> None:
        """Those that could not run after all, or not any longer; in order."""
        for request in reversed(list(requests)):
            if request.phase is Phase.RETRACTED:
                insort(self._retracted, request, key=lambda other: other.serial)
            else:
                self._waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        if request.phase is Phase.RETRACTED:
            self._retracted.remove(request)
        else:
            self._waiting.remove(request)
