"""What the server asks of an engine. Owns the interface; ``engine.loop.Engine`` satisfies it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from stratakv.core.ids import RequestId
from stratakv.engine.request import Output, Prompt


class PoolView(Protocol):
    """Pages of one group on one tier."""

    @property
    def group(self) -> str: ...
    @property
    def tier(self) -> str: ...
    @property
    def total(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def evictable(self) -> int: ...


class StatsView(Protocol):
    """An engine's figures at one moment; everything but the first three only counts up. Retracted
    requests are among the waiting ones."""

    @property
    def waiting(self) -> int: ...
    @property
    def retracted(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def pages(self) -> Sequence[PoolView]: ...
    @property
    def counters(self) -> Mapping[str, int]: ...


class EnginePort(Protocol):
    """An engine. All calls come from one thread, the driver's; any exception but a
    ``RequestError`` of ``submit`` ends the engine's life."""

    def submit(self, prompt: Prompt, /) -> None:
        """Queue a prompt; ``RequestError`` if it can never be served."""
        ...

    def abort(self, request: RequestId, /) -> None:
        """Forget a request; one that is unknown or finished is no error."""
        ...

    def step(self) -> Sequence[Output]:
        """Advance; returns every token that is new. May block, must not spin."""
        ...

    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        ...

    def flush(self) -> bool:
        """Drop every cached page; False while requests are running."""
        ...

    def stats(self) -> StatsView: ...
