"""Pages on their way from the host to storage, and the chains that storage is notified of as used.

Owns the writes in flight and what they pin. Never waits: what the queue has no room for is dropped,
counted, and written when a request uses it again. Must not choose pages (``tree.stored``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.agreement.agreement import DigestInputs
from stratakv.agreement.ballot import Flags
from stratakv.core.ids import NONE, TicketId
from stratakv.storage.backend import ObjectKey, WriteStatus
from stratakv.storage.io_jobs import Answer, Ending, Store, Stored, Touch
from stratakv.storage.io_worker import IoWorker
from stratakv.tiers.attached_store import AttachedStore
from stratakv.tiers.object_keys import HostBytes, of_group
from stratakv.tree.effects import Persist
from stratakv.tree.lease import Lease
from stratakv.tree.observer import CacheObserver, Medium
from stratakv.tree.stored import StorageMarks, Writing

KEPT: Final = frozenset({WriteStatus.STORED, WriteStatus.PRESENT})
JOB_PAGES: Final = 256
"""The most pages of one job, so that a full queue drops the deep end of what a step has to write
and not all of it."""


@dataclass(slots=True)
class PersistCounters:
    """In pages. ``present``: storage had them. ``refused``: storage had no room or its writing was
    off. ``failed``: it could not be asked. ``dropped``: the queue was full."""

    stored: int = 0
    present: int = 0
    refused: int = 0
    failed: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """``order[i]``: which page, counted through all of ``writings``, is the job's key i."""

    writings: Sequence[Writing]
    order: npt.NDArray[np.intp]
    keys: Sequence[ObjectKey]


class Persister:
    """``observer``: notified of the pages that storage has from now on."""

    def __init__(
        self,
        stored: StorageMarks,
        arenas: Sequence[HostBytes],
        store: AttachedStore,
        observer: CacheObserver | None = None,
    ) -> None:
        self.counters = PersistCounters()
        self._store = store
        self._observer = observer
        self._stored = stored
        self._arenas = arenas
        self._fresh: list[Writing] = []  # pinned, not yet submitted
        self._uses: list[Touch] = []
        self._jobs: dict[TicketId, _Job] = {}

    @property
    def busy(self) -> bool:
        return bool(self._fresh or self._jobs)

    def figures(self) -> DigestInputs:
        """What is under way, for ranks to compare."""
        return {
            "writes begun": len(self._fresh),
            "writes": len(self._jobs),
            "newest write": next(reversed(self._jobs), NONE),
            "uses to send": len(self._uses),
        }

    def want(self, effect: Persist) -> None:
        """Write the pages of ``effect``; they are pinned from now on, and submitted with the rest
        of the step."""
        for at in range(0, len(effect.nodes), JOB_PAGES):
            rows = effect.nodes[at : at + JOB_PAGES]
            self._fresh.append(self._stored.begin(effect.group, rows))

    def used(self, lease: Lease) -> None:
        """A request stands on ``lease``, or did until now: a store that is in use learns of it, and
        gets what it lacks of it."""
        if self._store.accepting is None:
            return
        for effect in self._stored.unstored(lease):
            self.want(effect)
        parts = list(self._stored.to_touch(lease, self._store.step))
        if not parts:
            return
        named = [(group, *self._stored.names(rows)) for group, rows in parts]
        keys = [key for group, pages, _ in named for key in of_group(pages, group)]
        depth = np.concatenate([depth for _, _, depth in named])
        deepest_first = np.argsort(-depth, kind="stable").tolist()
        self._uses.append(Touch(list(map(keys.__getitem__, deepest_first))))

    def forget_uses(self) -> None:
        """The store that was to get them is gone."""
        self._uses = []

    def submit(self, worker: IoWorker) -> None:
        """Hand over what the step has found to write, the heads of chains first, and behind it what
        was used: a page that is written after its parents were touched would look newer."""
        if not self._fresh and not self._uses:
            return
        fresh, self._fresh = self._fresh, []
        batch: list[Writing] = []
        pages = 0
        for writing in fresh:
            batch.append(writing)
            pages += len(writing.rows)
            if pages >= JOB_PAGES:
                self._send(batch, worker)
                batch, pages = [], 0
        if batch:
            self._send(batch, worker)
        uses, self._uses = self._uses, []
        for use in uses:
            worker.submit(use)  # may be dropped

    def _send(self, writings: list[Writing], worker: IoWorker) -> None:
        keys: list[ObjectKey] = []
        views: list[memoryview] = []
        depths: list[npt.NDArray[np.int32]] = []
        for writing in writings:
            pages, depth = self._stored.names(writing.rows)
            depths.append(depth)
            keys += of_group(pages, writing.group)
            views += self._arenas[writing.group].views(self._stored.sources(writing))
        order = np.argsort(np.concatenate(depths), kind="stable")
        sequence = order.tolist()
        keys = list(map(keys.__getitem__, sequence))
        ticket = worker.submit(Store(keys, list(map(views.__getitem__, sequence))))
        if ticket is None:
            self.counters.dropped += len(keys)
            self._end(writings, np.zeros(len(keys), np.bool_))
            return
        self._jobs[ticket] = _Job(writings, order, keys)

    def kept_here(self, answer: Answer) -> Flags:
        """This rank's vote on a job that has ended: which of its objects are stored."""
        assert isinstance(answer, Stored), f"{answer} is no answer to a write"
        kept = np.zeros(len(self._jobs[answer.ticket].keys), np.bool_)
        statuses = list(answer.statuses)
        if statuses.count(WriteStatus.STORED) == len(kept):  # as a rule; an Enum's hash is slow
            return ~kept
        kept[: len(statuses)] = [status in KEPT for status in statuses]
        return kept

    def answered(self, answer: Answer, agreed: Flags) -> None:
        """One job has ended, and its buffers are the host's again. ``agreed``: what every rank has
        stored."""
        assert isinstance(answer, Stored), f"{answer} is no answer to a write"
        job = self._jobs.pop(answer.ticket)
        statuses = list(answer.statuses)
        stored, present = statuses.count(WriteStatus.STORED), statuses.count(WriteStatus.PRESENT)
        refused = statuses.count(WriteStatus.REFUSED)
        counters, total = self.counters, len(job.keys)
        counters.stored += stored
        counters.present += present
        counters.refused += refused
        rest = total - stored - present - refused
        if answer.ending is Ending.CANCELLED:  # given up on purpose
            counters.dropped += total - len(statuses)
            rest -= total - len(statuses)
        counters.failed += rest
        if self._observer is not None:
            kept = list(compress(job.keys, agreed.tolist()))
            for group in sorted({key.group for key in kept}):
                pages = [key.page for key in kept if key.group == group]
                self._observer.stored(Medium.STORAGE, group, pages)
        by_writing = np.empty(total, np.bool_)
        by_writing[job.order] = agreed
        self._end(job.writings, by_writing)

    def _end(self, writings: Sequence[Writing], kept: Flags) -> None:
        at = 0
        for writing in writings:
            self._stored.end(writing, kept[at : at + len(writing.rows)])
            at += len(writing.rows)

    def cancel(self, worker: IoWorker) -> int:
        """Write no more of what is queued; how many pages that may cost."""
        for ticket in self._jobs:
            worker.cancel(ticket)
        left = sum(len(job.keys) - worker.progress(ticket) for ticket, job in self._jobs.items())
        fresh, self._fresh = self._fresh, []
        count = sum(len(writing.rows) for writing in fresh)
        self._end(fresh, np.zeros(count, np.bool_))
        self.counters.dropped += count
        return left + count
