"""Copies that are done as soon as they are asked for: a device where only decisions count.

Owns the order of what has ended. Must not move a byte, nor know a clock.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice

from stratakv.core.ids import LayerId, TicketId
from stratakv.transfer.copy_plan import CopyPlan, Direction
from stratakv.transfer.engine import Completion


class _Open:
    """A gate over copies that are done."""

    def wait(self, layer: LayerId) -> None:
        del layer


class InstantTransfer:
    """A transfer engine that moves nothing and has finished before it is asked."""

    def __init__(self) -> None:
        self._last = 0
        self._done: dict[Direction, deque[TicketId]] = {way: deque() for way in Direction}

    def submit(self, plan: CopyPlan) -> TicketId:
        self._last += 1
        self._done[plan.direction].append(TicketId(self._last))
        return TicketId(self._last)

    def gate(self, tickets: Sequence[TicketId]) -> _Open:
        del tickets
        return _Open()

    def ready(self, direction: Direction) -> int:
        return len(self._done[direction])

    def peek(self, direction: Direction, count: int) -> list[Completion]:
        done = islice(self._done[direction], count)
        return [Completion(ticket, ok=True, bytes_moved=0) for ticket in done]

    def take(self, direction: Direction, count: int) -> list[Completion]:
        taken = self.peek(direction, count)
        for _ in taken:
            self._done[direction].popleft()
        return taken

    def close(self) -> None:
        """There is nothing to finish."""
