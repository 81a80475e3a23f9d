"""Requests that do not run: new ones, ahead of them those that were retracted, and beside both
those that wait for the role.

Owns the order in which they get their turn, first come first served. A request that is blocked gets
none, and costs a step nothing, until the role has a word of it. Torch-free; must not decide whether
one fits.
"""

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from stratakv.core.ids import RequestId
from stratakv.engine.request import Phase, Request

_serial = attrgetter("serial")


class Backlog:
    """``blocked_retracted``: of those that wait for the role, the retracted ones."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []  # by order of submission, as all lists here
        self._retracted: list[Request] = []
        self._blocked: dict[RequestId, Request] = {}
        self.blocked_retracted: list[Request] = []

    def __len__(self) -> int:
        return self.ready + len(self._blocked)

    @property
    def ready(self) -> int:
        """Requests that may get their turn."""
        return len(self._waiting) + len(self._retracted)

    @property
    def blocked(self) -> int:
        return len(self._blocked)

    @property
    def retracted(self) -> int:
        return len(self._retracted) + len(self.blocked_retracted)

    @property
    def head(self) -> Request | None:
        """Whose turn comes next; where all are blocked, who was first."""
        queues: tuple[Iterable[Request], ...] = (
            self._retracted, self._waiting, self._blocked.values(),
        )  # fmt: skip
        return next((request for queue in queues for request in queue), None)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def pop(self) -> Request:
        """Whose turn it is."""
        return (self._retracted or self._waiting).pop(0)

    def put_back(self, requests: Iterable[Request]) -> None:
        """Those that could not run after all, or not any longer."""
        for request in requests:
            insort(self._queue_of(request), request, key=_serial)

    def block(self, request: Request) -> None:
        """It waits for the role: no turn until ``unblock``."""
        self._blocked[request.id] = request
        if request.phase is Phase.RETRACTED:
            insort(self.blocked_retracted, request, key=_serial)

    def unblock(self, request: Request) -> None:
        """It has its turn again, at its old place; nothing where it is not blocked."""
        if self._blocked.pop(request.id, None) is not None:
            if request.phase is Phase.RETRACTED:
                self.blocked_retracted.remove(request)
            self.put_back([request])

    def remove(self, request: Request) -> None:
        self.unblock(request)
        self._queue_of(request).remove(request)

    def _queue_of(self, request: Request) -> list[Request]:
        return self._retracted if request.phase is Phase.RETRACTED else self._waiting
