"""What an engine is for, as an object that plugs into the one loop; there are no mode flags.

Owns the joints of a request's life where roles differ: whether it may start and where, what becomes
of its computed prompt, and when a transfer of its pages has ended. Must not touch pages: a role
names them to whoever moves bytes. Torch-free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, TypeAlias, assert_never

from stratakv.cache.footprint import TransferPages
from stratakv.cache.records import TierTokens
from stratakv.core.ids import RequestId
from stratakv.engine.request import Phase, Prompt, Request, TokenLogprob


class Start(Enum):
    """What a waiting request may do now."""

    WAIT = auto()  # until ``MayStart``; those behind it get their turns
    COMPUTE = auto()  # its prompt, here
    RECEIVE = auto()  # take pages, which another engine fills


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What the engine that computed a prompt sends after it."""

    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """The first ``tokens`` of a prompt have their KV; the others are still to be computed."""

    tokens: int


Computed: TypeAlias = ChunkComputed | FirstToken
"""How far a prompt is computed: in part, or all of it, which gives its first token."""


@dataclass(frozen=True, slots=True)
class Received:
    """Every page of the prompt is there, and what comes after it. ``cached``: what of the prompt
    the engine that computed it had."""

    request: RequestId
    first: FirstToken
    cached: TierTokens | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """The other engine has every page."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class PartSent:
    """The other engine has what was given of its pages so far. Until more is given nobody but this
    engine touches them, and the transfer goes on."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The transfer ended before its end, or the other engine has given the request up before it
    began. ``reason`` is for the log and the client."""

    request: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class TransferLost:
    """The transfer has failed, and nobody knows when its pages are this engine's own again: the
    request need not wait for that. ``TransferFailed`` follows, when they are."""

    request: RequestId
    reason: str


TransferEvent: TypeAlias = Received | Sent | TransferFailed | PartSent
"""How a transfer has ended, but for ``PartSent``. From then on nobody but this engine touches its
pages."""


@dataclass(frozen=True, slots=True)
class MayStart:
    """What a request was to ``WAIT`` for may have come: it is asked about again. Nothing where it
    does not wait."""

    request: RequestId


RoleEvent: TypeAlias = TransferEvent | TransferLost | MayStart


class Role(Protocol):
    """Called by the engine's thread, between steps but for ``computed``. A request has at most one
    transfer at a time, and ``poll`` reports its end exactly once, also where the request has
    left."""

    def arrived(self, request: Request) -> None:
        """A request was submitted; it may wait for long."""
        ...

    def may_start(self, request: Request) -> Start:
        """Asked of a waiting request at its turn, until it has been admitted, and after WAIT not
        before ``poll`` reports ``MayStart``. Also of one that was retracted and of which the host
        has saved nothing (its phase is RETRACTED). RECEIVE sends that back to whoever computes
        prompts: a transfer of all that it knows (``request.known``) is to begin, and the token
        after that comes with it."""
        ...

    def reserved(self, request: Request, pages: TransferPages) -> None:
        """A request that may ``RECEIVE`` has been admitted, and a transfer into ``pages`` begins:
        what it needs after its prompt and does not have here."""
        ...

    def computed(
        self, request: Request, computed: Computed, pages: Callable[[], TransferPages]
    ) -> Phase:
        """More of a request's prompt is computed, or of all it knew where it was retracted.
        ``pages()``, where it is called, gives those to be read for a transfer that begins or goes
        on: of what the request needs after its prompt, what is there for good; with the whole
        prompt all of it. They stay as they are until ``poll`` reports ``PartSent`` or an end.

        After a chunk PREFILLING. After the whole prompt DECODING: it goes on here; or
        TRANSFERRING: it goes on elsewhere."""
        ...

    def poll(self) -> Sequence[RoleEvent]:
        """What has become of transfers, and of what requests wait for, since the last call, which
        comes once a step. With several ranks the answer is the same on all of them."""
        ...

    def left(self, prompt: Prompt) -> None:
        """A request has ended, whatever its phase; also one over which the engine has failed before
        it arrived. If it has a transfer, that is to end soon: its pages stay what they are until
        ``poll`` reports it."""
        ...


def computed_here(computed: Computed) -> Phase:
    """Of a request that goes on where it is computed."""
    match computed:
        case ChunkComputed():
            return Phase.PREFILLING
        case FirstToken():
            return Phase.DECODING
        case _:
            assert_never(computed)


class UnifiedRole:
    """Prefills and decodes."""

    def arrived(self, request: Request) -> None:
        pass

    def may_start(self, request: Request) -> Start:
        del request  # every request may
        return Start.COMPUTE

    def reserved(self, request: Request, pages: TransferPages) -> None:
        raise AssertionError(f"{request.id} receives {pages}, and nobody sends")

    def computed(
        self, request: Request, computed: Computed, pages: Callable[[], TransferPages]
    ) -> Phase:
        del request, pages
        return computed_here(computed)

    def poll(self) -> Sequence[RoleEvent]:
        return ()

    def left(self, prompt: Prompt) -> None:
        pass
