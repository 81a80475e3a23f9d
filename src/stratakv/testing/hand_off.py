"""Two roles in one process: an engine that computes prompts, one that decodes, and a copy of bytes
between their device pools in place of a network.

Owns the sessions of the two, and when a byte moves. A copy cannot be called off: what one side has
given up is still written for a while, as with real transports, and only then do both learn of its
end. Must not know what an engine does with a request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from random import Random
from typing import TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from stratakv.cache.footprint import TransferPages
from stratakv.core.ids import GroupId, RequestId
from stratakv.engine.request import Phase, Prompt, Request
from stratakv.engine.roles import (
    ChunkComputed,
    Computed,
    FirstToken,
    MayStart,
    PartSent,
    Received,
    Role,
    RoleEvent,
    Sent,
    Start,
    TransferFailed,
    computed_here,
)
from stratakv.memory.device_pools import DevicePages
from stratakv.memory.host_arena import HostArena
from stratakv.memory.mapped import rows_of
from stratakv.spec.groups import CacheSpec
from stratakv.tree.nodes import Tier

PageMove: TypeAlias = tuple[GroupId, Tier, int, int]
"""Group, tier there, page here, page there."""


class HandOffSide(Enum):
    PREFILL = auto()
    DECODE = auto()


@dataclass(slots=True, eq=False)
class _Session:
    """One request's hand-off. ``begun``: sides whose pages are engaged; ``notified``: those
    that know its end; ``left``: copies still to be made, group, tier there and pages at both ends;
    ``given``:
    the page index up to which those of each group are among them; ``lent``: prefill does not know
    that none is left."""

    target: TransferPages | None = None
    first: FirstToken | None = None
    given_up: bool = False
    lent: bool = False
    given: list[int] = field(default_factory=list[int])
    arrived: set[HandOffSide] = field(default_factory=set[HandOffSide])
    begun: set[HandOffSide] = field(default_factory=set[HandOffSide])
    notified: set[HandOffSide] = field(default_factory=set[HandOffSide])
    left: list[PageMove] = field(default_factory=list[PageMove])

    @property
    def over(self) -> bool:
        """Whether nobody writes or reads any more."""
        return not self.left and (self.first is not None or self.given_up)

    def give(self, source: TransferPages) -> None:
        """What is wanted of ``source`` and was not given before."""
        assert self.target is not None, "computed for nobody"
        self.lent = True
        self.given = self.given or [0] * len(source.groups)
        for here, there in source.paired(self.target.part(self.given, source)):
            pairs = zip(here.pages.tolist(), there.pages.tolist(), strict=True)
            self.left += [(there.group, there.tier, *pair) for pair in pairs]
        self.given = source.reached(self.given)


def _at_once() -> int:
    return 1 << 30


def _nothing() -> int:
    return 0


class LocalHandOff:
    """``roles`` are for the engines; ``connect`` names which bytes are theirs. ``moved``: pages so
    far, by group. Everything moves at the first look; ``slow``, ``stop`` and ``go`` change that."""

    def __init__(self) -> None:
        self.roles: dict[HandOffSide, Role] = {
            HandOffSide.PREFILL: LocalPrefillRole(self),
            HandOffSide.DECODE: LocalDecodeRole(self),
        }
        self.moved: dict[GroupId, int] = {}
        self._returned: list[Prompt] = []
        self._pace = _at_once
        self._sessions: dict[RequestId, _Session] = {}
        self._may_start: dict[HandOffSide, list[RequestId]] = {side: [] for side in HandOffSide}
        self._ends: tuple[DevicePages, DevicePages] | None = None
        self._arenas: Sequence[HostArena] = ()
        self._spec: CacheSpec | None = None

    def connect(
        self,
        spec: CacheSpec,
        prefill: DevicePages,
        decode: DevicePages,
        arenas: Sequence[HostArena] = (),
    ) -> None:
        """``arenas``: host pages of the side that decodes, where it may take some."""
        self._spec, self._ends, self._arenas = spec, (prefill, decode), arenas

    def slow(self, random: Random, most: int) -> None:
        """At most so many pages move at a look, of one session after the other."""
        self._pace = partial(random.randrange, most + 1)

    def stop(self) -> None:
        """Nothing moves."""
        self._pace = _nothing

    def go(self) -> None:
        self._pace = _at_once

    def __len__(self) -> int:
        """Sessions whose end not everybody knows."""
        return len(self._sessions)

    def session(self, request: RequestId) -> _Session:
        return self._sessions.setdefault(request, _Session())

    def arrive(self, side: HandOffSide, request: RequestId) -> None:
        self.session(request).arrived.add(side)

    def send_back(self, request: Request) -> Start:
        """A request that was retracted is to be computed again, where prompts are."""
        session = self._sessions.get(request.id)
        if session is None:
            self.arrive(HandOffSide.DECODE, request.id)
            self._returned.append(replace(request.prompt, tokens=request.known))
            return Start.RECEIVE
        return Start.WAIT if HandOffSide.DECODE in session.notified else Start.RECEIVE

    def returned(self) -> list[Prompt]:
        """Prompts to be submitted to the engine that computes them; given once."""
        found, self._returned = self._returned, []
        return found

    def is_reserved(self, request: RequestId) -> bool:
        return self.session(request).target is not None

    def reserve(self, request: RequestId, pages: TransferPages) -> None:
        self.engage(HandOffSide.DECODE, request).target = pages
        self._may_start[HandOffSide.PREFILL].append(request)

    def engage(self, side: HandOffSide, request: RequestId) -> _Session:
        """A transfer begins on one side."""
        session = self.session(request)
        session.begun.add(side)
        return session

    def leave(self, side: HandOffSide, request: RequestId) -> None:
        session = self._sessions.get(request)
        if session is None or side in session.notified:
            return
        if any(prompt.id == request for prompt in self._returned):  # nobody else knows of it
            self._returned = [prompt for prompt in self._returned if prompt.id != request]
            session.notified.add(HandOffSide.PREFILL)
        session.given_up |= not session.over
        if side not in session.begun:
            self._notify(side, request, session)

    def poll(self, side: HandOffSide) -> list[RoleEvent]:
        self._move()
        found: list[RoleEvent] = [MayStart(request) for request in self._may_start[side]]
        self._may_start[side].clear()
        for request, session in list(self._sessions.items()):
            if side is HandOffSide.PREFILL and session.lent and not session.left:
                session.lent = False
                if not session.over:
                    found.append(PartSent(request))
            if side not in session.arrived - session.notified or not session.over:
                continue
            self._notify(side, request, session)
            if session.given_up:
                found.append(TransferFailed(request, "the other side gave it up"))
            elif side is HandOffSide.PREFILL:
                found.append(Sent(request))
            else:
                assert session.first is not None
                found.append(Received(request, session.first))
        return found

    def _notify(self, side: HandOffSide, request: RequestId, session: _Session) -> None:
        session.notified.add(side)
        if len(session.notified) == len(HandOffSide):
            del self._sessions[request]
            self._may_start[HandOffSide.DECODE].append(request)  # it may be sent back

    def _move(self) -> None:
        pages = self._pace()
        for session in self._sessions.values():
            some, session.left = session.left[:pages], session.left[pages:]
            pages -= len(some)
            for copy in some:
                self._copy(*copy)

    def _copy(self, group: GroupId, tier: Tier, here: int, there: int) -> None:
        assert self._spec is not None, "nobody has connected the two"
        assert self._ends is not None
        source, target = self._ends
        at, to = rows_of(np.array([here], np.int32)), rows_of(np.array([there], np.int32))
        self.moved[group] = self.moved.get(group, 0) + 1
        if tier == Tier.HOST:
            self._copy_to_host(group, at, there)
            return
        for buffer in self._spec.groups[group].buffers:
            for layer in range(len(buffer.layers)):
                pages = source.layer_pages(group, buffer.name, layer)[at]
                target.layer_pages(group, buffer.name, layer)[to] = pages

    def _copy_to_host(self, group: GroupId, at: npt.NDArray[np.int64], there: int) -> None:
        """One page in one piece, as the host tier has it."""
        assert self._ends is not None
        arena = self._arenas[group]
        for part in arena.layout.segments:
            name = arena.group.buffers[part.buffer].name
            page = self._ends[0].layer_pages(group, name, part.layer)[at]
            arena.bytes[there, part.offset_bytes : part.offset_bytes + part.bytes] = page


class LocalPrefillRole:
    """Computes a prompt once the other side has taken pages for it, and sends it."""

    def __init__(self, link: LocalHandOff) -> None:
        self._link = link

    def arrived(self, request: Request) -> None:
        self._link.arrive(HandOffSide.PREFILL, request.id)

    def may_start(self, request: Request) -> Start:
        return Start.COMPUTE if self._link.is_reserved(request.id) else Start.WAIT

    def reserved(self, request: Request, pages: TransferPages) -> None:
        raise AssertionError(f"{request.id} receives {pages} where prompts are computed")

    def computed(
        self, request: Request, computed: Computed, pages: Callable[[], TransferPages]
    ) -> Phase:
        session = self._link.engage(HandOffSide.PREFILL, request.id)
        if not session.given_up:
            session.give(pages())
        match computed:
            case ChunkComputed():
                return Phase.PREFILLING
            case FirstToken():
                session.first = computed
                return Phase.TRANSFERRING
            case _:
                assert_never(computed)

    def poll(self) -> Sequence[RoleEvent]:
        return self._link.poll(HandOffSide.PREFILL)

    def left(self, prompt: Prompt) -> None:
        self._link.leave(HandOffSide.PREFILL, prompt.id)


class LocalDecodeRole:
    """Takes pages for a prompt, and decodes when they are filled."""

    def __init__(self, link: LocalHandOff) -> None:
        self._link = link

    def arrived(self, request: Request) -> None:
        self._link.arrive(HandOffSide.DECODE, request.id)

    def may_start(self, request: Request) -> Start:
        if request.phase is Phase.RETRACTED:
            return self._link.send_back(request)
        return Start.RECEIVE

    def reserved(self, request: Request, pages: TransferPages) -> None:
        self._link.reserve(request.id, pages)

    def computed(
        self, request: Request, computed: Computed, pages: Callable[[], TransferPages]
    ) -> Phase:
        """Of one that was retracted, and that computes what it lacked."""
        del request, pages
        return computed_here(computed)

    def poll(self) -> Sequence[RoleEvent]:
        return self._link.poll(HandOffSide.DECODE)

    def left(self, prompt: Prompt) -> None:
        self._link.leave(HandOffSide.DECODE, prompt.id)
