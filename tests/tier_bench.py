"""A storage tier over a real tree, real pools and the real I/O worker, without an engine.

Owns the parts and the bytes that every page must hold. A host page holds its own name, so that what
lands in the wrong place is seen.
"""

import hashlib
from collections import Counter

import numpy as np

from stratakv.agreement.agreement import Agreement
from stratakv.agreement.ranks import SingleRank
from stratakv.core.clock import ManualClock
from stratakv.core.ids import NONE, GroupId, RequestId
from stratakv.core.page_keys import Namespace, PageHasher
from stratakv.memory.allocator import PageAllocator
from stratakv.policy.prefetch_pace import PrefetchPolicy, WaitComplete
from stratakv.policy.prefetch_reasons import Reason
from stratakv.spec.retention import needed
from stratakv.storage.backend import ObjectKey, StoreFormat
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.patience import PATIENCE_S, wait_until
from stratakv.testing.tree_books import DEVICE, HOST
from stratakv.tiers.attached_store import AttachedStore
from stratakv.tiers.persist import Persister
from stratakv.tiers.pools import Pools
from stratakv.tiers.prefetch.fetches import Fetches
from stratakv.tiers.prefetch.prefetcher import Prefetcher
from stratakv.tiers.storage import StorageTier
from stratakv.tree.check import check
from stratakv.tree.observer import Medium
from stratakv.tree.prefix_tree import PrefixTree
from tests.io_gate import Gate

NAMESPACE = Namespace(model=b"bench", spec_digest=b"")


def form_of(spec):
    return StoreFormat(
        spec_digest=spec.digest, page_bytes=tuple(group.page_bytes for group in spec.groups)
    )


class Store(Gate):
    """A gate for any spec. ``reads``, ``writes`` and ``touches``: the objects it was asked for, and
    ``order``: the latter two in theirs."""

    def __init__(self, spec, *held, quota_bytes=1 << 20):
        super().__init__(*held)
        MemoryBackend.__init__(self, form_of(spec), quota_bytes)
        self.reads = []
        self.writes = []
        self.touches = []
        self.order = []
        self.writing = False

    def read(self, keys, into):
        self.reads += keys
        return super().read(keys, into)

    def write(self, keys, pages):
        self.writes += keys
        self.order.append(("write", keys))
        self.writing = True
        try:
            return super().write(keys, pages)
        finally:
            self.writing = False

    def touch(self, keys):
        if not self.writing:  # a write touches too
            self.touches += keys
            self.order.append(("touch", keys))
        return super().touch(keys)


class Arena:
    def __init__(self, pages, page_bytes):
        self.bytes = np.zeros((pages, page_bytes), np.uint8)

    def views(self, pages):
        return [memoryview(self.bytes[page]) for page in pages.tolist()]


