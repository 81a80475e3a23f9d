"""What an engine is for, as an object that plugs into the one loop; there are no mode flags.

Owns what happens at the two joints of a request's life where roles differ. Must not touch pages.
"""

from typing import Protocol

from stratakv.engine.request import Request, Signal


class Role(Protocol):
    def may_start(self, request: Request) -> bool:
        """Whether a waiting request may be admitted now."""
        ...

    def prefilled(self, request: Request) -> Signal:
        """What becomes of a request whose prompt is computed and whose first token is chosen."""
        ...


class UnifiedRole:
    """Prefills and decodes."""

    def may_start(self, request: Request) -> bool:
        del request  # every request may start
        return True

    def prefilled(self, request: Request) -> Signal:
        del request
        return Signal.PREFILL_DONE
