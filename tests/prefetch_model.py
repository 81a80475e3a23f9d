"""One prefetch after another at random, each decision beside a model that loops over every page.

Owns the model: sets of page indices and ``needed``, nothing else. The production code is only
called through its public functions.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stratakv.core.ids import RequestId
from stratakv.policy.prefetch import (
    Abandoned,
    Fetching,
    HostSpace,
    Landed,
    MakeRoom,
    PrefetchRules,
    Probing,
)
from stratakv.policy.prefetch_book import PrefetchBook
from stratakv.policy.prefetch_ends import CachedPrefix
from stratakv.policy.prefetch_pace import PrefetchPolicy
from stratakv.policy.prefetch_reasons import FetchOutcome, Reason
from stratakv.spec.retention import (
    KeepAll,
    KeepBoundary,
    KeepChunk,
    KeepLive,
    KeepWindow,
    needed,
)
from stratakv.testing.specs import small_spec

REQUEST = RequestId("r")
WORST = (FetchOutcome.CORRUPT, FetchOutcome.FAILED, FetchOutcome.MISSED)
MISSING = {
    FetchOutcome.CORRUPT: Reason.CORRUPT,
    FetchOutcome.FAILED: Reason.IO_ERROR,
    FetchOutcome.MISSED: Reason.EVICTED,
}


def random_spec(rng):
    page = rng.randint(1, 4)
    kinds = (
        lambda: KeepWindow(rng.randint(1, 4 * page + 1)),
        lambda: KeepChunk(rng.randint(1, 4 * page + 1)),
        KeepBoundary,
        KeepAll,
        KeepLive,
    )
    rules = [rng.choice(kinds)() for _ in range(rng.randint(0, 3))]
    return small_spec(rules, page_tokens=page, anchor_bytes=rng.random() < 0.7)


@dataclass
class Path:
    """The oracle. ``present[g]`` and what it is given: sets of page indices."""

    spec: object
    present: list
    limit: int

    def __post_init__(self):
        self.page = self.spec.page_tokens
        self.groups = self.spec.groups
        self.bytes = [bool(group.buffers) for group in self.groups]
        self.base = max(e for e in range(self.limit + 1) if self._all(self.present, e))

    def needed(self, group, end):
        return needed(self.groups[group].retention, end * self.page, self.page)

    def _all(self, have, end):
        return all(set(self.needed(g, end)) <= have[g] for g in range(len(self.groups)))

    def with_stored(self, stored):
        everything = set(range(self.limit))
        return [
            p | s if b else everything
            for p, s, b in zip(self.present, stored, self.bytes, strict=True)
        ]

    def usable(self, stored):
        last = self.known(stored)
        return [e for e in self.complete(stored) if e <= last]

    def complete(self, stored):
        have = self.with_stored(stored)
        return [e for e in range(self.base + 1, self.limit + 1) if self._all(have, e)]

    def known(self, stored):
        """Where the last page lies that anything shows to have been computed before."""
        asked = set(self.question())
        seen = [i + 1 for pages in self.present for i in pages]
        seen += [i + 1 for g, pages in enumerate(stored) for i in pages if (i, g) in asked]
        return max(seen, default=0)

    def question(self):
        """(page, group), in order."""
        return sorted(
            {
                (i, g)
                for e in range(self.base + 1, self.limit + 1)
                for g in range(len(self.groups))
                for i in self.needed(g, e)
                if self.bytes[g] and i not in self.present[g]
            }
        )

    def lacking(self, group, end):
        return [i for i in self.needed(group, end) if i not in self.present[group]]

    def cost(self, end):
        return [len(self.lacking(g, end)) for g in range(len(self.groups))]

    def usable_end(self, stored):
        have, asked = self.with_stored(stored), set(self.question())
        best = max([self.base, *self.usable(stored)])
        added = [i + 1 for g, b in enumerate(self.bytes) if b for i in stored[g] if (i, g) in asked]
        reach = self.limit
        for g, group in enumerate(self.groups):
            if isinstance(group.retention, KeepAll) and self.bytes[g]:
                while not set(range(reach)) <= have[g]:
                    reach -= 1
        return max(best, min(reach, max([self.base, *added])))

    def incomplete(self, stored):
        """The reason why storage's own end cannot be used."""
        have, end = self.with_stored(stored), self.usable_end(stored)
        blocking = [g for g in range(len(self.groups)) if not set(self.needed(g, end)) <= have[g]]
        states = all(
            isinstance(self.groups[g].retention, KeepBoundary | KeepLive) for g in blocking
        )
        return Reason.STATE_MISSING if states else Reason.WINDOW_INCOMPLETE

    def affordable(self, ends, free, threshold):
        return [
            e
            for e in ends
            if (e - self.base) * self.page >= threshold
            and all(c <= f for c, f in zip(self.cost(e), free, strict=True))
        ]


def random_path(rng, spec):
    limit = rng.randint(0, 12)
    anchor = rng.randint(0, limit)
    present = [set(range(anchor))]
    for _ in spec.groups[1:]:
        density = rng.choice((0.0, 0.5, 1.0))
        present.append({i for i in range(anchor) if rng.random() < density})
    return Path(spec, present, limit)