def content(key, group, page_bytes):
    seed = hashlib.sha256(key + bytes([group])).digest()
    return (seed * (page_bytes // len(seed) + 1))[:page_bytes]


def policy_of(spec, threshold=1, budget=1 << 20, stop=None, **more):
    page = spec.page_tokens
    return PrefetchPolicy(
        threshold_tokens=threshold * page,
        budget_tokens=budget * page,
        stop=stop or WaitComplete(),
        **more,
    )


class StoredObserver:
    """Hears what storage has, and has no more, by group."""

    def __init__(self):
        self.kept, self.gone = [], []

    def inserted(self, namespace, keys, first, tokens):
        pass

    def stored(self, medium, group, keys):
        assert medium is Medium.STORAGE, "the tree has no observer here"
        self.kept.append((group, keys))

    def removed(self, medium, group, keys):
        assert medium is Medium.STORAGE, "the tree has no observer here"
        self.gone.append((group, set(keys)))


class Bench:
    """``prompt`` i is a prefix of its own; ``host``: pages of every group. All lengths in pages."""

    def __init__(self, spec, host=16, device=64, policy=None, observer=None, **limits):
        self.spec = spec
        self.groups = range(len(spec.groups))
        count = len(spec.groups)
        self.hosts = list(host) if isinstance(host, (list, tuple)) else [host] * count
        self.tiers = (
            [PageAllocator(device) for _ in self.groups],
            [PageAllocator(pages) for pages in self.hosts],
        )
        self.tree = PrefixTree(spec, device + self.hosts[0])
        self.arenas = [
            Arena(pages, group.page_bytes)
            for group, pages in zip(spec.groups, self.hosts, strict=True)
        ]
        self.clock = ManualClock()
        self.agreement = Agreement(SingleRank())
        policy = policy or policy_of(spec)
        self.settled = []
        """What storage had for each request that has left, in the order in which it was settled."""
        self.observer = observer
        store = AttachedStore()
        persister = Persister(self.tree.stored, self.arenas, store, observer)
        self.pools = Pools(spec, self.tree, self.tiers, persister.want)
        fetches = Fetches(self.tree, self.pools, self.arenas)
        self.prefetcher = Prefetcher(self.tree, fetches, store, policy, self.clock, observer)
        self.tier = StorageTier(self.tree, store, persister, self.prefetcher, observer)
        self.limits = IoLimits(**limits)
        self.worker = None
        self.backend = self.outer = None
        self.rooms = 0

    # -- the store -------------------------------------------------------------------------------

    def attach(self, backend, gate=None):
        """``backend``: what the worker calls; ``gate``: the store in it, if that is another."""
        self.backend, self.outer = gate or backend, backend
        form = form_of(self.spec)
        self.worker = IoWorker(Backends(backend, backend), form, self.limits, self.clock)
        self.tier.attach(self.worker)
        return self

    def close(self):
        for semaphore in self.backend.open.values():
            semaphore.release(1000)
        assert self.worker.close(PATIENCE_S)

    def keys(self, prompt, pages):
        return self.prefix(prompt, pages).keys

    def prefix(self, prompt, pages):
        hasher = PageHasher(NAMESPACE, self.spec.page_tokens)
        hasher.extend(np.full(pages * self.spec.page_tokens, prompt, np.int32))
        return hasher

    def content(self, key, group):
        return content(key, group, self.spec.groups[group].page_bytes)

    def fill(self, prompt, pages, groups=None):
        """Put every page of a prompt into the store, of those of ``groups`` that have bytes."""
        names = [
            ObjectKey(key, GroupId(group))
            for key in self.keys(prompt, pages)
            for group in (self.groups if groups is None else groups)
            if self.spec.groups[group].page_bytes
        ]
        bytes_of = [memoryview(self.content(name.page, name.group)) for name in names]
        statuses = MemoryBackend.write(self.backend, names, bytes_of)
        assert len(statuses) == len(names)
        return names

    # -- requests --------------------------------------------------------------------------------

    def start(self, request, prompt, pages):
        """A request with a prompt of ``pages`` and one token more waits."""
        prefix = self.prefix(prompt, pages)
        self.prefetcher.start(RequestId(request), prefix, pages * self.spec.page_tokens + 1)

    def answered(self):
        """Wait until an answer is there, and apply it."""
        wait_until(lambda: self.tier.ready, "an answer of storage")
        self.tick()

    def answered_all(self, kind, count):
        """Wait until ``count`` answers of a kind are there, and apply them at once."""
        wait_until(lambda: self.worker.ready(kind) == count, f"{count} answers to {kind}")
        self.tick()

    def tick(self, head=None):
        ballot = self.agreement.ballot()
        self.tier.vote(ballot)
        agreed = self.agreement.agree(ballot)
        self.tier.tick(None if head is None else RequestId(head), agreed)
        self.check()

    def settle(self):
        self.tick()
        while self.tier.busy:
            self.answered()

    def fetch(self, request, prompt, pages):
        """From its question to its end, whatever that is."""
        self.start(request, prompt, pages)
        self.settle()

    def admitted(self, request, end):
        return self.prefetcher.admitted(RequestId(request), end, self.settled.append)

    def forget(self, request):
        self.prefetcher.forget(RequestId(request), self.settled.append)

    def must_wait(self, request):
        return self.prefetcher.must_wait(RequestId(request))

    # -- the tiers -------------------------------------------------------------------------------

    def serve(self, prompt, pages, *, save=True):
        """Compute and cache a prompt, with a checkpoint at its end and a host copy of it all."""
        keys = self.keys(prompt, pages)
        columns = []
        for group in self.spec.groups:
            first = needed(group.retention, pages * self.spec.page_tokens, self.spec.page_tokens)
            column = np.full(pages, NONE, np.int32)
            ids = self.tiers[DEVICE][group.id].alloc(len(first))
            assert ids is not None, "the bench's device is full"
            column[first.start : first.stop] = ids
            columns.append(column)
        known = self.tree.internals.nodes.reach(keys, 0, pages)
        assert not known, "it is cached already"
        self.pools.execute(self.tree.insert(keys, 0, columns).effects)
        lease = self.tree.leases.take(keys, pages)
        self.pools.execute(self.tree.checkpoints.keep(lease, pages, 0))
        if save:
            self.save(lease.path)
        return lease

    def save(self, path):
        """Back up what of a path is on the device alone."""
        nodes = self.tree.internals.nodes
        for group in self.groups:
            rows = self.tree.backups.unsaved(GroupId(group), path)
            ids = self.tiers[HOST][group].alloc(len(rows))
            assert ids is not None, "the bench's host is full"
            self.tree.copies.begin_backup(GroupId(group), rows, ids)
            for row, view in zip(rows.tolist(), self.arenas[group].views(ids), strict=True):
                view[:] = self.content(nodes.key_of(row), group)
            self.pools.execute(self.tree.copies.end_backup(GroupId(group), rows, ok=True))

    def match(self, prompt, pages):
        return self.tree.match(self.keys(prompt, pages), pages)

    def free(self):
        return [space.available() for space in self.tiers[HOST]]

    def idle(self):
        """Whether all of the host is free, or could be."""
        spare = [self.tree.eviction.evictable(HOST, GroupId(group)) for group in self.groups]
        return [free + more for free, more in zip(self.free(), spare, strict=True)] == self.hosts

    def landed(self, prompt, end):
        """Assert that every page with bytes that ``end`` needs lies on the host as it should."""
        nodes = self.tree.internals.nodes
        keys = self.keys(prompt, end)
        page = self.spec.page_tokens
        for group in self.spec.groups:
            for at in needed(group.retention, end * page, page):
                row = nodes.index[keys[at]]
                host = nodes.page[HOST][group.id].item(row)
                assert host != NONE, f"page {at} of {group.name} is not there"
                there = self.arenas[group.id].bytes[host].tobytes()
                assert there == self.content(keys[at], group.id), f"page {at} of {group.name}"

    def check(self):
        """The tree's own check, and every host page has exactly one owner."""
        check(self.tree)
        for group in self.groups:
            owned = [
                page for part in self.prefetcher.owned(GroupId(group)) for page in part.tolist()
            ]
            held = self.tree.internals.nodes.page[HOST][group]
            owned += held[held != NONE].tolist()
            assert len(set(owned)) == len(owned), "a host page has two owners"
            free = self.tiers[HOST][group].available()
            taken = self.hosts[group] - free - self.blocked(group)
            assert taken == len(owned), f"group {group}: {taken} pages taken, {len(owned)} owned"

    def blocked(self, group):
        return len(self._blocked[group]) if self._blocked else 0

    _blocked = ()

    def block(self, counts):
        """Others hold that many host pages of every group."""
        self._blocked = [
            space.alloc(count) for space, count in zip(self.tiers[HOST], counts, strict=True)
        ]

    # -- figures ---------------------------------------------------------------------------------

    @property
    def written(self):
        return self.tier.persister.counters

    def lost(self):
        """By reason, in pages; hits and losses must be what was found."""
        stats = self.tier.stats(busy=False)
        page = self.spec.page_tokens
        lost = {
            reason: stats.lost_tokens[reason.name.lower()] // page
            for reason in Reason
            if stats.lost_tokens[reason.name.lower()]
        }
        assert stats.tokens["hits"] + sum(lost.values()) * page == stats.tokens["found"]
        return lost

    def hits(self):
        return self.tier.stats(busy=False).tokens["hits"] // self.spec.page_tokens

    def abandoned(self):
        counts = self.tier.stats(busy=False).abandoned
        return Counter({reason: counts[reason.name.lower()] for reason in Reason}) + Counter()


def count_evictions(monkeypatch):
    """How often a prefetch made room: a list that grows by one each time."""
    calls = []
    make_room = Fetches.make_room

    def counting(self, pages):
        calls.append(tuple(pages))
        return make_room(self, pages)

    monkeypatch.setattr(Fetches, "make_room", counting)
    return calls
