"""Pages over three tiers, moved about at random beside books of our own: what lies in every page,
what each copy moved, what followers were told. No request, no thread; copies and storage go on when
the walk says so.
"""

from collections import Counter, deque
from itertools import islice
from random import Random

import numpy as np

from stratakv.core.clock import ManualClock
from stratakv.core.ids import NONE, GroupId, RequestId, TicketId
from stratakv.core.page_keys import Namespace, PageHasher
from stratakv.memory.allocator import PageAllocator
from stratakv.policy.write import WriteThrough
from stratakv.spec.retention import needed
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.storage.memory import MemoryBackend
from stratakv.tiers.events import AllCleared, CacheEvents, PagesStored
from stratakv.tiers.tiered_cache import TieredCache, TierOptions
from stratakv.transfer.copy_plan import Direction
from stratakv.transfer.engine import Completion
from stratakv.tree.nodes import TIERS, Tier
from tests.replica import Replica, readable
from tests.tier_bench import Arena, content, form_of, policy_of

NAMESPACE = Namespace(model=b"machine", spec_digest=b"")
DEVICE, HOST = Tier.DEVICE, Tier.HOST
STORAGE = "STORAGE"


class Held:
    """A gate that lets the loads that it is over end, layer by layer."""

    def __init__(self, transfer, tickets):
        self._transfer, self._tickets = transfer, tickets

    def wait(self, layer):
        del layer
        while self._transfer.pending(Direction.LOAD, self._tickets):
            self._transfer.end(Direction.LOAD)


class HeldTransfer:
    """Copies the oldest plan of a direction when it is told to, and counts what it has moved:
    ``pages`` and ``bytes`` by direction, ``failed`` in pages."""

    def __init__(self, spec, arenas):
        self._spec, self._arenas = spec, arenas
        self._last = 70
        self.queued = {way: deque() for way in Direction}
        self._done = {way: deque() for way in Direction}
        self.pages, self.bytes, self.failed = Counter(), Counter(), 0

    def submit(self, plan):
        self._last += 1
        self.queued[plan.direction].append((TicketId(self._last), plan))
        return TicketId(self._last)

    def pending(self, way, tickets):
        return any(ticket in tickets for ticket, _ in self.queued[way])

    def gate(self, tickets):
        return Held(self, tickets)

    def end(self, way, *, ok=True):
        """The oldest plan of a direction, if there is one."""
        if not self.queued[way]:
            return
        ticket, plan = self.queued[way].popleft()
        count = sum(len(copy.device) for copy in plan.copies)
        moved = 0
        for copy in plan.copies if ok else ():
            ends = self._arenas[DEVICE][copy.group].bytes, self._arenas[HOST][copy.group].bytes
            if way is Direction.BACKUP:
                ends[1][copy.host] = ends[0][copy.device]
            else:
                ends[0][copy.device] = ends[1][copy.host]
            moved += len(copy.device) * self._spec.groups[copy.group].page_bytes
        self._done[way].append(Completion(ticket, ok=ok, bytes_moved=moved))
        self.pages[way] += count if ok else 0
        self.failed += 0 if ok else count
        self.bytes[way] += moved

    def ready(self, direction):
        return len(self._done[direction])

    def peek(self, direction, count):
        return list(islice(self._done[direction], count))

    def take(self, direction, count):
        return [self._done[direction].popleft() for _ in range(count)]

    def close(self):
        pass


class Hand:
    """Works a lane a batch at a time, when it is told to, or to the end."""

    def __init__(self, lane):
        self.lane = lane

    def join(self, timeout=None):
        del timeout
        while self.lane.once():
            pass

    def is_alive(self):
        return False


