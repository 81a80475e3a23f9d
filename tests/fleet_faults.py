"""Faults seeded into the code that keeps ranks alike, each as a patch that a fleet must catch.

Owns the patches; a function here is entered as a context. Each breaks one rule of the ballot.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

import numpy as np

from stratakv.agreement.ballot import Ballot, Work
from stratakv.cache import prefetch
from stratakv.cache.copies import CopyDesk
from stratakv.cache.kv_cache import KVCache
from stratakv.cache.persist import Persister
from stratakv.engine.ranked import Desk
from stratakv.policy.prefetch_ends import Ends, last_of
from stratakv.transfer.plan import Direction

Patch = AbstractContextManager[object]


def a_collective_inside_a_condition() -> Patch:
    """A rank to which nothing has happened does not vote."""

    def tick(self, head=None):
        ballot = Ballot()
        self._copies.vote(ballot)
        self.storage.vote(ballot)
        met = self._copies.ready or self.storage.ready
        agreed = self._agreement.agree(ballot) if met else ballot.result(ballot.lanes)
        if self._copies.apply(agreed):
            self._commits.free_strays(self._seats)
        self._parking.poll()
        self._copies.clean()
        self._copies.submit()
        self.storage.tick(head, agreed)

    return mock.patch.object(KVCache, "tick", tick)


def lengths_instead_of_flags() -> Patch:
    """A rank says how far it could go; the least of all lengths is where some rank cannot."""
    real = prefetch.ballot_of

    def ballot_of(held, ends, *, done):
        return real(held, np.arange(len(ends)) <= last_of(ends), done=done)

    return mock.patch.object(prefetch, "ballot_of", ballot_of)


def a_sidecar_missing_in_the_vote() -> Patch:
    """What the last group that has bytes lacks is not asked about."""
    real = Ends._complete

    def complete(self, held, stored, group):
        forgotten = group == len(self._spec.groups) - 1 and group > 0
        whole = np.ones(held.limit + 1, np.bool_)
        return whole if forgotten else real(self, held, stored, group)

    return mock.patch.object(Ends, "_complete", complete)


def a_clock_of_its_own() -> Patch:
    """Deadlines pass when this rank's clock says so, not when rank 0's does."""
    real = Desk._meet

    def meet(self, tokens):
        came = real(self, tokens)
        self._told.set(self._clock.now_s())
        return came

    return mock.patch.object(Desk, "_meet", meet)


def a_backup_that_is_good_here() -> Patch:
    """Whether a backup has failed is what this rank saw of it."""

    def apply(self, agreed):
        loads, saved = agreed.ended(Work.LOAD), agreed.ended(Work.BACKUP)
        for done in self._taken(Direction.BACKUP, saved):
            self._backed_up(done, ok=done[0].ok)
        for done in self._taken(Direction.LOAD, loads):
            self._loaded(done)
        return bool(loads or saved)

    return mock.patch.object(CopyDesk, "apply", apply)


def pages_that_are_stored_here() -> Patch:
    """What storage has is what this rank's store has taken."""
    real = Persister.answered

    def answered(self, answer, agreed):
        real(self, answer, self.kept_here(answer))

    return mock.patch.object(Persister, "answered", answered)


FAULTS: tuple[Callable[[], Patch], ...] = (
    a_collective_inside_a_condition,
    lengths_instead_of_flags,
    a_sidecar_missing_in_the_vote,
    a_clock_of_its_own,
    a_backup_that_is_good_here,
    pages_that_are_stored_here,
)
