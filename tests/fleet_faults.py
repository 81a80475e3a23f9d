"""Faults seeded into the code that keeps ranks alike, each as a patch that a fleet must catch.

Owns the patches; a function here is entered as a context. Each breaks one rule: of the ballot, of
what ranks store together, of the end of a rank, or of a cache without a tier.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import compress
from unittest import mock

import numpy as np

from stratakv.agreement.agreement import Agreement
from stratakv.agreement.ballot import Work
from stratakv.agreement.ranks import nothing
from stratakv.cache.commits import Committer
from stratakv.cache.retraction import Retraction
from stratakv.core.errors import RankLostError
from stratakv.core.page_keys import Namespace
from stratakv.engine.ranks.step_messages import StepSync
from stratakv.policy.prefetch_ends import Ends, last_of
from stratakv.spec.sharding import Sharding, Strip
from stratakv.storage import sharded
from stratakv.storage.io_jobs import Kind
from stratakv.storage.io_worker import IoWorker
from stratakv.testing.fleet.loss import RankDied
from stratakv.testing.fleet.rank import SimRank
from stratakv.testing.fleet.store import FaultyStore
from stratakv.tiers.persist import Persister
from stratakv.tiers.prefetch import prefetcher as prefetch
from stratakv.tiers.transfer_manager import TransferManager
from stratakv.transfer.copy_plan import Direction
from stratakv.tree.observer import Medium

Patch = AbstractContextManager[object]


@contextmanager
def both(one: Patch, other: Patch) -> Iterator[None]:
    with one, other:
        yield


def a_collective_inside_a_condition() -> Patch:
    """A rank to which nothing has happened does not vote."""

    real = Agreement.agree

    def agree(self, ballot, meanwhile=nothing):
        if ballot.lanes.any():
            return real(self, ballot, meanwhile)
        meanwhile()
        return ballot.result(ballot.lanes)

    return mock.patch.object(Agreement, "agree", agree)


def lengths_instead_of_flags() -> Patch:
    """A rank says how far it could go; the least of all lengths is where some rank cannot."""
    real = prefetch.ballot_of

    def ballot_of(held, ends, *, done):
        return real(held, np.arange(len(ends)) <= last_of(ends), done=done)

    return mock.patch.object(prefetch, "ballot_of", ballot_of)


def a_sidecar_missing_in_the_vote() -> Patch:
    """What the last group that has bytes lacks is not asked about."""
    real = Ends.usable

    def usable(self, held, stored):
        *others, last = stored
        return real(self, held, [*others, np.ones_like(last)] if others else stored)

    return mock.patch.object(Ends, "usable", usable)


def a_clock_of_its_own() -> Patch:
    """Deadlines pass when this rank's clock says so, not when rank 0's does."""

    def with_its_clock(real):
        def meet(self, *step):
            sampled = real(self, *step)
            self._shared.set(self._clock.now_s())
            return sampled

        return meet

    return both(
        mock.patch.object(StepSync, "choose", with_its_clock(StepSync.choose)),
        mock.patch.object(StepSync, "idle", with_its_clock(StepSync.idle)),
    )


def a_backup_that_is_good_here() -> Patch:
    """Whether a backup has failed is what this rank saw of it."""

    def apply(self, agreed):
        loads, saved = agreed.ended(Work.LOAD), agreed.ended(Work.BACKUP)
        for done in self.flights.taken(Direction.BACKUP, saved):
            self._backed_up(done, ok=done[0].ok)
        for done in self.flights.taken(Direction.LOAD, loads):
            self._loaded(done)
        return bool(loads or saved)

    return mock.patch.object(TransferManager, "apply", apply)


def pages_that_are_stored_here() -> Patch:
    """What storage has is what this rank's store has taken."""
    real = Persister.answered

    def answered(self, answer, agreed):
        real(self, answer, self.kept_here(answer))

    return mock.patch.object(Persister, "answered", answered)


# -- what ranks store together -------------------------------------------------------------------


def a_slice_of_another_rank() -> Patch:
    """Every rank names its slices as rank 0 does."""
    real = Sharding.objects
    return mock.patch.object(
        Sharding, "objects", lambda self, group, rank, cut: real(self, group, 0, cut)
    )


