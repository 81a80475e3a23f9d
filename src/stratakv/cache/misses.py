"""Why a prompt was not cached further: of the requests that were admitted last, and of two prompts.

Owns what is remembered of admitted prompts, for people alone. Nothing may be decided by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.cache.prices import AdmissionRequest
from stratakv.cache.records import CachedTokens, CacheUse
from stratakv.core.clock import NowS
from stratakv.core.ids import PageKey, RequestId, TokenIds
from stratakv.core.page_keys import Namespace, PageHasher
from stratakv.policy.checkpoints import last_end
from stratakv.policy.losses import Bill, Known, label
from stratakv.spec.groups import CacheSpec
from stratakv.tree.gone import NO_DEPARTURES, Departures
from stratakv.tree.lacking import Lacking
from stratakv.tree.prefix_tree import PrefixTree

MOST_PROMPTS: Final = 4096
MOST_TOKENS: Final = 1 << 20
"""Of all remembered prompts together: some megabytes."""


class Difference(Enum):
    """What two prompts part by, the first of these that they differ in."""

    MODEL = "model"
    ADAPTER = "adapter"
    SALT = "cache_salt"
    TOKEN = "token"
    END = "end"  # one of them ends there


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Two prompts begin with the same ``tokens``, and part by ``difference``; one that is not of
    tokens keeps apart all of their pages. ``other``: the earlier one, None: it has no name."""

    other: RequestId | None
    tokens: int
    difference: Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedBy:
    """A group that lacked ``pages`` to go on at token ``end``, from token ``first`` on.
    ``left_device_s``, ``left_host_s``: so many seconds before the report the last of them left;
    None: it was not there. ``wanted``: a checkpoint needs it."""

    group: str
    end: int
    first: int
    pages: int
    left_device_s: float | None
    left_host_s: float | None
    wanted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """Tokens [start, end) left the cache ``ago_s`` seconds before the report, the last copy from
    ``tier``."""

    start: int
    end: int
    tier: str
    ago_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MissReport:
    """``cached``: None of a prompt that no request has sent. ``usable``: tokens that were usable on
    device and host, ``known``: as far as the group that keeps all went. ``lost``: tokens that the
    cache knew and did not give, by tier and reason; None where storage has not ended, or there was
    no request. ``parting``: from the earlier prompt that has most in common with it."""

    request: RequestId | None
    use: CacheUse
    ago_s: float
    prompt_tokens: int
    page_tokens: int
    cached: CachedTokens | None
    usable: int
    known: int
    stopped: tuple[StoppedBy, ...]
    evicted: tuple[Evicted, ...]
    lost: tuple[tuple[str, str, int], ...] | None
    parting: Parting | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Remembered:
    """A prompt, and what the tree had of it when its request was admitted; ends are in pages."""

    request: RequestId | None
    use: CacheUse
    at_s: float
    tokens: TokenIds
    namespace: Namespace
    cached: CachedTokens | None
    usable: int
    known: int
    lacking: Sequence[Lacking]
    departures: Departures
    bill: Bill | None = None