class TierMachine:
    """``device``, ``host``: pages of every group. All lengths in pages; a prompt is a list of
    symbols, one for each page."""

    def __init__(self, spec, seed, device, host, write=None):
        self.spec, self.page = spec, spec.page_tokens
        self.draw = Random(seed)
        sizes = [[pages] * len(spec.groups) for pages in (device, host)]
        self.arenas = [
            [Arena(n, group.page_bytes) for n, group in zip(of, spec.groups, strict=True)]
            for of in sizes
        ]
        self.transfer = HeldTransfer(spec, self.arenas)
        self.clock = ManualClock()
        self.events, self.replica = CacheEvents(self.page, {}), Replica()
        options = TierOptions(
            write=write or WriteThrough(), observer=self.events, sleep=self.work, clock=self.clock,
            prefetch=policy_of(spec),
        )  # fmt: skip
        pools = [[PageAllocator(n) for n in of] for of in sizes]
        self.cache = TieredCache(
            spec, (pools[0], pools[1]), self.transfer, options, self.arenas[HOST]
        )
        self.store = MemoryBackend(form_of(spec), 1 << 20)
        self.hands: list[Hand] = []
        self.leases, self.holds, self.waiting = [], [], {}
        self.live = []  # tickets, and pages of ours by group: on the device, on the host
        self.asked = 0
        self.entered = [0] * len(spec.groups)  # pages that have come to the device's tree
        self.saves = Counter()  # of loads under way, by ticket
        self.seen = Counter()

    # -- what there is ---------------------------------------------------------------------------

    def prefix(self, prompt):
        hasher = PageHasher(NAMESPACE, self.page)
        hasher.extend(np.repeat(np.array(prompt, np.int32), self.page))
        return hasher

    def prompt(self):
        """One of a few that share beginnings."""
        stem, turn = self.draw.randrange(2), self.draw.randrange(2)
        count = self.draw.choice((2, 4, 5, 7, 9))
        return ([stem] * 4 + [10 * stem + turn + 5] * 5)[:count]

    def content(self, key, group):
        return content(key, group, self.spec.groups[group].page_bytes)

    def work(self, seconds=0.0):
        """A copy ends and a batch of storage is done, if there is any."""
        del seconds
        self.transfer.end(self.draw.choice(list(Direction)), ok=True)
        for hand in self.hands:
            hand.lane.once()

    # -- moves -----------------------------------------------------------------------------------

    def serve(self):
        """Stand on what there is of a prompt, load what is on the host, and compute the rest."""
        if len(self.leases) > 2:
            self.leave()
        prefix = self.prefix(self.draw.choice([self.prompt(), *self.waiting.values()]))
        keys, tokens = prefix.keys, prefix.tokens
        found = self.cache.match(keys, len(keys) - 1)
        before = self.cache.copies.loading_pages
        plain = [pool.available() for pool in self.cache.pools.tiers[DEVICE]]
        lease = self.cache.lease(keys, found.end)
        if lease is None:
            self.seen["no room to load"] += 1
            assert self.cache.copies.loading_pages == before
            assert all(
                pool.available() >= n
                for pool, n in zip(self.cache.pools.tiers[DEVICE], plain, strict=True)
            )
            return
        self._loading(lease, found.end, before)
        gate = self.cache.copies.flights.gate(lease.loading)
        if gate is not None:
            for group in self.spec.groups:
                gate.wait(group.id)
        self._verify_lease(lease, keys)
        self._compute(lease, keys, tokens, found.end)
        self.leases.append((lease, keys))

    def _loading(self, lease, end, before):
        """Of what it loads the budget counts all that it stands on, once."""
        now = self.cache.copies.loading_pages
        assert now - before in {0, end}
        if now > before:
            self.seen["loaded"] += 1
            self.saves[lease.loading[-1]] += end

    def _compute(self, lease, keys, tokens, end):
        columns = []
        for group in self.spec.groups:
            span = needed(group.retention, len(keys) * self.page, self.page)
            at = range(max(span.start, end), span.stop)
            columns.append((at, max(0, len(at))))
        if end == len(keys) or any(
            self.cache.pools.available(GroupId(g)) < count for g, (_, count) in enumerate(columns)
        ):
            return
        if any(key in self.cache.tree.internals.nodes.index for key in keys[end:]):
            self.cache.progress.settle()  # nobody else loads what is computed here
        self.cache.copies.backups.begin()  # to take pages may evict nodes that are to be saved
        pages = []
        for group, (at, count) in enumerate(columns):
            taken = self.cache.pools.take(GroupId(group), count, self.cache.progress.wait)
            column = np.full(len(keys) - end, NONE, np.int32)
            column[[index - end for index in at]] = taken
            for index, page in zip(at, taken.tolist(), strict=True):
                view = self.arenas[DEVICE][group].bytes[page]
                view[:] = np.frombuffer(self.content(keys[index], group), np.uint8)
            pages.append(column)
            self.entered[group] += count
        self.events.inserted(NAMESPACE, keys, end, tokens)
        remaps = self.cache.insert(keys, end, pages)
        for remap in remaps:
            self.entered[remap.group] -= len(remap.canonical)
        self.seen["remapped"] += bool(remaps)
        self.cache.tree.leases.advance(lease, keys, len(keys))
        if self.draw.random() < 0.7:
            self.cache.keep(lease, end)
        self._verify_lease(lease, keys)

    def leave(self):
        if self.leases:
            lease, _ = self.leases.pop(self.draw.randrange(len(self.leases)))
            self.cache.release(lease)

    def hold(self):
        prefix = self.prefix(self.prompt())
        end = self.cache.match(prefix.keys, len(prefix.keys)).anchor_end
        hold = self.cache.hold(prefix.keys, end)
        assert hold.end <= end
        self.holds.append(hold)

    def let_go(self):
        if self.holds:
            self.cache.release(self.holds.pop())

    def tick(self):
        for way in Direction:
            for _ in range(self.draw.randrange(3)):
                self.transfer.end(way, ok=way is Direction.LOAD or self.draw.random() < 0.8)
        for hand in self.hands:
            for _ in range(self.draw.randrange(6)):
                hand.lane.once()
        head = next(iter(self.waiting), None)
        self.cache.progress.tick(head)
        self.seen["ticks"] += 1

    def push_out(self):
        self.cache.pools.push_out(DEVICE if self.draw.random() < 0.8 else HOST)

    def come_back(self):
        """All is saved and leaves the device, perhaps the host too, before somebody comes again."""
        while self.leases:
            self.leave()
        self.settle()
        self.cache.pools.push_out(DEVICE)
        if self.hands and self.draw.random() < 0.5:
            self.cache.pools.push_out(HOST)
            self.ask()
            while self.waiting:
                self.tick()
                self.answer()
        self.serve()

    def settle(self):
        self.cache.progress.settle()
        assert not self.cache.progress.busy

    def wait_for_copies(self):
        while self.cache.progress.wait():
            pass
        assert not self.cache.copies.flights

    # -- pages of a request's own ----------------------------------------------------------------

    def save_live(self):
        """A page that no node stands for goes to the host, and comes back if that went well."""
        group = GroupId(self.draw.randrange(len(self.spec.groups)))
        spaces = [self.cache.pools.tiers[tier][group] for tier in TIERS]
        pages = [space.alloc(1) for space in spaces]
        if any(page is None for page in pages):
            for space, page in zip(spaces, pages, strict=True):
                if page is not None:
                    space.free(page)
            return
        device, host = pages
        self.arenas[DEVICE][group].bytes[device] = 77
        tickets = self.cache.copies.save_live([(group, device, host)])
        self.live.append((tickets, group, device, host))

    def live_back(self):
        """Those whose copies have ended."""
        rest = []
        for tickets, group, device, host in self.live:
            if self.cache.copies.flights.under_way(tickets):
                rest.append((tickets, group, device, host))
                continue
            lost = self.cache.copies.failed(tickets)
            assert not self.cache.copies.failed(tickets), "reported once"
            if not lost:
                assert (self.arenas[HOST][group].bytes[host] == 77).all()
                self.arenas[DEVICE][group].bytes[device] = 0
                back = self.cache.copies.load_live([(group, device, host)])
                gate = self.cache.copies.flights.gate(back)
                assert gate is not None
                gate.wait(group)
                assert (self.arenas[DEVICE][group].bytes[device] == 77).all()
                while self.cache.copies.flights.under_way(back):
                    assert self.cache.progress.wait()
            self.seen["live lost" if lost else "live back"] += 1
            self.cache.pools.tiers[DEVICE][group].free(device)
            self.cache.pools.tiers[HOST][group].free(host)
        self.live = rest

    # -- storage ---------------------------------------------------------------------------------

    def attach(self):
        if self.hands:
            return

        def hand_for(lane, name):
            del name
            self.hands.append(Hand(lane))
            return self.hands[-1]

        backends = Backends(self.store, self.store)
        limits = IoLimits(queue_pages=60, batch_pages=3)
        worker = IoWorker(backends, form_of(self.spec), limits, self.clock, hand_for)
        self.cache.storage.attach(worker)

    def ask(self):
        if self.hands and len(self.waiting) < 3:
            name, self.asked = RequestId(f"{self.asked}"), self.asked + 1
            self.waiting[name] = self.prompt()
            prefix = self.prefix(self.waiting[name])
            self.cache.storage.prefetcher.start(name, prefix, len(prefix.tokens) + 1)

    def answer(self):
        """The oldest that waits is admitted, once it need not wait, or leaves."""
        if not self.waiting:
            return
        name, prompt = next(iter(self.waiting.items()))
        prefetcher = self.cache.storage.prefetcher
        if self.draw.random() < 0.1:
            prefetcher.forget(name, lambda tally: None)
        elif prefetcher.must_wait(name):
            return
        else:
            keys = self.prefix(prompt).keys
            end = self.cache.match(keys, len(keys)).end
            came = prefetcher.admitted(name, end, lambda tally: None)
            self.seen["came from storage"] += came is not None
        del self.waiting[name]

    # -- what must be true -----------------------------------------------------------------------

    def _verify_lease(self, lease, keys):
        for group in self.spec.groups:
            indices = range(lease.starts[group.id], lease.end)
            pages = self.cache.tree.leases.pages(lease, group.id)
            assert len(pages) == len(indices)
            self._verify(DEVICE, group.id, [keys[n] for n in indices], pages)

    def _verify(self, tier, group, keys, pages):
        for key, page in zip(keys, pages.tolist(), strict=True):
            there = self.arenas[tier][group].bytes[page].tobytes()
            assert there == self.content(key, group), f"{tier.name} page {page} of group {group}"

    def check(self):
        self.cache.check(
            lambda tier, group: [row[2 + tier] for row in self.live if row[1] == group]
        )
        self.follow()
        self._counts()

    def verify_all(self):
        """Every page that can be read, on every tier."""
        nodes = self.cache.tree.internals.nodes
        for (medium, group), keys in readable(self.cache.tree).items():
            tier = DEVICE if medium == "GPU" else HOST
            if tier is DEVICE and self.transfer.queued[Direction.LOAD]:
                continue  # some are still to come
            rows = [nodes.index[key] for key in keys]
            self._verify(tier, group, keys, nodes.page[tier][group][rows])
        for name, data in self.store.snapshot().items():
            assert data == self.content(name.page, name.group)

    def follow(self):
        """Device and host as their followers know them are as they are."""
        for event in self.events.take():
            match event:
                case AllCleared():
                    self.replica.clear()
                case PagesStored() if event.medium.value == STORAGE:
                    assert self.store.contains([(key, event.group, 0) for key in event.keys]).all()
                case PagesStored():
                    self.replica.store(event.medium.value, event.group, event.keys)
                case _ if event.medium.value != STORAGE:
                    self.replica.remove(event.medium.value, event.group, event.keys)
                case _:
                    pass
        assert self.replica.known() == readable(self.cache.tree)
        assert len(self.events) == len(self.cache.tree)

    def _counts(self):
        """What is counted is what was moved, as far as it was noted."""
        counters, transfer = self.cache.pools.counters, self.transfer
        if transfer.ready(Direction.BACKUP) + transfer.ready(Direction.LOAD):
            return
        assert counters.backup_pages == transfer.pages[Direction.BACKUP]
        assert counters.backup_bytes == transfer.bytes[Direction.BACKUP]
        assert counters.backup_failed_pages == transfer.failed
        assert counters.load_pages == transfer.pages[Direction.LOAD]
        assert counters.load_bytes == transfer.bytes[Direction.LOAD]
        flights = self.cache.copies.flights
        self.saves = +Counter({t: n for t, n in self.saves.items() if flights.under_way((t,))})
        assert self.cache.copies.loading_pages == sum(self.saves.values())
        for stats in self.cache.pools.stats():
            group = next(g.id for g in self.spec.groups if g.name == stats.group)
            tier = Tier[stats.tier.upper()]
            space = self.cache.pools.tiers[tier][group]
            assert (stats.total, stats.free) == (space.capacity, space.available())
            if tier is DEVICE:
                assert self.cache.pools.available(group) == stats.free + stats.evictable

    # -- the walk --------------------------------------------------------------------------------

    def run(self, steps, moves):
        for _ in range(steps):
            getattr(self, self.draw.choice(moves))()
            self.check()
        self.verify_all()
        self.end()

    def end(self):
        """Everybody leaves, and nothing is left."""
        for name in self.waiting:
            self.cache.storage.prefetcher.forget(name, lambda tally: None)
        for lease, _ in self.leases:
            self.cache.release(lease)
        for hold in self.holds:
            self.cache.release(hold)
        self.leases, self.holds, self.waiting = [], [], {}
        self.settle()
        self.live_back()
        self.check()
        self.verify_all()
        assert self.cache.progress.flush()
        self.check()
        assert all(pool.free == pool.total for pool in self.cache.pools.stats())
        self.cache.progress.close(0.0)
