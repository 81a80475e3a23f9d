"""What a transfer engine must do. Owns the protocols; knows nothing of trees or requests.

Engines: ``cpu`` (worker threads, ``memcpy``). A third party checks its own with
``stratakv.testing.transfer_conformance``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stratakv.core.ids import LayerId, TicketId
from stratakv.transfer.copy_plan import CopyPlan, Direction


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished plan. A load cannot fail softly (a reader may already hold its landing page):
    an engine that cannot finish one stops the process."""

    ticket: TicketId
    ok: bool
    bytes_moved: int


class LayerGate(Protocol):
    """Holds the forward back until copies are done with the device pages that it touches."""

    def wait(self, layer: LayerId) -> None:
        """Return (or make the compute stream wait) once this layer's pages are on the device, as
        far as loads bring them, and have been read, as far as backups save them."""
        ...


class TransferEngine(Protocol):
    """Moves pages between device pools and the host arena, in submission order per direction.

    Its promises of order, to which the device's own must be added: a plan touches nothing before
    its ``after`` has passed, and so do the later ones of its direction; a gate opens when its plans
    are done with a layer; a completion is there when they are done with all. Nothing else is
    ordered: whoever names a page in two plans of different directions takes the first one first.
    """

    def submit(self, plan: CopyPlan) -> TicketId:
        """Queue ``plan``; never blocks, neither on the copy nor on what it comes after. The pages
        stay the caller's to pin."""
        ...

    def gate(self, tickets: Sequence[TicketId]) -> LayerGate:
        """A gate over plans that are submitted and not yet taken; empty: opens at once."""
        ...

    def ready(self, direction: Direction) -> int:
        """How many submitted plans of this direction, oldest first, have finished here."""
        ...

    def peek(self, direction: Direction, count: int) -> Sequence[Completion]:
        """The oldest ``count`` finished plans, which are not removed; ``count`` <= ``ready``."""
        ...

    def take(self, direction: Direction, count: int) -> list[Completion]:
        """Remove the oldest ``count`` finished plans; ``count`` <= ``ready(direction)``."""
        ...

    def close(self) -> None:
        """Finish what is queued and end the threads; submitting afterwards is an error."""
        ...