class MissLog:
    """``tree``: of whose pages; ``now_s``: the clock by which it remembers when they left."""

    def __init__(self, spec: CacheSpec, tree: PrefixTree, now_s: NowS) -> None:
        self._page = spec.page_tokens
        self._names = [group.name for group in spec.groups]
        self._tree = tree
        self._now_s = now_s
        self._prompts: dict[RequestId, Remembered] = {}
        self._tokens = 0

    def admitted(self, asked: AdmissionRequest, known: Known, cached: CachedTokens) -> None:
        """A request's prompt stands on ``cached``, of what the tree knew."""
        if asked.request is None:
            return
        old = self._prompts.pop(asked.request, None)
        tokens = asked.prefix.tokens[: asked.tokens]
        self._tokens += len(tokens) - (0 if old is None else len(old.tokens))
        found = self._of_tree(
            asked.prefix.keys, known.usable, known.anchor, known.whole, len(tokens)
        )
        lacking, departures = found if CacheUse.READ in asked.use else ([], NO_DEPARTURES)
        self._prompts[asked.request] = Remembered(
            request=asked.request,
            use=asked.use,
            at_s=self._now_s(),
            tokens=tokens,
            namespace=asked.prefix.namespace,
            cached=cached,
            usable=known.usable,
            known=known.whole,
            lacking=lacking,
            departures=departures,
        )
        while len(self._prompts) > MOST_PROMPTS or (
            self._tokens > MOST_TOKENS and len(self._prompts) > 1
        ):
            oldest = next(iter(self._prompts))
            self._tokens -= len(self._prompts.pop(oldest).tokens)

    def billed(self, request: RequestId | None, bill: Bill) -> None:
        """What a request has lost is known, perhaps long after it was admitted."""
        if request is not None and request in self._prompts:
            self._prompts[request] = replace(self._prompts[request], bill=bill)

    def of_request(self, name: str) -> list[MissReport]:
        """Of the requests that a client knows as ``name``, or the engine, the oldest first; none
        where it is too long ago."""
        wanted = {name, name.partition("cmpl-")[2]} - {""}
        found = [
            one for one in self._prompts.values() if _names_of(one.request).intersection(wanted)
        ]
        return [self._report(one, self._nearest(one)) for one in found]

    def of_prompts(self, earlier: PageHasher, later: PageHasher) -> MissReport:
        """Where ``later`` parts from ``earlier``, and what is cached of it at this moment."""
        match = self._tree.match(later.keys, last_end(len(later.tokens), self._page))
        beyond = self._tree.beyond(later.keys, match, len(later.keys))
        lacking, departures = self._of_tree(
            later.keys, match.end, match.anchor_end, beyond.whole, len(later.tokens)
        )
        now = Remembered(
            request=None,
            use=CacheUse.ALL,
            at_s=self._now_s(),
            tokens=later.tokens,
            namespace=later.namespace,
            cached=None,
            usable=match.end,
            known=beyond.whole,
            lacking=lacking,
            departures=departures,
        )
        same = _common(earlier.tokens, later.tokens)
        shorter = min(len(earlier.tokens), len(later.tokens))
        difference = _difference(earlier.namespace, later.namespace, ended=same == shorter)
        return self._report(now, Parting(other=None, tokens=same, difference=difference))

    def _of_tree(
        self, keys: Sequence[PageKey], usable: int, anchor: int, whole: int, tokens: int
    ) -> tuple[list[Lacking], Departures]:
        """What stops a prompt at ``usable``, and how pages behind ``whole`` left."""
        lacking = self._tree.lacking(keys, anchor) if usable < anchor else []
        return lacking, self._tree.departures(keys, whole, tokens // self._page)

    def _nearest(self, prompt: Remembered) -> Parting | None:
        """From which earlier prompt it parts last: of its own namespace, or, where none of those
        has a token in common with it, of any."""
        best: tuple[bool, int, Remembered] | None = None
        for one in self._prompts.values():
            if one is prompt:
                break
            same = _common(one.tokens, prompt.tokens)
            rank = (same > 0 and one.namespace == prompt.namespace, same)
            if same and (best is None or rank >= best[:2]):
                best = (*rank, one)
        if best is None:
            return None
        _, same, one = best
        ended = same == min(len(one.tokens), len(prompt.tokens))
        difference = _difference(one.namespace, prompt.namespace, ended=ended)
        return Parting(other=one.request, tokens=same, difference=difference)

    def _report(self, one: Remembered, parting: Parting | None) -> MissReport:
        now_s, page, lost = self._now_s(), self._page, None
        if one.bill is not None:
            lost = tuple((*label(cause), pages * page) for cause, pages in one.bill.lost)
        return MissReport(
            request=one.request,
            use=one.use,
            ago_s=now_s - one.at_s,
            prompt_tokens=len(one.tokens),
            page_tokens=page,
            cached=one.cached,
            usable=one.usable * page,
            known=one.known * page,
            stopped=tuple(self._stopped(each, one, now_s) for each in one.lacking),
            evicted=self._evicted(one, now_s),
            lost=lost,
            parting=parting,
        )

    def _stopped(self, each: Lacking, one: Remembered, now_s: float) -> StoppedBy:
        device_s, host_s = (now_s - at_s if at_s else None for at_s in each.left_s)
        end = min(one.known, last_end(len(one.tokens), self._page))
        return StoppedBy(
            group=self._names[each.group],
            end=end * self._page,
            first=each.first * self._page,
            pages=each.pages,
            left_device_s=device_s,
            left_host_s=host_s,
            wanted=each.wanted,
        )

    def _evicted(self, one: Remembered, now_s: float) -> tuple[Evicted, ...]:
        """Pages that left together are one; those of which nothing is remembered are left out."""
        from_host, at_s = one.departures.from_host, one.departures.at_s
        first, page = one.known * self._page, self._page
        return tuple(
            Evicted(
                start=first + start * page,
                end=first + end * page,
                tier="host" if from_host[start] else "device",
                ago_s=now_s - at_s.item(start),
            )
            for start, end in pairwise(_parts(from_host, at_s))
            if not np.isnan(at_s[start])
        )


def _parts(*columns: npt.NDArray[np.generic]) -> list[int]:
    """Where a row of any column is not as the one before it, and how many rows there are."""
    differs = np.ones(len(columns[0]), np.bool_)
    differs[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return [*np.flatnonzero(differs).tolist(), len(differs)]


def _names_of(request: RequestId | None) -> set[str]:
    """What the requests of one answer are called: the engine's name, that of the answer, and what
    its client called it (``GenerateCall.id``)."""
    answer = (request or "").rpartition("-")[0]
    return {request or "", answer, answer.rpartition("-")[0]} - {"", "cmpl", "chatcmpl"}


def _common(one: TokenIds, other: TokenIds) -> int:
    """How many tokens both begin with."""
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if len(differs) else shorter


def _difference(one: Namespace, other: Namespace, *, ended: bool) -> Difference:
    if (one.model, one.spec_digest) != (other.model, other.spec_digest):
        return Difference.MODEL
    if one.adapter != other.adapter:
        return Difference.ADAPTER
    if one.salt != other.salt:
        return Difference.SALT
    return Difference.END if ended else Difference.TOKEN
