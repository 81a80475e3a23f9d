"""Who follows the journal alone knows which pages of which group can be read on which tier.

The walks of the tree machine, beside a replica that is fed by nothing but notes: after every step
the two must agree, through evictions, copies that fail, loads, fetches and retractions.
"""

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest

from stratakv.core.ids import PageKey
from stratakv.spec.retention import KeepWindow
from stratakv.testing import tree_tiers
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_campaign import campaign
from stratakv.testing.tree_driver import TreeDriver
from stratakv.tree import journal
from stratakv.tree.journal import Change, Journal
from stratakv.tree.prefix_tree import PrefixTree
from stratakv.tree.residency import Event
from tests.replica import Replica, readable

WALKS = 100
DO = {
    Change.DEVICE_STORED: ("GPU", Replica.store),
    Change.DEVICE_REMOVED: ("GPU", Replica.remove),
    Change.HOST_STORED: ("CPU", Replica.store),
    Change.HOST_REMOVED: ("CPU", Replica.remove),
}


class FollowedTree(PrefixTree):
    """A tree with a journal and its follower."""

    changes: ClassVar[Counter[Change]] = Counter()

    def __init__(self, spec, capacity, policy=None):
        self.journal = Journal()
        super().__init__(spec, capacity, policy, self.journal)
        self.replica = Replica()
        self.seen: set[bytes] = set()

    def follow(self):
        for note in self.journal.take():
            medium, do = DO[note.change]
            do(self.replica, medium, note.group, note.keys)
            self.seen.update(note.keys)
            self.changes[note.change] += 1
        assert self.replica.known() == readable(self)
        self.seen.difference_update(self.journal.gone())
        assert self.seen == set(self.nodes.index), "what has left the tree"


@pytest.fixture
def followed(monkeypatch):
    verify = TreeDriver.verify

    def verify_and_follow(driver):
        verify(driver)
        driver.tree.follow()

    monkeypatch.setattr(tree_tiers, "PrefixTree", FollowedTree)
    monkeypatch.setattr(TreeDriver, "verify", verify_and_follow)
    FollowedTree.changes.clear()
    return FollowedTree


@pytest.mark.parametrize("policy", ["lru", "s3-fifo"])
def test_a_replica_that_reads_the_journal_agrees_with_the_tree(followed, policy):
    campaign(11, WALKS, policy=policy, shrink=False)
    assert min(followed.changes[change] for change in Change) > WALKS / 10


@pytest.mark.parametrize(
    ("event", "told_as"),
    [
        (Event.BACKUP_BEGUN, Change.HOST_STORED),  # before its bytes are there
        (Event.LOAD_BEGUN, Change.DEVICE_STORED),
        (Event.HOST_EVICTED, None),
        (Event.FETCHED, None),
        (Event.LOAD_DONE, None),
    ],
)
def test_an_event_told_wrongly_is_noticed(followed, monkeypatch, event, told_as):
    monkeypatch.setitem(journal.CHANGES, event, told_as)
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
    notes = driver.tree.journal.take()
    said = [(note.change, key) for note in notes if note.group == 0 for key in note.keys]
    for prompt, change in (
        (old, Change.DEVICE_STORED),
        (old, Change.DEVICE_REMOVED),
        (new, Change.DEVICE_STORED),
    ):
        assert [(change, key) for key in driver.keys(prompt)] == [
            pair for pair in said if pair[0] is change and pair[1] in driver.keys(prompt)
        ]


def test_a_tree_without_a_journal_tells_nobody():
    tree = PrefixTree(small_spec([], page_tokens=2), 4)
    assert tree.nodes.grown is None
    assert all(column.moved is None for column in tree.nodes.residency)


def test_a_key_that_ends_in_zeros_is_told_whole():
    kept = Journal()
    cache = PrefixTree(small_spec([], page_tokens=1), 4, None, kept)
    keys = [PageKey(b"a" + bytes(31)), PageKey(bytes(32))]
    cache.insert(keys, 0, [np.arange(2, dtype=np.int32)])
    (note,) = kept.take()
    assert note.keys == keys
