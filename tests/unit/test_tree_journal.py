"""Who follows a tree alone knows which pages of which group can be read on which tier.

The walks of the tree machine, beside a replica that is fed by nothing but what it is told: after
every step the two must agree, through evictions, copies that fail, loads, fetches and retractions.
"""

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest

from stratakv.core.ids import GroupId, PageKey
from stratakv.spec.retention import KeepWindow
from stratakv.testing import tree_tiers
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_campaign import campaign
from stratakv.testing.tree_driver import TreeDriver
from stratakv.tree import journal
from stratakv.tree.observer import Medium
from stratakv.tree.order import LeastRecentlyUsed
from stratakv.tree.prefix_tree import PrefixTree
from stratakv.tree.residency import ResidencyEvent
from tests.replica import Replica, readable

WALKS = 100
CHANGES = [(verb, medium) for verb in ("stored", "removed") for medium in ("GPU", "CPU")]


class Follower:
    """A replica, and what it was told: (verb, medium, group, keys)."""

    changes: ClassVar[Counter[tuple[str, str]]] = Counter()

    def __init__(self):
        self.replica = Replica()
        self.seen: set[bytes] = set()
        self.received = []

    def stored(self, medium, group, keys):
        self.replica.store(medium.value, group, keys)
        self.seen.update(keys)
        self._note("stored", medium, group, keys)

    def removed(self, medium, group, keys):
        self.replica.remove(medium.value, group, keys)
        self._note("removed", medium, group, keys)

    def gone(self, keys):
        self.seen.difference_update(keys)

    def _note(self, verb, medium, group, keys):
        self.changes[verb, medium.value] += 1
        self.received.append((verb, medium, group, keys))


class FollowedTree(PrefixTree):
    """A tree with its follower."""

    def __init__(self, spec, capacity, policy=None):
        self.follower = Follower()
        super().__init__(spec, capacity, policy, self.follower)

    def follow(self):
        assert self.follower.replica.known() == readable(self)
        assert self.follower.seen == set(self.internals.nodes.index), "what has left the tree"


@pytest.fixture
def followed(monkeypatch):
    verify = TreeDriver.verify

    def verify_and_follow(driver):
        verify(driver)
        driver.tree.follow()

    monkeypatch.setattr(tree_tiers, "PrefixTree", FollowedTree)
    monkeypatch.setattr(TreeDriver, "verify", verify_and_follow)
    Follower.changes.clear()
    return FollowedTree


@pytest.mark.parametrize("policy", ["lru", "s3-fifo"])
def test_a_replica_that_observes_the_tree_agrees_with_it(followed, policy):
    campaign(11, WALKS, policy=policy, shrink=False)
    assert min(Follower.changes[change] for change in CHANGES) > WALKS / 10


@pytest.mark.parametrize(
    ("table", "event", "reported_as"),
    [
        (journal.STORED, ResidencyEvent.BACKUP_BEGUN, Medium.HOST),  # before its bytes are there
        (journal.STORED, ResidencyEvent.LOAD_BEGUN, Medium.DEVICE),
        (journal.REMOVED, ResidencyEvent.HOST_EVICTED, None),
        (journal.STORED, ResidencyEvent.FETCHED, None),
        (journal.STORED, ResidencyEvent.LOAD_DONE, None),
    ],
)
def test_a_wrong_event_is_noticed(followed, monkeypatch, table, event, reported_as):
    monkeypatch.setitem(table, event, reported_as)
    with pytest.raises(AssertionError):
        campaign(11, WALKS, shrink=False)


def test_keys_are_noted_before_their_rows_are_used_again(followed):
    """A row changes hands within one step: the notes name both pages."""
    driver = TreeDriver(small_spec([KeepWindow(4)], page_tokens=2), (3, 3), (0, 0))
    old, new = (1, 1, 1), (2, 2, 2)
    for prompt in (old, new):  # the second evicts the first from the only three rows
        request = driver.arrive(prompt, len(prompt) - 1, load=False)
        assert driver.extend(request, 3, generous=True)
        driver.finish(request)
    received = driver.tree.follower.received
    pairs = [(verb, key) for verb, _, group, keys in received if group == 0 for key in keys]
    for prompt, verb in ((old, "stored"), (old, "removed"), (new, "stored")):
        assert [(verb, key) for key in driver.keys(prompt)] == [
            pair for pair in pairs if pair[0] == verb and pair[1] in driver.keys(prompt)
        ]


def test_a_tree_that_nobody_follows_keeps_no_journal():
    tree = PrefixTree(small_spec([], page_tokens=2), 4)
    assert tree.internals.nodes._journal is None
    assert not any(column._moved for column in tree.internals.nodes.residency)


def test_a_key_that_ends_in_zeros_is_reported_whole():
    kept = Follower()
    cache = PrefixTree(small_spec([], page_tokens=1), 4, LeastRecentlyUsed, kept)
    keys = [PageKey(b"a" + bytes(31)), PageKey(bytes(32))]
    cache.insert(keys, 0, [np.arange(2, dtype=np.int32)])
    ((_, _, _, received),) = kept.received
    assert received == keys


def test_of_no_page_nothing_is_reported():
    kept = Follower()
    moved = journal.Journal(4, kept).of_group(GroupId(0))
    moved(np.empty(0, np.intp), ResidencyEvent.INSERTED)
    assert kept.received == []
