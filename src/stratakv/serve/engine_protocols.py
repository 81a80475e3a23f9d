"""What the server asks of an engine. Owns the interfaces; ``engine.loop.Engine`` satisfies both."""

from collections.abc import Sequence
from typing import Protocol

from stratakv.core.ids import RequestId
from stratakv.engine.attachment import AttachmentReport, StorageCall, Verb
from stratakv.engine.request import Output, Prompt
from stratakv.engine.stats import EngineStats
from stratakv.engine.storage_control import Openable
from stratakv.tiers.statistics import StorageStats


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

    def stats(self) -> EngineStats: ...


class StoragePort(Protocol):
    """What an engine does with a storage tier; its calls come from the driver's thread too."""

    @property
    def beside_steps(self) -> frozenset[Verb]:
        """Verbs of a call that may come from any thread, one at a time, also during a step."""
        ...

    def call_storage(self, call: StorageCall, /) -> Sequence[AttachmentReport]:
        """Change which store is used, or ask how that stands; never waits for a store. What has
        come of it, by rank. AssertionError where it cannot follow on what was done before."""
        ...

    @property
    def store(self) -> Openable | None:
        """What a call has attached."""
        ...

    def storage_stats(self) -> StorageStats | None:
        """None: nothing is attached."""
        ...


class PublisherPort(Protocol):
    """Who observes the engine's cache. All calls come from the driver's thread."""

    def step_done(self) -> None:
        """A step, or something between two, may have changed what is cached. Must not block."""
        ...

    def close(self) -> None:
        """The engine has ended."""
        ...
