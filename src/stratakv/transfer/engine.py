"""What a transfer engine must do. Owns the protocols; knows nothing of trees or requests.

Engines: ``cpu`` (worker threads, ``memcpy``). A third party checks its own with
``stratakv.testing.transfer_conformance``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stratakv.core.ids import LayerId, TicketId
from stratakv.transfer.copy_plan import NOTHING_LAUNCHED, CopyPlan, Direction, Fence


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished plan. A load cannot fail softly (a reader may already hold its landing page):
    an engine that cannot finish one stops the process."""

    ticket: TicketId
    ok: bool
    bytes_moved: int


class CopyOrder(Protocol):
    """How what a thread copies stands to the device's other work. A device with streams queues its
    copies there; elsewhere a copy is done when its call returns (``AtOnce``)."""

    def after(self, direction: Direction, fence: Fence) -> None:
        """What is copied in this direction from now on comes after ``fence``; may block."""
        ...

    def mark(self, direction: Direction) -> Fence:
        """Passes when all that was copied in this direction so far is there."""
        ...


class AtOnce:
    """The ``CopyOrder`` of copies that are done when their call returns."""

    def after(self, direction: Direction, fence: Fence) -> None:
        del direction
        fence.wait()

    def mark(self, direction: Direction) -> Fence:
        del direction
        return NOTHING_LAUNCHED


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
