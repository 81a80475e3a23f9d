"""What ranks fetch and land when no two stores are alike: the same on all of them, or nothing."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from stratakv.core.page_keys import Namespace, PageHasher
from stratakv.engine.ranks.step_messages import Flush
from stratakv.policy.prefetch_pace import Timeout
from stratakv.spec.retention import needed
from stratakv.storage.backend import ObjectKey, ReadStatus
from stratakv.testing.fleet.run import Fleet
from stratakv.testing.fleet.scenario import PAGE
from stratakv.tiers.prefetch.fetches import Fetches
from stratakv.tiers.prefetch.prefetcher import Prefetcher
from stratakv.tree.nodes import Tier
from tests.fleet_plans import CALM, storage_plan

KINDS = ("anchor", "window", "chunk", "state", "three", "live", "states-only")


pytestmark = pytest.mark.usefixtures("quiet")


class Again:
    """A fleet whose last request finds everything in storage, where it is there. ``spoil`` happens
    to each rank when the flush is over."""

    def __init__(self, plan, spoil=lambda rank: None):
        self.fleet = Fleet(plan)
        self.prompt = plan.events[-1].command.prompt.tokens
        namespace = Namespace(model=b"tokens", spec_digest=plan.spec.digest)
        hasher = PageHasher(namespace, PAGE)
        hasher.extend(self.prompt)
        self.keys = hasher.keys
        self.cached = None
        self.common = None
        for rank in self.fleet.ranks:
            flushed = rank.flushed

            def hook(rank=rank, flushed=flushed):
                flushed()
                spoil(rank)

            rank.flushed = hook
        client = self.fleet.client
        forward, do = client.on_output, client.do

        def received(output):
            if output.request == "again" and output.cached is not None:
                self.cached = output.cached
            forward(output)

        def see(command):
            do(command)
            if isinstance(command, Flush):  # the whole of it is one step of all ranks
                ends = [set(self.usable(rank)) for rank in self.fleet.ranks]
                self.common = max(set.intersection(*ends), default=0)

        client.on_output, client.do = received, see

    def object(self, group, page):
        return ObjectKey(self.keys[page], group, 0)

    def usable(self, rank):
        """The ends at which this rank's store has all that a request needs, by the rule itself."""
        spec = self.fleet.plan.spec
        for end in range(1, (len(self.prompt) - 1) // PAGE + 1):
            keys = [
                self.object(group.id, page)
                for group in spec.groups
                if group.buffers
                for page in needed(group.retention, end * PAGE, PAGE)
            ]
            if rank.store.inner.contains(keys).all():
                yield end

    def run(self):
        self.fleet.run()
        assert self.cached is not None
        assert self.cached.device == self.cached.host == 0
        return self.cached.storage


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", KINDS)
def test_what_lands_is_the_largest_end_that_all_ranks_can_use(name, seed):
    ranks = 2 + seed % 3
    plan = storage_plan(seed, name, ranks)
    again = Again(replace(plan, fault_rates=(replace(CALM, loses=0.2),) * ranks))
    assert again.run() == again.common * PAGE


def test_stores_that_are_alike_give_everything():
    for name in KINDS:
        again = Again(storage_plan(1, name))
        assert again.run() == 8 * PAGE


def lacks(*objects):
    """Rank 1's store does not have page p of group g."""

    def spoil(rank):
        if rank.rank == 1:
            keys = [ObjectKey(key, group, 0) for group, key in objects]
            assert rank.store.inner.remove(keys) == len(keys)

    return spoil


def cannot_read(*objects, status=ReadStatus.CORRUPT):
    """Rank 1's store says that it has it."""

    def spoil(rank):
        if rank.rank == 1:
            keys, read = [ObjectKey(key, group, 0) for group, key in objects], rank.store.read
            rank.store.read = lambda names, into: [
                status if name in keys else found
                for name, found in zip(names, read(names, into), strict=True)
            ]

    return spoil


@pytest.mark.parametrize("group", [1, 2, 3])
def test_one_page_of_a_window_missing_on_one_rank_shortens_all(group):
    """Three sidecar groups. The last end (8 pages) needs page 7 of each of them."""
    plan = storage_plan(7, "three", 3)
    keys = Again(plan).keys
    again = Again(plan, lacks((group, keys[7])))
    assert again.run() == again.common * PAGE
    assert 0 < again.common < 8


@pytest.mark.parametrize("status", [ReadStatus.CORRUPT, ReadStatus.FAILED, ReadStatus.MISS])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_one_page_that_one_rank_cannot_read_releases_everything(group, status):
    """The page is said to be there, so all ranks fetch for the last end, and land nothing: shorter
    ends need pages that nobody asked for."""
    plan = storage_plan(7, "three", 3)
    keys = Again(plan).keys
    again = Again(plan, cannot_read((group, keys[7]), status=status))
    with watched_fetches(again.fleet) as (landed, restored):
        assert again.run() == 0
    assert landed == []
    assert restored == [True] * 3


@pytest.mark.parametrize("threshold_pages", [5, 7])
def test_a_shorter_end_lands_only_if_it_is_worth_it(threshold_pages):
    """Without windows every end is as good as its pages: one rank cannot read page 6 of 8."""
    plan = storage_plan(7, "anchor", 3, threshold_pages=threshold_pages)
    keys = Again(plan).keys
    again = Again(plan, cannot_read((0, keys[6])))
    lands = threshold_pages <= 6
    with watched_fetches(again.fleet) as (landed, restored):
        assert again.run() == (6 * PAGE if lands else 0)
    assert landed == ([6] * 3 if lands else [])
    assert restored == ([] if lands else [True] * 3)


@contextmanager
def watched_fetches(fleet):
    """What any rank lands, and whether what is given up leaves trees and hosts as they were."""
    landed, restored, before = [], [], {}
    tiers = {rank.cache.storage.prefetcher: rank.cache.tiers for rank in fleet.ranks}
    queried, fetched, land = Prefetcher.queried, Prefetcher.fetched, Fetches.land

    def look(prefetcher):
        of = tiers[prefetcher]
        nodes = of.tree.internals.nodes
        pages = [pages.tobytes() for tier in nodes.page for pages in tier]
        free = [space.available() for space in of.pools.tiers[Tier.HOST]]
        return free, dict(nodes.index), pages

    def begins(self, *answered):
        before[self] = look(self)
        queried(self, *answered)

    def ends(self, *answered):
        count = len(landed)
        fetched(self, *answered)
        if len(landed) == count:
            restored.append(look(self) == before.pop(self))

    def lands(self, keys, what, mine):
        landed.append(what.end)
        return land(self, keys, what, mine)

    with (
        mock.patch.object(Prefetcher, "queried", begins),
        mock.patch.object(Prefetcher, "fetched", ends),
        mock.patch.object(Fetches, "land", lands),
    ):
        yield landed, restored


@pytest.mark.parametrize("name", ["anchor", "three", "live"])
def test_a_rank_without_an_answer_votes_zeros_and_holds_nobody_for_ever(name):
    """Rank 1's store hangs when it is asked: the request's deadline passes on rank 0's clock, and
    all ranks compute what they could not fetch; the late answer changes nothing."""

    def hang(rank):
        if rank.rank == 1:
            rank.adversary.hold("storage", 400)

    plan = replace(storage_plan(3, name, 3, stop=Timeout(base_s=1.0)), step_s=0.5)
    again = Again(plan, hang)
    assert again.run() == 0
    assert again.common == 8
    for rank in again.fleet.ranks:
        assert not rank.cache.storage.prefetcher.busy


def test_a_fetch_that_hangs_on_one_rank_leaves_no_page_behind():
    plan = replace(storage_plan(3, "three", 2, stop=Timeout(base_s=1.0)), step_s=0.5)
    again = Again(plan)
    slow = again.fleet.ranks[1]
    read = slow.store.read

    def hang(names, into):
        slow.adversary.hold("storage", 300)
        return read(names, into)

    slow.store.read = hang
    again.run()
    for rank in again.fleet.ranks:
        free = [space.available() for space in rank.cache.tiers.pools.tiers[Tier.HOST]]
        held = [len(np.concatenate([np.empty(0), *rank.cache.storage.prefetcher.owned(group.id)]))
                for group in plan.spec.groups]  # fmt: skip
        assert held == [0] * len(held)
        assert min(free) > 0
