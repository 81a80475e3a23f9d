"""Which pages of a prefix a cache group must hold: the one rule behind every decision.

Owns the rules, ``needed``, and what KV events call a rule. A prefix is usable iff every group holds
the pages that its rule needs at the prefix's end. Match, lease, eviction, load-back, storage,
hand-off and retraction all ask ``needed`` and nothing else, so no attention kind has a code path of
its own outside ``spec``. Pure; must not know trees or bytes.
"""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Full attention, MLA latent, index keys, compressed KV: every page of the prefix."""


@dataclass(frozen=True, slots=True)
class KeepWindow:
    """Sliding-window attention: the pages that hold the last ``tokens`` tokens."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a window holds at least one token, got {self.tokens}")


@dataclass(frozen=True, slots=True)
class KeepChunk:
    """Chunked-local attention (Llama 4): the pages of the chunk of ``tokens`` in progress."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a chunk holds at least one token, got {self.tokens}")


@dataclass(frozen=True, slots=True)
class KeepBoundary:
    """Mamba and linear attention: the one snapshot taken at the end of the prefix."""


@dataclass(frozen=True, slots=True)
class KeepLive:
    """Request-scoped scratch (DeepSeek-V4's open blocks): nothing at a page boundary."""


Retention: TypeAlias = KeepAll | KeepWindow | KeepChunk | KeepBoundary | KeepLive


def needed(rule: Retention, end_tokens: int, page_tokens: int) -> range:
    """Indices of the pages that ``rule`` needs in order to continue at token ``end_tokens``.

    At a page boundary these are pages of the tree. At an unaligned end the range also names the
    live page (index ``end_tokens // page_tokens``): the partly filled page of a token group, the
    live slot of a state group. Live pages belong to a request, never to the tree.
    """
    if end_tokens < 0 or page_tokens < 1:
        raise ValueError(f"end_tokens={end_tokens}, page_tokens={page_tokens}")
    stop = -(-end_tokens // page_tokens)
    match rule:
        case KeepAll():
            first = 0
        case KeepWindow(tokens):
            # One token before the next query's first key (``first_key``). What lies beside a
            # window's keys may be read a token longer: DeepSeek-V4 keeps a closed block's share in
            # the next entry where the block ends, and reads it when the next block closes. With a
            # window of one block, of 4 tokens, three of which are open, that is 4 tokens back.
            first = max(0, end_tokens - tokens) // page_tokens
        case KeepChunk(tokens):
            first = end_tokens // tokens * tokens // page_tokens
        case KeepBoundary():
            first = max(0, stop - 1)
        case KeepLive():
            first = end_tokens // page_tokens
        case _:
            assert_never(rule)
    return range(min(first, stop), stop)


def handed_over(rule: Retention, end_tokens: int, page_tokens: int) -> range:
    """What is taken of a prompt of ``end_tokens`` that another engine computes: what is ``needed``
    and, of a group of tokens, what the same prompt sent again can hit. One token of that is always
    computed, so its deepest hit may lie a page lower, and its window with it.
    """
    span = needed(rule, end_tokens, page_tokens)
    match rule:
        case KeepAll() | KeepWindow() | KeepChunk():
            hit = max(0, end_tokens - 1) // page_tokens * page_tokens
            return range(min(span.start, needed(rule, hit, page_tokens).start), span.stop)
        case KeepBoundary() | KeepLive():
            return span
        case _:
            assert_never(rule)


def needed_starts(rule: Retention, page_tokens: int, ends: int) -> npt.NDArray[np.int64]:
    """First needed page at every page boundary: ``out[e] == needed(rule, e * P, P).start`` for e in
    [0, ends]; int64 [ends + 1]. One table turns a whole path's question into array work."""
    end = np.arange(ends + 1, dtype=np.int64)
    match rule:
        case KeepAll():
            return np.zeros_like(end)
        case KeepWindow(tokens):
            return np.maximum(0, end * page_tokens - tokens) // page_tokens
        case KeepChunk(tokens):
            return end * page_tokens // tokens * tokens // page_tokens
        case KeepBoundary():
            return np.maximum(0, end - 1)
        case KeepLive():
            return end
        case _:
            assert_never(rule)


def complete_ends(
    starts: npt.NDArray[np.int64], there: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """At which page boundaries a group holds what it needs: bool [ends + 1].

    starts: int64 [ends + 1], of ``needed_starts``. there: whether each page is held, bool [ends].
    """
    # gap[e]: the last missing page before e; complete iff it lies before what e needs.
    gap = np.empty(len(there) + 1, np.int64)
    gap[0] = -1
    index = np.arange(len(there), dtype=np.int64)
    gap[1:] = np.maximum.accumulate(np.where(there, -1, index))
    return gap < starts


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


def first_key(rule: Retention, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """First key position that the query at each position attends to; the last one is its own.

    int64 [n] -> int64 [n], non-decreasing. A window of W tokens counts the query's own, as
    ``sliding_window`` in Hugging Face's configs does.
    """
    match rule:
        case KeepAll():
            return np.zeros_like(positions)
        case KeepWindow(tokens):
            return np.maximum(0, positions - (tokens - 1))
        case KeepChunk(tokens):
            return positions // tokens * tokens
        case KeepBoundary() | KeepLive():
            raise AssertionError(f"a group under {rule} holds states, not keys")
        case _:
            assert_never(rule)


class EventKind(NamedTuple):
    """A word of vLLM's ``KVCacheSpecKind``, by which routers know the group that decides a match.
    ``window``: tokens of a sliding window, where the rule is one."""

    name: str
    window: int | None = None


def event_kind(rule: Retention) -> EventKind:
    match rule:
        case KeepAll():
            return EventKind("full_attention")
        case KeepWindow(tokens):
            return EventKind("sliding_window", tokens)
        case KeepChunk():
            return EventKind("chunked_local_attention")
        case KeepBoundary():
            return EventKind("mamba")
        case KeepLive():
            return EventKind("unknown")
        case _:
            assert_never(rule)
