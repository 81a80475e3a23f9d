"""Whether one more request fits, as a vector over groups.

Owns the arithmetic that makes running out of pages in mid-decode impossible. Pure; must not
allocate.

A group that keeps all only grows while a request runs, so what counts is what is free or evictable
against what every running request may still take. A group that lets pages go behind its window
holds at most a peak per request, shared or not, so there the peaks must fit the pool together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import TypeAlias, assert_never

from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import (
    KeepAll,
    KeepBoundary,
    KeepChunk,
    KeepLive,
    KeepWindow,
    Retention,
)

Pages: TypeAlias = tuple[int, ...]
"""Pages per group."""


def peak_pages(rule: Retention, total_tokens: int, chunk_tokens: int, page_tokens: int) -> int:
    """The most pages of a group that a request of ``total_tokens`` holds at any moment when it
    computes at most ``chunk_tokens`` a step.

    What is behind a window goes when a page is full, so the request stands on what is needed at the
    last page boundary, while its next chunk may begin as late as the last token of a page.
    """
    whole = -(-total_tokens // page_tokens)
    ahead = -(-(min(chunk_tokens, total_tokens) + page_tokens - 1) // page_tokens)
    match rule:
        case KeepAll():
            return whole
        case KeepWindow(tokens):
            return min(whole, -(-tokens // page_tokens) + ahead)
        case KeepChunk(tokens):
            behind = tokens - gcd(tokens, page_tokens)  # at a page boundary
            return min(whole, -(-behind // page_tokens) + ahead)
        case KeepBoundary():
            return min(whole, 2)  # the live slot, and the snapshot it started from
        case KeepLive():
            return 1
        case _:
            assert_never(rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request may take. ``growth``: pages beyond its cached prefix to its last token;
    ``peak``: the most it holds at once."""

    growth: Pages
    peak: Pages


def demand(spec: CacheSpec, total_tokens: int, chunk_tokens: int, cached_pages: int) -> Demand:
    """Of a request of ``total_tokens`` (prompt and all it may generate)."""
    peak = tuple(
        peak_pages(group.retention, total_tokens, chunk_tokens, spec.page_tokens)
        for group in spec.groups
    )
    return Demand(growth=tuple(max(0, pages - cached_pages) for pages in peak), peak=peak)


class PageBudget:
    """What the running requests may still take, per group."""

    def __init__(self, spec: CacheSpec, totals: Sequence[int]) -> None:
        self._keeps_all = tuple(isinstance(group.retention, KeepAll) for group in spec.groups)
        self._totals = tuple(totals)
        self._growing = [0] * len(spec.groups)
        self._peaks = [0] * len(spec.groups)

    def could_ever_fit(self, wanted: Demand) -> str | None:
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

    def settle(self, wanted: Demand, left: Sequence[int]) -> None:
        """A request has ended with ``left`` of its growth not taken."""
        for group in range(len(self._totals)):
            self._growing[group] -= left[group]
            self._peaks[group] -= wanted.peak[group]