def whole_groups_written_by_all_and_cut_wrongly() -> Patch:
    """What all have alike every rank writes, and all but one from its middle on."""
    real = Sharding.objects

    def turned(shard):
        half = shard.payload_bytes // 2
        strips = (Strip(half, 1, half, half), Strip(0, 1, half, half))
        return replace(shard, strips=strips)

    def objects(self, group, rank, cut):
        shards = real(self, group, rank, cut)
        return shards if rank == 0 or self.splits(group) else tuple(map(turned, shards))

    return both(
        mock.patch.object(Sharding, "objects", objects),
        mock.patch.object(Sharding, "writes", return_value=True),
    )


def slices_that_know_how_many_ranks_there_are() -> Patch:
    def slices(self, group, cut):
        return self.ranks if self.splits(group) else 1

    return mock.patch.object(Sharding, "slices", slices)


def a_page_as_well_as_its_best_slice() -> Patch:
    return mock.patch.object(sharded, "max", min, create=True)


# -- the end of a rank ---------------------------------------------------------------------------


def a_lost_rank_ignored() -> Patch:
    """A ballot to which not all come is what this rank says."""
    real = Agreement.agree

    def agree(self, ballot, *more):
        try:
            return real(self, ballot, *more)
        except RankLostError:
            return ballot.result(ballot.lanes)

    return mock.patch.object(Agreement, "agree", agree)


def half_an_object_after_a_loss() -> Patch:
    """What a rank was writing when it died is there, as far as it had come."""
    real = FaultyStore.write

    def write(self, keys, pages):
        try:
            return real(self, keys, pages)
        except RankDied:
            there = self.inner.contains(keys)
            at = int(np.argmin(there))
            half = bytearray(pages[at])
            half[len(half) // 2 :] = bytes(len(half) - len(half) // 2)
            self.inner.write([keys[at]], [memoryview(half)])
            raise

    return mock.patch.object(FaultyStore, "write", write)


def a_dead_rank_that_still_writes() -> Patch:
    """What was queued on a rank is written although it has died, and not as it was: its pages are
    somebody else's by then."""
    real = SimRank.died

    def died(self):
        for of in self.cache.storage.persister._arenas:
            of.rows[:] = -1
        self.fate.dead = False
        for hand in self._hands:
            hand.join()
        self.fate.dead = True
        real(self)

    return mock.patch.object(SimRank, "died", died)


# -- tenants, followers, and what is not there ---------------------------------------------------


def adapters_that_share_pages() -> Patch:
    return mock.patch.object(Namespace, "adapted", lambda self, digest: self)


def events_of_what_is_stored_here() -> Patch:
    """Followers are told what this rank's store has taken."""
    real = Persister.answered

    def answered(self, answer, agreed):
        observer, self._observer = self._observer, None
        mine, job = self.kept_here(answer), self._jobs[answer.ticket]
        real(self, answer, agreed)
        self._observer = observer
        kept = list(compress(job.keys, mine.tolist()))
        for group in sorted({key.group for key in kept}) if observer else ():
            observer.stored(Medium.STORAGE, group, [key.page for key in kept if key.group == group])

    return mock.patch.object(Persister, "answered", answered)


def pages_dropped_twice() -> Patch:
    """Without reuse, what is behind a window is freed, and freed again with the rest."""
    real = Committer.commit

    def commit(self, row, sequence, tokens):
        rows = [self._tables.pages(group.id)[row] for group in self._spec.groups]
        before = [pages.copy() for pages in rows]
        real(self, row, sequence, tokens)
        for pages, held in zip(rows, before, strict=True):
            pages[:] = held

    return mock.patch.object(Committer, "commit", commit)


def room_on_a_host_that_is_not_there() -> Patch:
    """Who is retracted is saved, whether or not there is room."""
    return mock.patch.object(Retraction, "_room", return_value=True)


def answers_of_the_other_lane() -> Patch:
    """With two lanes, what was written is looked for among what was read."""
    real = IoWorker._lane

    def lane(self, kind):
        return self._lanes[0] if len(self._lanes[-1].finished[Kind.STORE]) else real(self, kind)

    return mock.patch.object(IoWorker, "_lane", lane)
