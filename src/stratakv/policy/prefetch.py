"""A prefetch from storage to the host: Probing -> Fetching -> Landed | Abandoned.

Owns the decisions, as functions from one state and plain facts to the next. Pure: no clock, no
threads, no tree, and nothing is allocated here. Every rank decides alike, because what may differ
between ranks (what storage answered, what arrived) comes back as flags over ends that all of them
have agreed on, and all else is the same on each.

    probe ------> Probing      the tree's pages are leased; storage is asked (``Ends.question``)
    answered ---> Fetching     allocate ``plan.allocate``, then fetch ``plan.objects``
               or MakeRoom     evict once towards ``pages``, then ``made_room``
               or Abandoned
    made_room --> Fetching or Abandoned
    arrived ----> Landed       ``PrefixTree.land`` what ``keep`` marks, free the rest
               or Abandoned    free everything: the tree is as it was
    abandon ----> Abandoned    from anywhere: no host page, an abort, a deadline, an I/O error
"""

from dataclasses import dataclass
from typing import TypeAlias, assert_never

import numpy as np

from stratakv.policy.prefetch_ends import CachedPrefix, Ends, FetchPlan, Flags, Int64s, last_of
from stratakv.policy.prefetch_pace import PrefetchPolicy
from stratakv.policy.prefetch_reasons import Arrivals, FetchOutcome, Reason, Tally, reason_of
from stratakv.spec.groups import CacheSpec


