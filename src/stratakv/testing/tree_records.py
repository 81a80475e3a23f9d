"""What a tree driver keeps about its requests, copies and I/O. Owns the records, no choices."""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from stratakv.core.ids import NodeIds, PageKey, TicketId
from stratakv.core.page_keys import Namespace, page_keys
from stratakv.testing.tree_books import Freed, PageAt, Prefix
from stratakv.tree.lease import DeviceLease, HostHold, LoadLease
from stratakv.tree.stored import Writing

_NAMESPACE = Namespace(model=b"machine", spec_digest=b"")


@lru_cache(maxsize=8192)
def keys_of(prompt: Prefix, page_tokens: int) -> list[PageKey]:
    """Page keys of a prompt whose page i repeats the token ``prompt[i]``."""
    tokens = np.repeat(np.array(prompt, np.int32), page_tokens)
    return page_keys(tokens, _NAMESPACE, page_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A lease, before what it lacks on the device is on its way there."""

    id: int
    prompt: Prefix
    lease: DeviceLease | LoadLease


@dataclass(slots=True, eq=False)
class WalkRequest:
    """``table`` is its block table: the device page it reads at (group, page index); ``own`` are
    pages that it alone owns, of which ``live`` hold its states, by group. ``rolling``: the
    checkpoint that its next one takes the place of. ``part``: tokens computed behind the lease's
    end, as far as it matters; they only grow in number until the next page is full."""

    id: int
    prompt: Prefix
    lease: DeviceLease
    continued: int
    table: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    own: list[Freed] = field(default_factory=list[Freed])
    live: dict[int, int] = field(default_factory=dict[int, int])
    rolling: int = 0
    part: int = 0


@dataclass(slots=True, eq=False)
class RetractedRequest:
    """A retracted request: ``hold`` keeps [starts[g], end) of every group on the host. ``live``:
    the groups of which it will need a page of its own again."""

    id: int
    request: WalkRequest
    hold: HostHold
    live: list[int]


@dataclass(slots=True, eq=False)
class WalkFetch:
    """A read from storage: ``pages[g]`` are for page indices [lease.end, len(prompt))."""

    id: int
    prompt: Prefix
    lease: DeviceLease
    pages: list[list[int]]


@dataclass(slots=True, eq=False)
class WalkPrefetch:
    """A request waits for what storage reads into ``pages[g]``, for page indices [first, end), NONE
    where nothing lacked. ``hold`` is what it counts on, and after the landing what has landed."""

    id: int
    prompt: Prefix
    hold: HostHold
    first: int
    pages: list[list[int]]


@dataclass(slots=True, eq=False)
class Written:
    """A write to storage under way."""

    id: int
    writing: Writing


@dataclass(slots=True, eq=False)
class Copy:
    """One ticket: rows and places of every group that it moves."""

    ticket: TicketId
    load: bool
    rows: dict[int, NodeIds]
    places: dict[int, list[PageAt]]
