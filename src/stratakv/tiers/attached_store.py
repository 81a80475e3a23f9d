"""Which store is in use, and whether anything new may begin with it.

Owns the I/O worker while a store is attached. Must not ask it anything.
"""

from stratakv.agreement.agreement import DigestInputs
from stratakv.storage.io_worker import IoWorker


class AttachedStore:
    """``worker``: None without a store. ``leaving``: what is under way goes on, and no more begins.
    ``step``: counts those with a store."""

    def __init__(self) -> None:
        self.worker: IoWorker | None = None
        self.leaving = False
        self.step = 0

    @property
    def accepting(self) -> IoWorker | None:
        """The worker, while something new may begin."""
        return None if self.leaving else self.worker

    def attach(self, worker: IoWorker) -> None:
        assert self.worker is None, "a store is attached"
        self.worker, self.leaving = worker, False

    def leave(self) -> IoWorker | None:
        """Nothing new begins from now on, but for ``keep``."""
        self.leaving = True
        return self.worker

    def keep(self) -> bool:
        """Go on as before; whether there is a store."""
        self.leaving = False
        return self.worker is not None

    def detach(self) -> None:
        self.worker = None

    def count_step(self) -> None:
        self.step += 1

    def figures(self) -> DigestInputs:
        """How it stands, for ranks to compare."""
        return {"step": self.step, "attached": self.worker is not None, "leaving": self.leaving}
