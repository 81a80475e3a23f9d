"""From bytes to pages: how much each group gets on each tier.

Owns the split of one byte budget over a model's groups. Pure arithmetic on integers, so that every
rank and the planner reach the same page counts. Must not allocate, nor ask a device what is free.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isqrt
from typing import Final, TypeAlias, assert_never

from stratakv.core.errors import ConfigError
from stratakv.core.units import format_bytes, parse_bytes
from stratakv.spec.groups import CacheGroup, CacheSpec
from stratakv.spec.retention import (
    KeepAll,
    KeepBoundary,
    KeepChunk,
    KeepLive,
    KeepWindow,
    peak_pages,
)

MOST_CHECKPOINTS: Final = 4
"""Per conversation: 4 windows give gpt-oss a token hit rate of 0.85 where the best possible policy
reaches 0.90, and more serve no more."""
FILLING_PAGES: Final = 2
"""Of a spilled request, beside the pages of a step's tokens: the one that is filling, and the one
before, which is being saved."""
PARTS: Final = 8
"""Checkpoints per conversation are counted in parts of this size: a quotient of integers."""
AUTO_RATIO: Final = 2
MAX_PAGES: Final = 2**31 - 1
"""Page ids are int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLoad:
    """What the device is split for. ``chunk_tokens`` is the most that one request runs in a step;
    ``chat_tokens`` the length of a typical conversation, of which the anchor holds many.
    ``buffer_rows``: of the buffer of a request whose selected rows are on the host."""

    max_running: int
    max_model_len: int
    chunk_tokens: int
    chat_tokens: int = 2048
    buffer_rows: int = 0

    def __post_init__(self) -> None:
        for field in ("max_running", "max_model_len", "chunk_tokens", "chat_tokens"):
            value = getattr(self, field)
            if value < 1:
                raise ValueError(f"{field} {value}: allowed is 1 and more")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """``--host-memory``: bytes, split over the groups as the device's are. 0 turns the tier off."""

    bytes: int

    def __post_init__(self) -> None:
        if self.bytes < 0:
            raise ValueError(f"{self.bytes} bytes of the host: allowed are 0 and more")


@dataclass(frozen=True, slots=True)
class HostRatio:
    """``--host-ratio``: host pages = int(device pages x ratio), per group, but at most as many as
    the device has where only requests hold any. 0 turns the tier off."""

    ratio: float

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < float("inf"):
            raise ValueError(f"host ratio {self.ratio}: allowed are finite numbers from 0 up")


@dataclass(frozen=True, slots=True)
class HostAuto:
    """Neither flag: a ratio of 2, or less where that would not fit 0.8 of the free memory."""


HostBudget: TypeAlias = HostMemory | HostRatio | HostAuto


def host_budget(host_memory: str | None, host_ratio: float | None) -> HostBudget:
    """The two flags as given, of which one at most is."""
    assert host_memory is None or host_ratio is None, "both size the host tier"
    if host_memory is not None:
        return HostMemory(parse_bytes(host_memory, "--host-memory"))
    return HostAuto() if host_ratio is None else HostRatio(host_ratio)


def device_bytes(spec: CacheSpec, pages: Sequence[int]) -> int:
    return sum(n * group.page_bytes for n, group in zip(pages, spec.groups, strict=True))


def host_bytes(spec: CacheSpec, pages: Sequence[int]) -> int:
    return sum(n * group.host_stride_bytes for n, group in zip(pages, spec.groups, strict=True))


