"""The third tier as the cache sees it: attached or not, what it is asked, what it answers.

Owns the I/O worker while a store is attached, and the one place where its answers become state.
What is written is ``persist``'s, what is fetched ``prefetch``'s. Never waits for storage but in
``close``. Must not open a store.
"""

from collections.abc import Iterator
from dataclasses import asdict

from stratakv.agreement.agreement import Figures
from stratakv.agreement.ballot import NOTHING, Ballot, Flags, Result, Work
from stratakv.core.clock import Clock
from stratakv.core.ids import GroupId, PageIds, PageKey, RequestId
from stratakv.core.page_keys import PageHasher
from stratakv.policy.prefetch_pace import PrefetchPolicy
from stratakv.policy.prefetch_reasons import Reason
from stratakv.storage.backend import Everything
from stratakv.storage.io_jobs import Answer, Kind, Remove
from stratakv.storage.io_worker import IoWorker
from stratakv.tiers.object_keys import of_group
from stratakv.tiers.persist import Persister
from stratakv.tiers.prefetch.fetches import Fetches, FromStorage
from stratakv.tiers.prefetch.prefetcher import Prefetcher
from stratakv.tiers.prefetch.request import OnSettled
from stratakv.tiers.statistics import StorageStats
from stratakv.tree.lease import Lease
from stratakv.tree.observer import CacheObserver, Medium
from stratakv.tree.prefix_tree import PrefixTree