def random_stored(rng, path):
    """By group: pages that storage has, mostly a prefix with a hole or two."""
    found = []
    for with_bytes in path.bytes:
        density = rng.choice((0.5, 0.9, 1.0, 1.0))
        last = rng.choice((path.limit, path.limit, rng.randint(0, path.limit)))
        found.append({i for i in range(last) if with_bytes and rng.random() < density})
    return found


def as_flags(sets, limit):
    flags = tuple(np.zeros(limit, np.bool_) for _ in sets)
    for of, pages in zip(flags, sets, strict=True):
        of[sorted(pages)] = True
    return flags


def ends_of(flags):
    return np.flatnonzero(flags).tolist()


def losses(chain):
    """What falls between neighbours of [(end, reason why not further), ...], the first being what
    was found."""
    lost = Counter()
    for (above, _), (end, reason) in pairwise(chain):
        if above > end:
            lost[reason] += above - end
    return lost


class Walk:
    """One request's prefetch from the question to its end, all choices drawn from ``rng``."""

    def __init__(self, rng):
        self.rng = rng
        self.path = random_path(rng, random_spec(rng))
        page = self.path.page
        self.threshold = rng.choice((1, page, 3 * page, 6 * page))
        self.budget = rng.choice((page, 4 * page, 1000 * page))
        policy = PrefetchPolicy(threshold_tokens=self.threshold, budget_tokens=self.budget)
        self.rules = PrefetchRules(self.path.spec, policy)
        self.book = PrefetchBook(self.rules, page)
        self.held = CachedPrefix(self.path.base, as_flags(self.path.present, self.path.limit))
        self.ranks = [random_stored(rng, self.path) for _ in range(rng.choice((1, 1, 2)))]
        self.chain = []

    def move(self, state):
        self.book.move(REQUEST, state, 0)
        return state

    def run(self):
        """How it ended: a reason, or None where it landed."""
        probing = self.move(Probing(self.held))
        stored = self.ask()
        state = self.answer(probing, stored)
        if isinstance(state, MakeRoom):
            state = self.evict(state)
        if isinstance(state, Fetching):
            state = self.fetch(state)
        self.end(state)
        return None if isinstance(state, Landed) else state.reason

    def ask(self):
        asked = self.rules.ends.question(self.held)
        pairs = list(zip(asked.pages.tolist(), asked.groups.tolist(), strict=True))
        assert pairs == self.path.question()
        groups, limit = len(self.path.groups), self.path.limit
        answers = []
        for rank in self.ranks:
            there = np.array([i in rank[g] for i, g in pairs], np.bool_)
            answers.append(asked.flags(there, groups, limit))
        return answers

    def answer(self, probing, answers):
        path, rng = self.path, self.rng
        for flags, rank in zip(answers, self.ranks, strict=True):
            assert ends_of(self.rules.usable(probing, flags)) == path.usable(rank)
        agreed = np.logical_and.reduce([self.rules.usable(probing, flags) for flags in answers])
        self.agreed = ends_of(agreed)
        fill = rng.choice((0, 1, 2, 4, 8, 99))
        self.free = tuple(rng.randint(0, fill) for _ in path.groups)
        self.spare = tuple(rng.choice((0, 0, 2, 5, 99)) for _ in path.groups)
        others = rng.choice((0, 0, path.page, self.budget))
        state = self.move(
            self.rules.answered(
                probing, answers[0], agreed, HostSpace(self.free, self.spare), others
            )
        )
        self.expect_answer(state, others)
        return state

    def expect_answer(self, state, others):
        path, mine = self.path, self.ranks[0]
        local = max([path.base, *path.usable(mine)])
        best = max([path.base, *self.agreed])
        self.chain = [(path.usable_end(mine), None), (local, path.incomplete(mine))]
        self.chain += [(best, Reason.SHARD_DISAGREEMENT)]
        gain = (best - path.base) * path.page
        total = [f + s for f, s in zip(self.free, self.spare, strict=True)]
        reach = path.affordable(self.agreed, total, self.threshold)
        if gain < self.threshold:
            return self.expect_gone(state, Reason.BELOW_THRESHOLD)
        if others and others + gain > self.budget:
            return self.expect_gone(state, Reason.RATE_LIMITED)
        if not reach:
            return self.expect_gone(state, Reason.HOST_CAPACITY)
        cost = path.cost(max(reach))
        if any(c > f for c, f in zip(cost, self.free, strict=True)):
            assert isinstance(state, MakeRoom)
            assert list(state.pages) == cost
            return None
        return self.expect_fetch(state, max(reach))

    def expect_gone(self, state, reason):
        assert isinstance(state, Abandoned)
        assert state.reason is reason
        self.chain.append((self.path.base, reason))

    def expect_fetch(self, state, end):
        assert isinstance(state, Fetching)
        path, plan = self.path, state.plan
        self.chain.append((end, Reason.HOST_CAPACITY))
        lacking = [path.lacking(g, end) for g in range(len(path.groups))]
        assert plan.end == end
        assert [pages.tolist() for pages in plan.allocate] == lacking
        assert plan.first == min([i for pages in lacking for i in pages], default=end)
        objects = sorted((i, g) for g, pages in enumerate(lacking) if path.bytes[g] for i in pages)
        pairs = zip(plan.objects.pages.tolist(), plan.objects.groups.tolist(), strict=True)
        assert list(pairs) == objects
        tokens = (end - path.base) * path.page
        assert tokens >= self.threshold
        assert state.tokens == self.book.in_flight_tokens == tokens
        assert all(len(p) <= f for p, f in zip(lacking, self.free, strict=True)), "no room"

    def evict(self, state):
        """It may bring less than was asked for, or more, and what it brings is all there is."""
        rng, share = self.rng, self.rng.choice((0.0, 0.5, 1.0, 1.0))
        self.free = tuple(
            f + (s if share == 1 else rng.randint(0, int(share * s)))
            for f, s in zip(self.free, self.spare, strict=True)
        )
        after = self.move(self.rules.made_room(state, self.free))
        ends = self.path.affordable(self.agreed, self.free, self.threshold)
        if ends:
            self.expect_fetch(after, max(ends))
        else:
            self.expect_gone(after, Reason.HOST_CAPACITY)
        return after

    def fetch(self, state):
        rng = self.rng
        if rng.random() < 0.1:  # the second allocation fails, or an abort
            reason = rng.choice((Reason.HOST_CAPACITY, Reason.ABORTED))
            after = self.move(self.rules.abandon(state, reason))
            self.expect_gone(after, reason)
            assert self.book.in_flight_tokens == 0
            return after
        count = len(state.plan.objects.pages)
        bad = rng.choice((0.0, 0.0, 0.1, 0.5))
        kinds = (FetchOutcome.MISSED, FetchOutcome.FAILED, FetchOutcome.CORRUPT)
        came = []
        for _ in self.ranks:
            arrivals = [rng.choice(kinds) if rng.random() < bad else 0 for _ in range(count)]
            stop = rng.choice((count, count, rng.randint(0, count)))
            arrivals[stop:] = [FetchOutcome.NOT_TRIED] * (count - stop)
            came.append(np.array(arrivals, np.uint8))
        agreed = np.logical_and.reduce([self.rules.landable(state, a) for a in came])
        stopped = rng.choice((Reason.DEADLINE, Reason.ABORTED))
        after = self.move(self.rules.arrived(state, came[0], agreed, stopped))
        self.expect_landing(state, after, came, stopped)
        return after

    def arrived_sets(self, plan, arrivals):
        sets = [set() for _ in self.path.groups]
        pairs = zip(plan.objects.pages.tolist(), plan.objects.groups.tolist(), strict=True)
        for (page, group), arrival in zip(pairs, arrivals.tolist(), strict=True):
            if arrival == FetchOutcome.ARRIVED:
                sets[group].add(page)
        return sets

    def expect_landing(self, before, after, came, stopped):
        path, plan = self.path, before.plan
        sets = [self.arrived_sets(plan, arrivals) for arrivals in came]
        per_rank = [
            [
                e
                for e in path.complete(arrived)
                if e <= plan.end and (e - path.base) * path.page >= self.threshold
            ]
            for arrived in sets
        ]
        common = set(per_rank[0]).intersection(*per_rank[1:])
        here, end = max([path.base, *per_rank[0]]), max([path.base, *common])
        worst = next((w for w in WORST if w in came[0].tolist()), None)
        self.chain.append((here, MISSING.get(worst, stopped)))
        self.chain.append((end, Reason.SHARD_DISAGREEMENT))
        if end == path.base:
            assert isinstance(after, Abandoned)
            assert not after.retry
            expected = Reason.SHARD_DISAGREEMENT
            if here == path.base:
                expected = MISSING.get(worst, stopped)
            assert after.reason is expected
            return
        assert isinstance(after, Landed)
        assert after.end == end
        for g, (pages, keep) in enumerate(zip(plan.allocate, after.keep, strict=True)):
            kept = set(pages[keep].tolist())
            assert kept == set(path.lacking(g, end))
            assert set(path.needed(g, end)) <= path.present[g] | kept
            assert not path.bytes[g] or all(kept <= arrived[g] for arrived in sets)

    def end(self, state):
        """The request is admitted, perhaps on less than what landed."""
        path, counters = self.path, self.book.counters
        assert self.book.in_flight_tokens == 0
        used = state.end if isinstance(state, Landed) else path.base
        if isinstance(state, Landed) and self.rng.random() < 0.2:
            used = self.rng.randint(path.base, state.end)
            self.chain.append((used, Reason.EVICTED))
        self.book.settle(REQUEST, used, Reason.EVICTED)
        lost = {reason: pages for reason, pages in counters.lost.items() if pages}
        assert lost == {r: n * path.page for r, n in losses(self.chain).items()}
        assert counters.hits == (used - path.base) * path.page
        assert counters.found == (path.usable_end(self.ranks[0]) - path.base) * path.page
        assert counters.hits + sum(lost.values()) == counters.found
        assert self.book.state(REQUEST) is None