@dataclass(frozen=True, slots=True, eq=False)
class Probing:
    """Storage is being asked. ``before``: what an earlier attempt found, if it came so far."""

    held: CachedPrefix
    before: Tally | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MakeRoom:
    """The host is short: evict towards ``pages`` free ones of every group, once. ``ends`` are those
    that could be fetched if there were room."""

    held: CachedPrefix
    tally: Tally
    ends: Flags
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Fetching:
    """``tokens`` are in flight."""

    held: CachedPrefix
    tally: Tally
    plan: FetchPlan
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Landed:
    """The prefix is usable at ``end``. ``keep[g]``: which pages of ``plan.allocate[g]`` go to the
    tree; the others are freed."""

    tally: Tally
    plan: FetchPlan
    end: int
    keep: tuple[Flags, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Abandoned:
    """Nothing is left of it: what it had allocated is freed when no I/O holds it any more.
    ``retry``: another attempt may go better."""

    tally: Tally
    reason: Reason
    retry: bool


Prefetch: TypeAlias = Probing | MakeRoom | Fetching | Landed | Abandoned


@dataclass(frozen=True, slots=True)
class HostSpace:
    """Host pages by group: those free now, and those that an eviction could add."""

    free: tuple[int, ...]
    evictable: tuple[int, ...]


class PrefetchRules:
    def __init__(self, spec: CacheSpec, policy: PrefetchPolicy) -> None:
        self.policy = policy
        self.ends = Ends(spec)
        self._spec = spec
        self._page = spec.page_tokens

    def tokens(self, state: Prefetch) -> int:
        """What a prefetch counts for in the budget: only pages that are allocated."""
        return state.tokens if isinstance(state, Fetching) else 0

    # -- storage has answered --------------------------------------------------------------------

    def usable(self, probing: Probing, stored: tuple[Flags, ...]) -> Flags:
        """The ends to be agreed on; ``stored``: the pages of ``Ends.question`` that storage has."""
        return self._usable(probing.held, stored)

    def _usable(self, held: CachedPrefix, stored: tuple[Flags, ...]) -> Flags:
        """No further than anybody is known to have computed the prefix: where no group needs bytes,
        as at the end of a chunk below an anchor without any, every prompt would seem cached."""
        ends = self.ends.usable(held, stored)
        ends[self.ends.known(held, stored) + 1 :] = False
        return ends

    def answered(
        self,
        probing: Probing,
        stored: tuple[Flags, ...],
        agreed: Flags,
        room: HostSpace,
        in_flight_tokens: int,
    ) -> MakeRoom | Fetching | Abandoned:
        """``agreed``: ``usable`` on every rank. The longest end for which there is room or could be
        made, if it is worth it."""
        held = probing.held
        tally = self._tally_of(held, stored)
        best = last_of(agreed)
        tally = tally.cut(best, Reason.SHARD_DISAGREEMENT)
        gain = max(0, best - held.base) * self._page
        if gain < self.policy.threshold_tokens:
            return _gone(tally, Reason.BELOW_THRESHOLD, retry=True)
        if not self.policy.affords(gain, in_flight_tokens):
            return _gone(tally, Reason.RATE_LIMITED, retry=True)
        worthy = agreed & self._worthy(held)
        costs = self.ends.costs(held)
        free = np.array(room.free, np.int64)
        # Evict for what can be had, not for what cannot: a host that will be short anyway must not
        # lose good pages to a wish.
        reach = last_of(worthy & _fits(costs, free + np.array(room.evictable, np.int64)))
        if not reach:
            return _gone(tally, Reason.HOST_CAPACITY, retry=True)
        if (costs[:, reach] <= free).all():
            return self._fetch(held, tally.cut(reach, Reason.HOST_CAPACITY), reach)
        return MakeRoom(held, tally, worthy, tuple(costs[:, reach].tolist()))

    def made_room(self, state: MakeRoom, free: tuple[int, ...]) -> Fetching | Abandoned:
        """The one eviction is over, and may have brought less than was asked for."""
        fits = _fits(self.ends.costs(state.held), np.array(free, np.int64))
        end = last_of(state.ends & fits)
        tally = state.tally.cut(end, Reason.HOST_CAPACITY)
        if not end:
            return Abandoned(tally, Reason.HOST_CAPACITY, retry=True)
        return self._fetch(state.held, tally, end)

    def _tally_of(self, held: CachedPrefix, stored: tuple[Flags, ...]) -> Tally:
        usable = self._usable(held, stored)
        found = self.ends.stored_end(held, stored, usable)
        best = max(held.base, last_of(usable))
        tally = Tally(held.base, found)
        if best == found:
            return tally
        groups = [self._spec.groups[g] for g in self.ends.blockers(held, stored, found)]
        states_only = all(group.stateful for group in groups)
        lost = Reason.STATE_MISSING if states_only else Reason.WINDOW_INCOMPLETE
        return tally.cut(best, lost)

    def _worthy(self, held: CachedPrefix) -> Flags:
        """The ends that save enough."""
        ends = np.arange(held.limit + 1, dtype=np.int64)
        return (ends - held.base) * self._page >= self.policy.threshold_tokens

    def _fetch(self, held: CachedPrefix, tally: Tally, end: int) -> Fetching:
        plan = self.ends.plan(held, end)
        return Fetching(held, tally, plan, (end - held.base) * self._page)

    # -- the fetch has ended ---------------------------------------------------------------------

    def landable(self, state: Fetching, arrivals: Arrivals) -> Flags:
        """The ends to be agreed on, given what arrived here; none lies beyond the plan's."""
        held, plan = state.held, state.plan
        came = plan.objects.flags(arrivals == FetchOutcome.ARRIVED, len(held.present), held.limit)
        ends = self.ends.usable(held, came)
        ends[plan.end + 1 :] = False
        return ends

    def arrived(
        self, state: Fetching, arrivals: Arrivals, agreed: Flags, stopped: Reason
    ) -> Landed | Abandoned:
        """The longest end at which every group has all that it needs, on every rank, if it is still
        worth it. ``agreed``: ``landable`` on every rank; ``stopped``: why objects were not tried.
        """
        held, plan = state.held, state.plan
        worthy = self._worthy(held)
        end = last_of(agreed & worthy)
        here = last_of(self.landable(state, arrivals) & worthy)
        tally, reason = state.tally, Reason.SHARD_DISAGREEMENT
        if here < plan.end:
            missing = reason_of(arrivals, stopped)
            tally = tally.cut(here, missing)
            reason = reason if here else missing
        tally = tally.cut(end, Reason.SHARD_DISAGREEMENT)
        if not end:
            return Abandoned(tally, reason, retry=False)
        return Landed(tally, plan, end, self.ends.kept(held, plan, end))

    # -- the other ways out ----------------------------------------------------------------------

    def abandon(self, state: Probing | MakeRoom | Fetching, reason: Reason) -> Abandoned:
        """Also where the allocation fails that the plan counted on."""
        retry = reason in {Reason.HOST_CAPACITY, Reason.IO_ERROR, Reason.RATE_LIMITED}
        match state:
            case Probing():
                tally = state.before or Tally(state.held.base, state.held.base)
                return Abandoned(tally, reason, retry)
            case MakeRoom() | Fetching():
                return Abandoned(state.tally.cut(state.tally.base, reason), reason, retry)
            case _:
                assert_never(state)


def _gone(tally: Tally, reason: Reason, *, retry: bool) -> Abandoned:
    return Abandoned(tally.cut(tally.base, reason), reason, retry)


def _fits(costs: Int64s, free: Int64s) -> Flags:
    """The ends whose pages fit every group's space."""
    return np.logical_and.reduce(costs <= free[:, None])
