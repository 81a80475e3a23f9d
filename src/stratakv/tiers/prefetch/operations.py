"""Operations that storage has under way for prefetches, and which of them were cancelled.

Owns the way from a ticket to its request. Must not look at answers.
"""

from collections.abc import Iterator
from typing import Final

from stratakv.agreement.agreement import DigestInputs
from stratakv.core.clock import Clock
from stratakv.core.ids import NONE, TicketId
from stratakv.storage.io_worker import IoWorker
from stratakv.tiers.prefetch.request import PrefetchRequest

HUNG_S: Final = 5.0
"""An operation that was cancelled ends with its batch. One that has not come back for this long
will not soon, and nobody who may go without storage waits for it any more."""


class Operations:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._requests: dict[TicketId, PrefetchRequest] = {}
        self._stopped: dict[TicketId, float] = {}  # when each was cancelled, oldest first

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[PrefetchRequest]:
        return iter(self._requests.values())

    def __getitem__(self, ticket: TicketId) -> PrefetchRequest:
        return self._requests[ticket]

    @property
    def stopped(self) -> int:
        """Those that were cancelled and have not come back."""
        return len(self._stopped)

    def begin(self, ticket: TicketId, request: PrefetchRequest) -> None:
        self._requests[ticket] = request

    def end(self, ticket: TicketId) -> bool:
        """Whether it had been cancelled."""
        del self._requests[ticket]
        return self._stopped.pop(ticket, None) is not None

    def stop(self, ticket: TicketId, worker: IoWorker | None) -> float:
        """Begin no more of it; when it was first cancelled, s."""
        if ticket not in self._stopped:
            self._stopped[ticket] = self._clock.now_s()
            if worker is not None:
                worker.cancel(ticket)
        return self._stopped[ticket]

    def hang(self, now_s: float) -> bool:
        """Whether one that was cancelled has not come back for too long."""
        return now_s - next(iter(self._stopped.values()), now_s) > HUNG_S

    def figures(self) -> DigestInputs:
        """What is under way, for ranks to compare."""
        return {
            "reads": len(self._requests),
            "newest read": next(reversed(self._requests), NONE),
            "stopped": self.stopped,
        }
