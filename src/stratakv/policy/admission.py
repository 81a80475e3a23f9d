"""Whether one more request fits, as a vector over groups.

Owns the arithmetic of admission. Pure; must not allocate.

A group that keeps all only grows while a request runs, so what counts is what is free or evictable
against what every running request has booked: its prompt, and some output. Few requests use all
the output they ask for, so booking all of it would leave most of the pool idle; where requests do
run past their booking and pages run short, one is retracted. A group that lets pages go behind its
window holds at most a peak per request, shared or not, so there the peaks must fit the pool
together, and it never runs short: a peak less what its request holds now is its growth, in pages.
The peak of a prefill has a whole chunk in it; that of decoding has one page more than the window,
and takes its place when the prompt is computed, here or elsewhere.

What waits ahead comes first: a request that was retracted, and that waits for somebody else, has
its pages taken off what others may book. And one that runs can always go on: all others that run
may be retracted, but not those that receive their prompts, so what these hold leaves room for the
longest of all.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import KeepAll, peak_pages

Pages: TypeAlias = tuple[int, ...]
"""Pages per group."""

GUARDED_TOKENS: Final = 4096
"""Output beyond its booking with which a request can always go on while others receive, as in
SGLang; one that says still more may have to wait until a transfer has ended. All that it asks for
would leave others no room to receive, for clients ask for the most there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request may take. ``growth``: pages beyond its cached prefix that are booked for it;
    ``peak``: the most it holds at once, up to its last token. Of groups that keep all, ``fixed``:
    what it holds and nobody can take from it; ``rest``: what it may come to hold beyond that.
    ``cached``: pages of its prefix."""

    growth: Pages
    peak: Pages
    fixed: Pages
    rest: Pages
    cached: int = 0

    def decoding(self, peak: Pages) -> "Demand":
        """The same of a request whose prompt is computed, and that holds at most ``peak``."""
        whole = tuple(fixed + rest for fixed, rest in zip(self.fixed, self.rest, strict=True))
        return replace(self, peak=peak, fixed=(0,) * len(whole), rest=whole)

    def limited(self, growth: Sequence[int], group: int, most: int) -> "Demand":
        """The same of one that takes ``growth`` from now on, and comes to hold at most ``most``
        pages of ``group``, which keeps all, however long it gets."""
        return replace(
            self,
            growth=tuple(growth),
            peak=_with(self.peak, group, most),
            fixed=_with(self.fixed, group, 0),
            rest=_with(self.rest, group, most),
        )


def _with(pages: Pages, group: int, count: int) -> Pages:
    return (*pages[:group], count, *pages[group + 1 :])


def demand(
    spec: CacheSpec,
    total_tokens: int,
    booked_tokens: int,
    chunk_tokens: int,
    cached_pages: int,
    received_tokens: int = 0,
) -> Demand:
    """Of a request that may reach ``total_tokens`` (prompt and output) and books the first
    ``booked_tokens`` of them. ``chunk_tokens``: the most that it computes at once.
    ``received_tokens``: those that another engine computes, into pages that it cannot be asked
    for."""

    def peaks(tokens: int) -> Pages:
        return tuple(
            peak_pages(group.retention, tokens, chunk_tokens, spec.page_tokens)
            for group in spec.groups
        )

    def kept(tokens: int) -> Pages:
        pages = peak_pages(KeepAll(), tokens, chunk_tokens, spec.page_tokens)
        return tuple(pages if group.keeps_all else 0 for group in spec.groups)

    growth = tuple(max(0, pages - cached_pages) for pages in peaks(booked_tokens))
    fixed = kept(received_tokens)
    guarded = kept(min(total_tokens, booked_tokens + GUARDED_TOKENS))
    rest = tuple(whole - held for whole, held in zip(guarded, fixed, strict=True))
    return Demand(
        growth=growth, peak=peaks(total_tokens), fixed=fixed, rest=rest, cached=cached_pages
    )


class PageBudget:
    """What the running requests may still take, per group. ``host``: of each group that has its
    home on the host, its pages there; they are counted like one more group, behind the others."""

    def __init__(self, spec: CacheSpec, totals: Sequence[int], host: Sequence[int] = ()) -> None:
        names = [group.name for group in spec.groups if group.at_home_on_host]
        self._names = (
            *(group.name for group in spec.groups),
            *(f"{name} on the host" for name, _ in zip(names, host, strict=bool(host))),
        )
        self._keeps_all = (*(group.keeps_all for group in spec.groups), *(True for _ in host))
        self._totals = (*totals, *host)
        count = len(self._totals)
        self._growing = [0] * count
        self._peaks = [0] * count
        self._fixed = [0] * count
        self._rests: list[list[int]] = [[] for _ in range(count)]  # of each request, ascending

    def __len__(self) -> int:
        """Groups, and what is counted like one."""
        return len(self._totals)

    def refusal(self, wanted: Demand) -> str | None:
        """None, or the name of the bound that a request breaks even alone."""
        for name, peak, total in zip(self._names, wanted.peak, self._totals, strict=True):
            if peak > total:
                return f"{peak} pages of group {name}, which has {total}"
        return None

    def room(self, available: Sequence[int], ahead: Sequence[Demand] = ()) -> Pages:
        """Pages that one more request may book: growth of a group that keeps all, a peak of
        another; below 0 where more is booked than there is.

        available: pages that are free or evictable now, per group. ahead: requests that do not run
        and come first.
        """
        found: list[int] = []
        for group, keeps_all in enumerate(self._keeps_all):
            if keeps_all:
                room = available[group] - self._growing[group]
                room -= sum(one.growth[group] for one in ahead)
            else:
                room = self._totals[group] - self._peaks[group]
                room -= sum(one.peak[group] for one in ahead)
            found.append(room)
        return tuple(found)

    def fits(self, wanted: Demand, available: Sequence[int], ahead: Sequence[Demand] = ()) -> bool:
        """As in ``room``, with the request's own prefix leased already."""
        return not self.lacks(wanted, available, ahead)

    def lacks(
        self, wanted: Demand, available: Sequence[int], ahead: Sequence[Demand] = ()
    ) -> list[int]:
        """The groups that have no room for it."""
        return [
            group
            for group, room in enumerate(self.room(available, ahead))
            if (wanted.growth if self._keeps_all[group] else wanted.peak)[group] > room
            or not self._goes_on(group, wanted)
        ]

    def _goes_on(self, group: int, wanted: Demand) -> bool:
        """Whether whoever may take most of a group could, beside all that nobody can take back."""
        most = max(self._rests[group][-1:], default=0)
        held = self._fixed[group] + wanted.fixed[group]
        return held + max(most, wanted.rest[group]) <= self._totals[group]

    def book(self, wanted: Demand) -> None:
        for group in range(len(self._totals)):
            self._growing[group] += wanted.growth[group]
            self._peaks[group] += wanted.peak[group]
            self._fixed[group] += wanted.fixed[group]
            insort(self._rests[group], wanted.rest[group])

    def grown(self, group: int, pages: int) -> None:
        """Running requests have taken ``pages`` of what was booked."""
        self._growing[group] -= pages

    def decodes(self, wanted: Demand, peak: Pages) -> Demand:
        """The prompt of a request that has booked ``wanted`` is computed: it holds at most ``peak``
        from now on, and may be retracted. Its new booking."""
        now = wanted.decoding((*peak, *wanted.peak[len(peak) :]))
        for group, pages in enumerate(now.peak):
            assert pages <= wanted.peak[group], "a peak does not grow"
            self._peaks[group] -= wanted.peak[group] - pages
            self._fixed[group] -= wanted.fixed[group]
            self._forget(group, wanted)
            insort(self._rests[group], now.rest[group])
        return now

    def settle(self, wanted: Demand, left: Sequence[int]) -> None:
        """A request has ended with ``left`` of its growth not taken."""
        for group in range(len(self._totals)):
            self._growing[group] -= left[group]
            self._peaks[group] -= wanted.peak[group]
            self._fixed[group] -= wanted.fixed[group]
            self._forget(group, wanted)

    def _forget(self, group: int, wanted: Demand) -> None:
        rests = self._rests[group]
        del rests[bisect_left(rests, wanted.rest[group])]
