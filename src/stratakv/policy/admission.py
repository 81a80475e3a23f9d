"""Whether one more request fits, as a vector over groups.

Owns the arithmetic of admission. Pure; must not allocate.

A group that keeps all only grows while a request runs, so what counts is what is free or evictable
against what every running request has booked: its prompt, and some output. Few requests use all
the output they ask for, so booking all of it would leave most of the pool idle; where requests do
run past their booking and pages run short, one is retracted. A group that lets pages go behind its
window holds at most a peak per request, shared or not, so there the peaks must fit the pool
together, and it never runs short. The peak of a prefill has a whole chunk in it; that of decoding
is lower, and takes its place when the prompt is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import peak_pages

Pages: TypeAlias = tuple[int, ...]
"""Pages per group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request may take. ``growth``: pages beyond its cached prefix that are booked for it;
    ``peak``: the most it holds at once, up to its last token."""

    growth: Pages
    peak: Pages


def demand(
    spec: CacheSpec, total_tokens: int, booked_tokens: int, chunk_tokens: int, cached_pages: int
) -> Demand:
    """Of a request that may reach ``total_tokens`` (prompt and output) and books the first
    ``booked_tokens`` of them."""

    def peaks(tokens: int) -> Pages:
        return tuple(
            peak_pages(group.retention, tokens, chunk_tokens, spec.page_tokens)
            for group in spec.groups
        )

    growth = tuple(max(0, pages - cached_pages) for pages in peaks(booked_tokens))
    return Demand(growth=growth, peak=peaks(total_tokens))


class PageBudget:
    """What the running requests may still take, per group."""

    def __init__(self, spec: CacheSpec, totals: Sequence[int]) -> None:
        self._keeps_all = tuple(group.keeps_all for group in spec.groups)
        self._totals = tuple(totals)
        self._growing = [0] * len(spec.groups)
        self._peaks = [0] * len(spec.groups)

    def refusal(self, wanted: Demand) -> str | None:
        """None, or the name of the bound that a request breaks even alone."""
        for group, (peak, total) in enumerate(zip(wanted.peak, self._totals, strict=True)):
            if peak > total:
                return f"{peak} pages of group {group}, which has {total}"
        return None

    def fits(self, wanted: Demand, available: Sequence[int]) -> bool:
        """``available``: pages that are free or evictable now, per group, with the request's own
        prefix leased already."""
        for group, keeps_all in enumerate(self._keeps_all):
            if keeps_all:
                if available[group] - self._growing[group] < wanted.growth[group]:
                    return False
            elif self._totals[group] - self._peaks[group] < wanted.peak[group]:
                return False
        return True

    def book(self, wanted: Demand) -> None:
        for group in range(len(self._totals)):
            self._growing[group] += wanted.growth[group]
            self._peaks[group] += wanted.peak[group]

    def grown(self, group: int, pages: int) -> None:
        """Running requests have taken ``pages`` of what was booked."""
        self._growing[group] -= pages

    def lower(self, wanted: Demand, peak: Pages) -> Demand:
        """A request that has booked ``wanted`` holds at most ``peak`` from now on; its new
        booking."""
        for group, pages in enumerate(peak):
            assert pages <= wanted.peak[group], "a peak does not grow"
            self._peaks[group] -= wanted.peak[group] - pages
        return replace(wanted, peak=peak)

    def settle(self, wanted: Demand, left: Sequence[int]) -> None:
        """A request has ended with ``left`` of its growth not taken."""
        for group in range(len(self._totals)):
            self._growing[group] -= left[group]
            self._peaks[group] -= wanted.peak[group]
