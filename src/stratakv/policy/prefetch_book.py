"""The prefetches of requests that wait: what state each is in, and what they add up to.

Owns the tokens in flight, the retry list and the sums by reason. Must not decide (``prefetch``) nor
touch pages. A prefetch is one request's, through all of its attempts: what it found counts once,
when ``settle`` says what its request used.
"""

from dataclasses import dataclass, field

from stratakv.core.counts import Counts
from stratakv.core.ids import PrefetchId
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
class PrefetchCounters(Counts):
    """In tokens: ``hits`` and all of ``lost`` add up to ``found``. ``abandoned``: in attempts,
    ``fetched_pages``: that storage has delivered."""

    fetched_pages: int = 0
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
        self._entries: dict[PrefetchId, _Entry] = {}
        self._armed: dict[
            PrefetchId, None
        ] = {}  # oldest first, so next first: the pace is constant
        self.counters = PrefetchCounters()
        self.in_flight_tokens = 0

    def __len__(self) -> int:
        """Prefetches that are in it, and those of them that are to be tried again."""
        return len(self._entries) + len(self._armed)

    def state(self, prefetch: PrefetchId) -> Prefetch | None:
        entry = self._entries.get(prefetch)
        return entry.state if entry else None

    def before(self, prefetch: PrefetchId) -> Tally | None:
        """What an earlier attempt of a request found, for its next ``Probing``."""
        entry = self._entries.get(prefetch)
        return entry.tally if entry else None

    def move(self, prefetch: PrefetchId, state: Prefetch, step: int) -> None:
        """A request's prefetch is in another state. One that was abandoned is tried again some
        steps on, where that may help."""
        entry = self._entries.setdefault(prefetch, _Entry())
        if entry.state is not None:
            self.in_flight_tokens -= self._rules.tokens(entry.state)
        entry.state = state
        self.in_flight_tokens += self._rules.tokens(state)
        self._armed.pop(prefetch, None)
        match state:
            case Abandoned():
                self.counters.abandoned[state.reason] += 1
                entry.tally = state.tally
                if state.retry:
                    self._arm(prefetch, entry, step)
            case Landed():
                entry.tally = state.tally
            case Probing() | MakeRoom() | Fetching():
                pass

    def disarm(self, prefetch: PrefetchId) -> None:
        """An attempt is being made, or would be in vain: it is not due any more."""
        self._armed.pop(prefetch, None)

    def put_off(self, prefetch: PrefetchId, step: int) -> None:
        """A request may not ask storage now: it is tried again some steps on."""
        self.counters.abandoned[Reason.RATE_LIMITED] += 1
        self._armed.pop(prefetch, None)
        self._arm(prefetch, self._entries.setdefault(prefetch, _Entry()), step)

    def _arm(self, prefetch: PrefetchId, entry: _Entry, step: int) -> None:
        entry.retry = self._rules.policy.retry(entry.retry, step)
        if entry.retry is not None:
            self._armed[prefetch] = None
        else:
            entry.retry = Retry(step, 0)  # it had its attempts

    def due(self, step: int, head: PrefetchId | None) -> list[PrefetchId]:
        """The requests to try again now, in the order in which they were put off; ``head``: the
        queue's first, which is about to be admitted and is left alone."""
        found: list[PrefetchId] = []
        for prefetch in self._armed:
            retry = self._entries[prefetch].retry
            if retry is None or retry.at_step > step:
                break
            if retry.due(step, head=prefetch == head):
                found.append(prefetch)
        return found

    def settle(self, prefetch: PrefetchId, used_end: int, reason: Reason) -> Tally | None:
        """A request is admitted on ``used_end`` pages, or ends (0): what it found counts now, and
        what had landed beyond that is lost for ``reason``. Its prefetch has ended. None: storage
        never answered it."""
        entry = self._entries.pop(prefetch, None)
        self._armed.pop(prefetch, None)
        if entry is None:
            return None
        assert not isinstance(entry.state, Probing | MakeRoom | Fetching), "a prefetch still runs"
        if entry.tally is None:
            return None
        tally = entry.tally.cut(used_end, reason)
        self.counters.found += tally.found * self._page
        self.counters.hits += tally.hits * self._page
        for lost, pages in tally.lost:
            self.counters.lost[lost] += pages * self._page
        return tally