def device_pages(
    spec: CacheSpec, budget_bytes: int, load: ExpectedLoad, given: str | None = None
) -> tuple[int, ...]:
    """Pages of every group on the device: as many anchor pages as fit ``budget_bytes`` together
    with what the other groups need beside them.

    ``given``: the budget as an operator wrote it. ConfigError names ``--device-memory`` and the
    least that would do, where not even one request of a whole chunk, and one page to go on, fits.
    """
    one_request, least = min(load.chunk_tokens, load.max_model_len), least_pages(spec, load)
    least_bytes = device_bytes(spec, pages_beside(spec, least, load))
    if least_bytes > budget_bytes:
        raise ConfigError(
            f"--device-memory {given or format_bytes(budget_bytes)}: too little for one request of "
            f"{one_request} tokens in pages of {spec.page_tokens} (--page-tokens); allowed is "
            f"{least_bytes} bytes ({format_bytes(least_bytes)}) and more"
        )
    # Bytes grow with the anchor's pages, so the last count that fits can be bisected.
    fits, too_many = least, MAX_PAGES + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if device_bytes(spec, pages_beside(spec, middle, load)) <= budget_bytes:
            fits = middle
        else:
            too_many = middle
    anchor_pages, *others = pages_beside(spec, fits, load)
    if not spec.groups[0].page_bytes:
        # Ids cost nothing: no request should ever wait for one, or be refused for want of one.
        ids = load.max_running * -(-load.max_model_len // spec.page_tokens)
        anchor_pages = max(anchor_pages, min(ids, MAX_PAGES))
    return (anchor_pages, *others)


def least_pages(spec: CacheSpec, load: ExpectedLoad) -> int:
    """Of the anchor: one request of a whole chunk, and one page to go on."""
    return -(-min(load.chunk_tokens, load.max_model_len) // spec.page_tokens) + 1


def checkpoint_parts(spec: CacheSpec, chat_tokens: int) -> int:
    """Checkpoints to make room for per conversation that the anchor holds, times ``PARTS``.

    A conversation has two that are not superseded, at the ends of its last prompt and answer, and
    eviction by age lets both go before a younger one's first. With room for k each, about
    k / (k + 1) of what the anchor holds can be continued; per byte that is most where k is the
    square root of (bytes of a conversation in the anchor) / (bytes of a checkpoint). Between 1,
    or the anchor would hold what nobody can continue, and ``MOST_CHECKPOINTS``.
    """
    kept = sum(group.page_bytes for group in spec.groups if group.keeps_all)
    checkpoint = sum(
        group.page_bytes * _checkpoint_pages(spec, group, chat_tokens) for group in spec.groups
    )
    if not checkpoint:
        return PARTS * MOST_CHECKPOINTS
    ratio = PARTS * PARTS * chat_tokens * kept // (spec.page_tokens * checkpoint)
    return min(PARTS * MOST_CHECKPOINTS, max(PARTS, isqrt(ratio)))


def pages_beside(spec: CacheSpec, anchor_pages: int, load: ExpectedLoad) -> tuple[int, ...]:
    """Pages of every group where the anchor has ``anchor_pages``."""
    parts = checkpoint_parts(spec, load.chat_tokens)
    others = (_other_pages(spec, group, anchor_pages, load, parts) for group in spec.groups[1:])
    return (anchor_pages, *others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Why fewer than ``--max-running`` requests can run at once: ``group`` has ``pages``, of which
    each holds ``live``. ``device_bytes`` are enough for all."""

    running: int
    group: str
    pages: int
    live: int
    device_bytes: int


def shortage(spec: CacheSpec, device: Sequence[int], load: ExpectedLoad) -> Shortage | None:
    """The group whose states bound the running requests most, where one does. Keys and values are
    left out: how many a request holds depends on its length.

    device: pages of every group, of ``device_pages``.
    """

    def running(pages: Sequence[int]) -> list[int]:
        return [n // _live_pages(spec, g, load) for n, g in zip(pages, spec.groups, strict=True)]

    def enough(anchor_pages: int) -> bool:
        there = running(pages_beside(spec, anchor_pages, load))
        return all(there[group.id] >= load.max_running for group in states)

    states = [group for group in spec.groups if group.stateful]
    there = running(device)
    short = min(states, key=lambda group: there[group.id], default=None)
    if short is None or there[short.id] >= load.max_running:
        return None
    # As many conversations as may run, or two states of each: then no group is short.
    most = load.max_running * max(2, -(-load.chat_tokens // spec.page_tokens))
    anchor_pages = bisect_left(range(most), 1, key=enough)
    return Shortage(
        running=there[short.id],
        group=short.name,
        pages=device[short.id],
        live=_live_pages(spec, short, load),
        device_bytes=device_bytes(spec, pages_beside(spec, anchor_pages, load)),
    )


def host_pages(
    spec: CacheSpec, device: Sequence[int], budget: HostBudget, free_bytes: int
) -> tuple[int, ...]:
    """Pages of every group on the host; all 0 where the tier is off.

    device: pages of every group on the device. free_bytes: host memory not in use. ConfigError
    where what was asked for is not there, or is too little for one page of every group; with
    neither flag given the tier is then off.
    """
    # A prefix takes as many pages of such a group as of the anchor, wherever they are.
    device = [
        device[0] if g.at_home_on_host else n for n, g in zip(device, spec.groups, strict=True)
    ]
    scratch_bytes = _scratch_bytes(spec, device)
    cached_bytes = host_bytes(spec, device) - scratch_bytes
    assert cached_bytes > 0, "a model that caches nothing has no budget"
    match budget:
        case HostRatio(ratio):
            flag = f"--host-ratio {ratio:g}"
            pages = tuple(
                min(ceil(n * ratio), n) if group.scratch else min(int(n * ratio), MAX_PAGES)
                for n, group in zip(device, spec.groups, strict=True)
            )
        case HostMemory(size):
            flag = f"--host-memory {format_bytes(size)}"
            pages = _host_split(spec, device, size)
        case HostAuto():
            size = min(AUTO_RATIO * cached_bytes + scratch_bytes, free_bytes * 4 // 5)
            pages = _host_split(spec, device, size)
            return pages if all(pages) else (0,) * len(pages)
        case _:
            assert_never(budget)
    needed_bytes = host_bytes(spec, pages)
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"{flag}: {format_bytes(needed_bytes)} of host memory are needed and "
            f"{format_bytes(free_bytes)} are free; allowed is that or less"
        )
    off = budget in (HostRatio(0), HostMemory(0))
    if not off and not all(pages):
        short = spec.groups[pages.index(0)].name
        allowed = "is more" if spec.has_home_on_host else "are more, and 0"
        raise ConfigError(f"{flag}: too little for one page of group {short!r}; allowed {allowed}")
    return pages


def _host_split(spec: CacheSpec, device: Sequence[int], size: int) -> tuple[int, ...]:
    """``size`` bytes as the device's are split, but no more of a group's scratch than the device
    has: the rest is for groups that can use it.

    Only a retracted request has scratch on the host, nothing new starts before it is back, and so
    those that run and those that were retracted never hold more than the device's pages together.
    """
    mirror_bytes, scratch_bytes = host_bytes(spec, device), _scratch_bytes(spec, device)
    # Rounded up: the one page of a server of one request must not round to none.
    shares = [min(n, -(-n * size // mirror_bytes)) for n in device]
    rest = max(0, size - _scratch_bytes(spec, shares))
    cached_bytes = mirror_bytes - scratch_bytes
    return tuple(
        share if group.scratch else min(n * rest // cached_bytes, MAX_PAGES)
        for n, share, group in zip(device, shares, spec.groups, strict=True)
    )


def spilled_pages(group: CacheGroup, load: ExpectedLoad, page_tokens: int, tokens: int = 1) -> int:
    """Device pages of a group that a request holds whose full pages are on the host, and that
    computes ``tokens`` at once."""
    return -(-load.buffer_rows // group.page_rows) + -(-tokens // page_tokens) + FILLING_PAGES


def _scratch_bytes(spec: CacheSpec, pages: Sequence[int]) -> int:
    """Of ``host_bytes``, those of groups that cache nothing."""
    of = zip(pages, spec.groups, strict=True)
    return sum(n * group.host_stride_bytes for n, group in of if group.scratch)


def _live_pages(spec: CacheSpec, group: CacheGroup, load: ExpectedLoad) -> int:
    """What one request of any length may hold."""
    return peak_pages(group.retention, load.max_model_len, load.chunk_tokens, spec.page_tokens)


def _checkpoint_pages(spec: CacheSpec, group: CacheGroup, chat_tokens: int) -> int:
    """Pages that a group keeps for one checkpoint, beyond those of the whole prefix; a window does
    not reach further back than its conversation."""
    match group.retention:
        case KeepAll() | KeepLive():
            return 0
        case KeepWindow(tokens) | KeepChunk(tokens):
            return -(-min(tokens, chat_tokens) // spec.page_tokens)
        case KeepBoundary():
            return 1
        case _:
            assert_never(group.retention)


def _other_pages(
    spec: CacheSpec, group: CacheGroup, anchor_pages: int, load: ExpectedLoad, parts: int
) -> int:
    """Live pages of the running requests, and checkpoints of the chats that the anchor can hold.

    Never more than the anchor has: a page of another group stands at an anchor page's position.
    Scratch is never more than ``--max-running`` requests have, and there is nothing else of it.
    """
    if group.at_home_on_host:
        # As many requests as the anchor holds, of which one at a time computes its prompt.
        decoding = spilled_pages(group, load, spec.page_tokens)
        chunk = min(load.chunk_tokens, load.max_model_len)
        prefilling = spilled_pages(group, load, spec.page_tokens, chunk)
        chat = -(-load.chat_tokens // spec.page_tokens)
        rest = -(-max(0, anchor_pages - chat) * decoding // chat)
        return min(anchor_pages, prefilling + rest)
    if group.keeps_all:
        return anchor_pages
    live = _live_pages(spec, group, load)
    checkpoint = _checkpoint_pages(spec, group, load.chat_tokens)
    # Where the anchor holds fewer chats than may run, fewer will: a small device must not spend
    # everything on states of requests that have no room to run. All in proportion to the anchor,
    # not by whole chats, so that one anchor page more never costs more than one page here.
    held = anchor_pages * spec.page_tokens
    running = min(held, load.max_running * load.chat_tokens)
    pages = (PARTS * live * running + parts * checkpoint * held) // (PARTS * load.chat_tokens)
    return min(anchor_pages, max(live, pages))