class StorageTier:
    """``observer``: told of what storage has no more. Without a store every verb is a no-op."""

    def __init__(
        self,
        tree: PrefixTree,
        persister: Persister,
        fetches: Fetches,
        policy: PrefetchPolicy,
        clock: Clock,
        observer: CacheObserver | None = None,
    ) -> None:
        self.persister = persister
        self.prefetcher = Prefetcher(tree, fetches, policy, clock, observer)
        self._stored, self._observer = tree.stored, observer
        self._groups = [group.id for group in tree.spec.groups if group.page_bytes]
        self._worker: IoWorker | None = None
        self._leaving = False
        self._step = 0
        self._clearing = 0
        self.distrusted = 0  # pages

    # -- attach and detach -----------------------------------------------------------------------

    def attach(self, worker: IoWorker) -> None:
        """Use an open store from now on. What is cached already is written as it is used."""
        assert self._worker is None, "a store is attached"
        self._worker = worker
        self.keep()

    def detach(self, *, force: bool = False) -> IoWorker | None:
        """The store, of which nothing is used any more; None: not yet, pages are being written or
        fetched. From the first call on nothing new is begun, and with ``force`` what is queued is
        given up too; ``keep`` undoes the first, not the second."""
        assert self._worker is not None, "no store is attached"
        self._leaving = True
        self._stored.close()
        if force:
            self.persister.cancel(self._worker)
            self.prefetcher.cancel(self._worker)
        if self.busy:
            return None
        self.persister.forget_uses()
        self._tell_gone()
        worker, self._worker = self._worker, None
        return worker

    def keep(self) -> None:
        """Go on with the store that is attached. What has changed in the tree meanwhile was not
        noted, so what storage has is learned anew, as it is used."""
        self._leaving = False
        if self._worker is not None:
            self._stored.open()

    def clear(self) -> bool:
        """Forget every object of the store, behind what is queued; False, and nothing done, where
        too much is queued already."""
        assert self._worker is not None, "no store is attached"
        if self._worker.submit(Remove(Everything.EVERYTHING)) is None:
            return False
        self._clearing += 1
        self._tell_gone()
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
        self.distrusted += len(chain)
        if self._worker is not None:
            keys = [key for group in self._groups for key in of_group(chain, group)]
            if self._worker.submit(Remove(keys)) is not None:
                self._clearing += 1
        return chain[0]

    def close(self, timeout_s: float) -> None:
        """Give what is queued ``timeout_s`` to be written, and let go of the store."""
        if self._worker is None:
            return
        self._leaving = True
        self._stored.close()
        if self._worker.closed:  # whoever opened it was first
            self.persister.cancel(self._worker)
        self.persister.submit(self._worker)
        self._worker.close(timeout_s)
        begun = NOTHING
        while any(map(self._worker.ready, Kind)):  # nobody is left to agree with
            alone = Ballot(begun)
            self.vote(alone)
            agreed = alone.result(alone.lanes)
            begun = agreed.begun
            self._apply(self._worker, agreed)
        self._worker = None

    def _tell_gone(self) -> None:
        if self._observer is not None:
            for group, keys in self._stored.marked():
                self._observer.removed(Medium.STORAGE, group, keys)

    # -- requests --------------------------------------------------------------------------------

    def prefetch(self, request: RequestId, prefix: PageHasher, tokens: int) -> None:
        """A request with a prompt of ``tokens`` waits: fetch what the tree lacks of it."""
        if self._worker is not None and not self._leaving:
            self.prefetcher.start(request, prefix, tokens, self._worker)

    def must_wait(self, request: RequestId) -> bool:
        """Whether a request whose turn it is must wait for its prefetch."""
        return self._worker is not None and self.prefetcher.must_wait(request, self._worker)

    def admitted(self, request: RequestId, end: int, settled: OnSettled) -> FromStorage | None:
        """A request has its lease, at ``end`` pages; what storage has contributed to it.
        ``settled`` is called, perhaps later, with what storage had for it."""
        return self.prefetcher.admitted(request, end, settled)

    def forget(self, request: RequestId, settled: OnSettled) -> None:
        """A request ends before it was admitted; ``settled`` as for ``admitted``."""
        self.prefetcher.forget(request, self._worker, settled)

    def used(self, lease: Lease) -> None:
        """A request stands on ``lease``, or did until now."""
        if self._worker is not None and not self._leaving:
            self.persister.used(lease, self._step)

    # -- time ------------------------------------------------------------------------------------

    def vote(self, ballot: Ballot) -> None:
        """Say what storage has answered here."""
        worker = self._worker
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

    def tick(self, head: RequestId | None, agreed: Result) -> None:
        """Apply what storage has answered everywhere, then submit what the step has found to
        do."""
        if self._worker is None:
            return
        self._step += 1
        self._apply(self._worker, agreed)
        if not self._leaving:
            self.prefetcher.tick(head, self._worker)
        if not self._clearing:  # another rank's clear may come later, and would take it away
            self.persister.submit(self._worker)

    def _apply(self, worker: IoWorker, agreed: Result) -> None:
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
        worker = self._worker
        return worker is not None and not worker.idle and any(map(worker.ready, Kind))

    @property
    def busy(self) -> bool:
        """Whether anything is under way that somebody waits for, or that pins a page."""
        return bool(self.persister.busy or self.prefetcher.busy or self._clearing)

    @property
    def holding(self) -> bool:
        """Whether pages of the tree are held for a request that waits."""
        return self.prefetcher.holding

    # -- figures ---------------------------------------------------------------------------------

    def stats(self, *, busy: bool) -> StorageStats | None:
        """None where no store is attached. ``busy``: what only the engine can say."""
        if self._worker is None:
            return None
        found, io = self.prefetcher.counters, self._worker.stats
        return StorageStats(
            pages={
                **asdict(self.persister.counters),
                "fetched": found.fetched_pages,
                "distrusted": self.distrusted,
            },
            tokens={"found": found.found, "hits": found.hits},
            lost_tokens=_by_name(found.lost),
            abandoned=_by_name(found.abandoned),
            reading_off=io.reading_off,
            writing_off=io.writing_off,
            busy=busy,
        )

    def figures(self) -> Figures:
        """What is under way, for ranks to compare."""
        return {
            "step": self._step,
            "attached": self._worker is not None,
            "leaving": self._leaving,
            "clearing": self._clearing,
            "epoch": self._stored.epoch,
            **self.prefetcher.figures(),
            **self.persister.figures(),
        }

    def owned(self, group: GroupId) -> list[PageIds]:
        """Host pages that no node of the tree stands for."""
        return self.prefetcher.owned(group)


def _taken(
    worker: IoWorker, kind: Kind, agreed: Result, work: Work
) -> Iterator[tuple[Answer, Flags]]:
    """The answers that have come on every rank, each with what all have found."""
    count = agreed.ended(work)
    return zip(worker.take(kind, count), agreed.flags(work), strict=True) if count else iter(())


def _by_name(counts: dict[Reason, int]) -> dict[str, int]:
    return {reason.name.lower(): count for reason, count in counts.items()}
