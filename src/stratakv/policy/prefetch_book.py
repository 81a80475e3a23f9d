"""The prefetches of requests that wait: what state each is in, and what they add up to.

Owns the tokens in flight, the retry list and the sums by reason. Must not decide (``prefetch``) nor
touch pages. What a request found counts once, when ``settle`` says what it used, however many
attempts there were.
"""

from dataclasses import dataclass, field

from stratakv.core.ids import RequestId
from stratakv.policy.prefetch import (
    Abandoned,
    Fetching,
    Landed,
    MakeRoom,
    Prefetch,
    PrefetchRules,
    Probing,
)
from stratakv.policy.prefetch_pace import Retry
from stratakv.policy.prefetch_reasons import Reason, Tally


@dataclass(slots=True)
class PrefetchCounters:
    """In tokens: ``hits`` and all of ``lost`` add up to ``found``. ``abandoned``: in attempts."""

    found: int = 0
    hits: int = 0
    lost: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    abandoned: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))


@dataclass(slots=True)
class _Entry:
    state: Prefetch | None = None
    tally: Tally | None = None  # of the latest attempt that had an answer
    retry: Retry | None = None


class PrefetchBook:
    def __init__(self, rules: PrefetchRules, page_tokens: int) -> None:
        self._rules = rules
        self._page = page_tokens
        self._entries: dict[RequestId, _Entry] = {}
        self._armed: dict[RequestId, None] = {}  # oldest first, so next first: the pace is constant
        self.counters = PrefetchCounters()
        self.in_flight_tokens = 0

    def state(self, request: RequestId) -> Prefetch | None:
        entry = self._entries.get(request)
        return entry.state if entry else None

    def before(self, request: RequestId) -> Tally | None:
        """What an earlier attempt of a request found, for its next ``Probing``."""
        entry = self._entries.get(request)
        return entry.tally if entry else None

    def move(self, request: RequestId, state: Prefetch, step: int) -> None:
        """A request's prefetch is in another state. One that was abandoned is tried again some
        steps on, where that may help."""
        entry = self._entries.setdefault(request, _Entry())
        if entry.state is not None:
            self.in_flight_tokens -= self._rules.tokens(entry.state)
        entry.state = state
        self.in_flight_tokens += self._rules.tokens(state)
        self._armed.pop(request, None)
        match state:
            case Abandoned():
                self.counters.abandoned[state.reason] += 1
                entry.tally = state.tally
                if state.retry:
                    self._arm(request, entry, step)
            case Landed():
                entry.tally = state.tally
            case Probing() | MakeRoom() | Fetching():
                pass

    def put_off(self, request: RequestId, step: int) -> None:
        """A request may not ask storage now: it is tried again some steps on."""
        self.counters.abandoned[Reason.RATE_LIMITED] += 1
        self._armed.pop(request, None)
        self._arm(request, self._entries.setdefault(request, _Entry()), step)

    def _arm(self, request: RequestId, entry: _Entry, step: int) -> None:
        entry.retry = self._rules.policy.retry(entry.retry, step)
        if entry.retry is not None:
            self._armed[request] = None
        else:
            entry.retry = Retry(step, 0)  # it had its attempts

    def due(self, step: int, head: RequestId | None) -> list[RequestId]:
        """The requests to try again now, in the order in which they were put off; ``head``: the
        queue's first, which is about to be admitted and is left alone."""
        found: list[RequestId] = []
        for request in self._armed:
            retry = self._entries[request].retry
            if retry is None or retry.at_step > step:
                break
            if retry.due(step, head=request == head):
                found.append(request)
        return found

    def settle(self, request: RequestId, used_end: int, reason: Reason) -> None:
        """A request is admitted on ``used_end`` pages, or ends (0): what it found counts now, and
        what had landed beyond that is lost for ``reason``. Its prefetch has ended."""
        entry = self._entries.pop(request, None)
        self._armed.pop(request, None)
        if entry is None:
            return
        assert not isinstance(entry.state, Probing | MakeRoom | Fetching), "a prefetch still runs"
        if entry.tally is None:
            return
        tally = entry.tally.cut(used_end, reason)
        self.counters.found += tally.found * self._page
        self.counters.hits += tally.hits * self._page
        for lost, pages in tally.lost:
            self.counters.lost[lost] += pages * self._page
