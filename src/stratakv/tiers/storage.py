"""The third tier as the cache sees it: attached or not, and what its answers mean.

Owns the way in and out of a store, and the one place where its answers become state. What is
written is ``persist``'s, what is fetched ``prefetch``'s. Never waits for storage but in ``close``.
Must not open a store.
"""

from collections.abc import Iterator
from dataclasses import asdict

from stratakv.agreement.agreement import DigestInputs
from stratakv.agreement.ballot import NOTHING, Ballot, BallotResult, Flags, Work
from stratakv.core.ids import PageKey, RequestId
from stratakv.policy.prefetch_reasons import Reason
from stratakv.storage.backend import Everything
from stratakv.storage.io_jobs import Answer, Kind, Remove
from stratakv.storage.io_worker import IoWorker
from stratakv.tiers.attached_store import AttachedStore
from stratakv.tiers.object_keys import of_group
from stratakv.tiers.persist import Persister
from stratakv.tiers.prefetch.prefetcher import Prefetcher
from stratakv.tiers.statistics import StorageStats
from stratakv.tree.lease import Lease
from stratakv.tree.observer import CacheObserver, Medium
from stratakv.tree.prefix_tree import PrefixTree


class StorageTier:
    """``persister`` writes and ``prefetcher`` fetches, both for those who use the cache; here is
    what opens, ends and drives them. ``observer``: notified of what storage has no more."""

    def __init__(
        self,
        tree: PrefixTree,
        store: AttachedStore,
        persister: Persister,
        prefetcher: Prefetcher,
        observer: CacheObserver | None = None,
    ) -> None:
        self.persister, self.prefetcher = persister, prefetcher
        self._stored, self._store, self._observer = tree.stored, store, observer
        self._groups = [group.id for group in tree.spec.groups if group.page_bytes]
        self._clearing = 0
        self._distrusted = 0  # pages

    # -- attach and detach -----------------------------------------------------------------------

    def attach(self, worker: IoWorker) -> None:
        """Use an open store from now on. What is cached already is written as it is used."""
        self._store.attach(worker)
        self._stored.open()

    def detach(self, *, force: bool = False) -> IoWorker | None:
        """The store, of which nothing is used any more; None: not yet, pages are being written or
        fetched. From the first call on nothing new is begun, and with ``force`` what is queued is
        given up too; ``keep`` undoes the first, not the second."""
        worker = self._store.leave()
        assert worker is not None, "no store is attached"
        self._stored.close()
        if force:
            self.persister.cancel(worker)
            self.prefetcher.cancel(worker)
        if self.busy:
            return None
        self.persister.forget_uses()
        self._report_gone()
        self._store.detach()
        return worker

    def keep(self) -> None:
        """Go on with the store that is attached. What has changed in the tree meanwhile was not
        noted, so what storage has is learned anew, as it is used."""
        if self._store.keep():
            self._stored.open()

    def clear(self) -> bool:
        """Forget every object of the store, behind what is queued; False, and nothing done, where
        too much is queued already."""
        worker = self._store.worker
        assert worker is not None, "no store is attached"
        if worker.submit(Remove(Everything.EVERYTHING)) is None:
            return False
        self._clearing += 1
        self._report_gone()
        self._stored.forget()
        return True

    def distrust(self, lease: Lease) -> PageKey | None:
        """Whoever stands on ``lease`` has met NaN or infinity: the key of the first page that this
        process has not computed itself. The store is to forget it and those that follow, behind
        what is queued; where too much is queued they stay. None: all pages were computed here, and
        found finite."""
        chain = self._stored.fetched(lease)
        if not chain:
            return None
        self._distrusted += len(chain)
        if (worker := self._store.worker) is not None:
            keys = [key for group in self._groups for key in of_group(chain, group)]
            if worker.submit(Remove(keys)) is not None:
                self._clearing += 1
        return chain[0]

    def close(self, timeout_s: float) -> None:
        """Give what is queued ``timeout_s`` to be written, and let go of the store."""
        worker = self._store.leave()
        if worker is None:
            return
        try:
            self._stored.close()
            if worker.closed:  # whoever opened it was first
                self.persister.cancel(worker)
            self.persister.submit(worker)
        finally:
            worker.close(timeout_s)
        begun = NOTHING
        while any(map(worker.ready, Kind)):  # nobody is left to agree with
            alone = Ballot(begun)
            self.vote(alone)
            agreed = alone.result(alone.lanes)
            begun = agreed.begun
            self._apply(worker, agreed)
        self._store.detach()

    def _report_gone(self) -> None:
        if self._observer is not None:
            for group, keys in self._stored.marked():
                self._observer.removed(Medium.STORAGE, group, keys)

    # -- time ------------------------------------------------------------------------------------

    def vote(self, ballot: Ballot) -> None:
        """Say what storage has answered here."""
        worker = self._store.worker
        if worker is None or worker.idle:
            return
        for kind in Kind:
            count = worker.ready(kind)
            if not count:
                continue
            match kind:
                case Kind.QUERY:
                    found = map(self.prefetcher.stored_here, worker.peek(kind, count))
                    ballot.cast(Work.QUERY, found)
                case Kind.FETCH:
                    found = map(self.prefetcher.arrived_here, worker.peek(kind, count))
                    ballot.cast(Work.FETCH, found)
                case Kind.STORE:
                    ballot.cast(Work.STORE, map(self.persister.kept_here, worker.peek(kind, count)))
                case Kind.TOUCH:
                    ballot.count(Work.TOUCH, count)
                case Kind.REMOVE:
                    ballot.count(Work.REMOVE, count)

    def tick(self, head: RequestId | None, agreed: BallotResult) -> None:
        """Apply what storage has answered everywhere, then submit what the step has found to
        do."""
        worker = self._store.worker
        if worker is None:
            return
        self._store.count_step()
        self._apply(worker, agreed)
        if not self._store.leaving:
            self.prefetcher.tick(head, worker)
        if not self._clearing:  # another rank's clear may come later, and would take it away
            self.persister.submit(worker)

    def _apply(self, worker: IoWorker, agreed: BallotResult) -> None:
        if worker.idle:
            return
        for answer, flags in _taken(worker, Kind.QUERY, agreed, Work.QUERY):
            self.prefetcher.queried(answer, flags, worker)
        for answer, flags in _taken(worker, Kind.FETCH, agreed, Work.FETCH):
            self.prefetcher.fetched(answer, flags)
        for answer, flags in _taken(worker, Kind.STORE, agreed, Work.STORE):
            self.persister.answered(answer, flags)
        if count := agreed.ended(Work.TOUCH):
            worker.take(Kind.TOUCH, count)
        if count := agreed.ended(Work.REMOVE):
            self._clearing -= len(worker.take(Kind.REMOVE, count))

    @property
    def ready(self) -> bool:
        """Whether ``tick`` would find an answer."""
        worker = self._store.worker
        return worker is not None and not worker.idle and any(map(worker.ready, Kind))

    @property
    def busy(self) -> bool:
        """Whether anything is under way that somebody waits for, or that pins a page."""
        return bool(self.persister.busy or self.prefetcher.busy or self._clearing)

    # -- figures ---------------------------------------------------------------------------------

    def stats(self, *, busy: bool) -> StorageStats | None:
        """None where no store is attached. ``busy``: what only the engine knows."""
        if (worker := self._store.worker) is None:
            return None
        found, io = self.prefetcher.counters, worker.stats
        return StorageStats(
            pages={
                **asdict(self.persister.counters),
                "fetched": found.fetched_pages,
                "distrusted": self._distrusted,
            },
            tokens={"found": found.found, "hits": found.hits},
            lost_tokens=_by_name(found.lost),
            abandoned=_by_name(found.abandoned),
            reading_off=io.reading_off,
            writing_off=io.writing_off,
            busy=busy,
        )

    def figures(self) -> DigestInputs:
        """What is under way, for ranks to compare."""
        return {
            **self._store.figures(),
            "clearing": self._clearing,
            "epoch": self._stored.epoch,
            **self.prefetcher.figures(),
            **self.persister.figures(),
        }


def _taken(
    worker: IoWorker, kind: Kind, agreed: BallotResult, work: Work
) -> Iterator[tuple[Answer, Flags]]:
    """The answers that have come on every rank, each with what all have found."""
    count = agreed.ended(work)
    return zip(worker.take(kind, count), agreed.flags(work), strict=True) if count else iter(())


def _by_name(counts: dict[Reason, int]) -> dict[str, int]:
    return {reason.name.lower(): count for reason, count in counts.items()}
