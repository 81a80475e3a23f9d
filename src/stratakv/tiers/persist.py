"""Pages on their way from the host to storage, and the chains storage hears of as used.

Owns the writes in flight and what they pin. Never waits: what the queue has no room for is dropped,
counted, and written when a request uses it again. Must not choose pages (``tree.stored``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.agreement.agreement import Figures
from stratakv.agreement.ballot import Flags
from stratakv.core.ids import NONE, GroupId, PageKey, TicketId
from stratakv.storage.backend import ObjectKey, WriteStatus
from stratakv.storage.io_jobs import Answer, Ending, Store, Stored, Touch
from stratakv.storage.io_worker import IoWorker
from stratakv.tiers.object_keys import HostBytes, of_rows
from stratakv.tree.effects import Persist
from stratakv.tree.lease import Lease
from stratakv.tree.nodes import Tier
from stratakv.tree.prefix_tree import PrefixTree
from stratakv.tree.stored import Writing

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
    """``on_stored``: told of the pages, by group, that storage has from now on, where somebody
    follows the cache."""

    def __init__(self, tree: PrefixTree, arenas: Sequence[HostBytes]) -> None:
        self.counters = PersistCounters()
        self.on_stored: Callable[[GroupId, Sequence[PageKey]], None] | None = None
        self._tree = tree
        self._arenas = arenas
        self._fresh: list[Writing] = []  # pinned, not yet submitted
        self._uses: list[Touch] = []
        self._jobs: dict[TicketId, _Job] = {}

    @property
    def busy(self) -> bool:
        return bool(self._fresh or self._jobs)

    def figures(self) -> Figures:
        """What is under way, for ranks to compare."""
        return {
            "writes begun": len(self._fresh),
            "writes": len(self._jobs),
            "newest write": next(reversed(self._jobs), NONE),
            "uses to tell": len(self._uses),
        }

    def want(self, effect: Persist) -> None:
        """Write the pages of ``effect``; they are pinned from now on, and submitted with the rest
        of the step."""
        for at in range(0, len(effect.nodes), JOB_PAGES):
            rows = effect.nodes[at : at + JOB_PAGES]
            self._fresh.append(self._tree.stored.begin(effect.group, rows))

    def used(self, lease: Lease, step: int) -> None:
        """A request stands on ``lease``, or did until now: storage learns of it, and gets what it
        lacks of it."""
        for effect in self._tree.stored.unstored(lease):
            self.want(effect)
        parts = list(self._tree.stored.to_touch(lease, step))
        if not parts:
            return
        nodes = self._tree.nodes
        keys = [key for group, rows in parts for key in of_rows(nodes, group, rows)]
        depth = np.concatenate([nodes.depth[rows] for _, rows in parts])
        deepest_first = np.argsort(-depth, kind="stable").tolist()
        self._uses.append(Touch(list(map(keys.__getitem__, deepest_first))))

    def forget_uses(self) -> None:
        """The store that was to hear of them is gone."""
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
        nodes = self._tree.nodes
        rows = [writing.rows for writing in writings]
        order = np.argsort(nodes.depth[np.concatenate(rows)], kind="stable")
        keys: list[ObjectKey] = []
        views: list[memoryview] = []
        for writing in writings:
            keys += of_rows(nodes, writing.group, writing.rows)
            pages = nodes.page[Tier.HOST][writing.group][writing.rows]
            views += self._arenas[writing.group].views(pages)
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
        said = list(answer.statuses)
        if said.count(WriteStatus.STORED) == len(kept):  # as a rule; an Enum's hash is slow
            return ~kept
        kept[: len(said)] = [status in KEPT for status in said]
        return kept

    def answered(self, answer: Answer, agreed: Flags) -> None:
        """One job has ended, and its buffers are the host's again. ``agreed``: what every rank has
        stored."""
        assert isinstance(answer, Stored), f"{answer} is no answer to a write"
        job = self._jobs.pop(answer.ticket)
        said = list(answer.statuses)
        stored, present = said.count(WriteStatus.STORED), said.count(WriteStatus.PRESENT)
        refused = said.count(WriteStatus.REFUSED)
        counters, total = self.counters, len(job.keys)
        counters.stored += stored
        counters.present += present
        counters.refused += refused
        rest = total - stored - present - refused
        if answer.ending is Ending.CANCELLED:  # given up on purpose
            counters.dropped += total - len(said)
            rest -= total - len(said)
        counters.failed += rest
        if self.on_stored is not None:
            kept = list(compress(job.keys, agreed.tolist()))
            for group in sorted({key.group for key in kept}):
                self.on_stored(group, [key.page for key in kept if key.group == group])
        by_writing = np.empty(total, np.bool_)
        by_writing[job.order] = agreed
        self._end(job.writings, by_writing)

    def _end(self, writings: Sequence[Writing], kept: Flags) -> None:
        at = 0
        for writing in writings:
            self._tree.stored.end(writing, kept[at : at + len(writing.rows)])
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
