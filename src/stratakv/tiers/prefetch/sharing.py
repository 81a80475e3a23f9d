"""Requests that wait for the same pages: one of them asks for all.

Owns who leads, by the first page that is asked for, and who has joined. Must not ask storage.
"""

from stratakv.core.ids import PageKey, PrefetchId
from stratakv.tiers.prefetch.request import IDLE, Awaiting, PrefetchRequest


class PrefetchSharing:
    def __init__(self) -> None:
        self._leaders: dict[PageKey, PrefetchRequest] = {}
        self._joined: dict[PrefetchId, PrefetchRequest] = {}
        self._ended = False  # a leader, since ``left_alone`` looked

    def __len__(self) -> int:
        """Those who lead, and those who have joined them."""
        return len(self._leaders) + len(self._joined)

    def join(self, request: PrefetchRequest, first: PageKey) -> bool:
        """Whether another asks for ``first`` already: ``request`` joins that one now."""
        leader = self._leaders.get(first)
        if leader is None:
            return False
        request.enter(Awaiting(leader))
        self._joined[request.id] = request
        return True

    def lead(self, request: PrefetchRequest, first: PageKey) -> None:
        self._leaders[first] = request

    def leave(self, request: PrefetchRequest) -> None:
        """Who has joined goes its own way."""
        del self._joined[request.id]
        request.enter(IDLE)

    def end(self, first: PageKey) -> None:
        """Who leads at ``first`` has its pages, or will not get them."""
        del self._leaders[first]
        self._ended = True

    def left_alone(self) -> list[PrefetchRequest]:
        """Those who had joined a leader that has ended; in the order in which they came."""
        if not self._ended:
            return []
        self._ended = False
        return [request for request in self._joined.values() if abandoned(request)]


def abandoned(request: PrefetchRequest) -> bool:
    """Whether a request has joined one that asks no more."""
    phase = request.phase
    return isinstance(phase, Awaiting) and not phase.leader.asking
