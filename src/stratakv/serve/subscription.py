"""What one client's requests receive, on the client's event loop.

Owns the events between the engine's delivery and the handler that reads them. Everything but the
constructor's plain data runs on ``loop``; must not touch the engine.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self, TypeAlias, assert_never

from stratakv.core.errors import StrataError
from stratakv.core.ids import RequestId
from stratakv.engine.request import Output, Prompt


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine took every prompt."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing more will come."""

    error: StrataError


@dataclass(frozen=True, slots=True)
class TimedOutput:
    """One output of a step that ended at ``at_s`` (the driver's clock)."""

    at_s: float
    output: Output


SubscriptionEvent: TypeAlias = Accepted | Refused | TimedOutput


class Subscription:
    """A context manager around one client's requests; leaving it aborts what is unfinished."""

    def __init__(
        self,
        prompts: tuple[Prompt, ...],
        loop: asyncio.AbstractEventLoop,
        release: "Callable[[Subscription, tuple[RequestId, ...]], None]",
    ) -> None:
        self.prompts: Final = prompts
        self.loop: Final = loop
        self.ids: Final = tuple(prompt.id for prompt in prompts)
        self.closed = False
        self._release = release
        self._unfinished = set(self.ids)
        self._outputs: list[TimedOutput] = []
        self._error: StrataError | None = None
        self._accepted = False
        self._changed = asyncio.Event()

    def push(self, event: SubscriptionEvent) -> None:
        match event:
            case Accepted():
                self._accepted = True
            case Refused(error):
                self.fail(error)
            case TimedOutput(_, output):
                self._outputs.append(event)
                if output.finish is not None:
                    self._unfinished.discard(output.request)
            case _:
                assert_never(event)
        self._changed.set()

    def fail(self, error: StrataError) -> None:
        """Let whoever waits here raise ``error``; the first one counts."""
        self._error = self._error or error
        self._changed.set()

    async def accepted(self) -> None:
        """Return when the engine took the prompts; raise why it did not."""
        while not self._accepted:
            await self._wait()

    async def take(self) -> list[TimedOutput]:
        """All outputs since the last call, at least one; raises what ``fail`` was given."""
        while not self._outputs:
            await self._wait()
        outputs, self._outputs = self._outputs, []
        return outputs

    def cancel(self, request: RequestId) -> None:
        """Abort one request (its stop string came); outputs of it may still arrive."""
        if request in self._unfinished:
            self._unfinished.discard(request)
            self._release(self, (request,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        unfinished = tuple(self._unfinished)
        self._unfinished.clear()
        self.close()
        self._release(self, unfinished)

    def close(self) -> None:
        """Nobody listens any more."""
        self.closed = True

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()
