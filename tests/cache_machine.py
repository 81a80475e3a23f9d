"""A cache of requests driven at random beside books of its own: which token every row of every page
holds. Requests come, share, load, are retracted, change engines and leave; nothing is computed, and
copies end when the walk says so.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from random import Random

import numpy as np

from stratakv.cache.kv_cache import CacheOptions, KVCache
from stratakv.cache.prices import AdmissionLimits, AdmissionRequest
from stratakv.cache.records import Admission, CacheUse, Refusal
from stratakv.core.ids import NONE, GroupId, LayerId, RequestId
from stratakv.core.page_keys import Namespace, PageHasher
from stratakv.memory.allocator import PageAllocator
from stratakv.memory.block_table import NO_BUFFERS, BlockTable
from stratakv.policy.checkpoints import last_end
from stratakv.policy.load_back import LoadBackPolicy
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec, Home
from stratakv.spec.retention import KeepAll, handed_over, needed
from stratakv.tiers.tiered_cache import TierOptions
from stratakv.transfer.copy_plan import Direction
from stratakv.tree.nodes import Tier
from tests.tier_bench import Arena
from tests.tier_machine import HeldTransfer

NAMESPACE = Namespace(model=b"machine", spec_digest=b"")
DEVICE, HOST = Tier.DEVICE, Tier.HOST
CHUNK = 5
MOST = 26
"""Tokens of a request, with its answer."""


def wide_spec(page_tokens, *rules, away=()):
    """Eight bytes for each token, in every group. ``away``: groups whose home is the host."""
    groups = [
        CacheGroup(
            id=GroupId(at), name=f"g{at}", retention=rule,
            home=Home.HOST if at in away else Home.DEVICE,
            buffers=(
                BufferSpec(name="rows", layers=(LayerId(at),), rows_per_page=page_tokens,
                           row_shape=(8,), dtype="uint8"),
            ),
        )
        for at, rule in enumerate((KeepAll(), *rules))
    ]  # fmt: skip
    return CacheSpec(page_tokens=page_tokens, groups=tuple(groups))


@lru_cache(maxsize=100_000)
def value_of(tokens):
    """What the row of the last of ``tokens`` holds, or a state after them."""
    return int.from_bytes(blake2b(bytes(tokens), digest_size=7).digest()) + 1


@dataclass(eq=False)
class Asked:
    """A request: ``known`` tokens, of which ``computed`` have their KV at ``row``."""

    name: str
    known: list[int]
    total: int
    use: CacheUse
    prompt: int = 0
    row: int = NONE
    computed: int = 0
    tickets: tuple = ()
    retracted: object = None
    receives: bool = False
    computed_here: bool = True

    @property
    def prefilled(self):
        return self.computed >= self.prompt


class PoisonedPages(PageAllocator):
    """Pages that nobody owns hold nothing but ones, which no row is."""

    def __init__(self, arena):
        super().__init__(len(arena.bytes))
        self._bytes = arena.bytes
        self._bytes[:] = 0xFF

    def free(self, pages):
        super().free(pages)
        self._bytes[pages] = 0xFF

    def check(self):
        """AssertionError where somebody has written to a page since it was freed."""
        assert (self._bytes[self.next(self.available())] == 0xFF).all()


class CacheMachine:
    def __init__(self, spec, seed, device, host, steps_at_once=1, buffers=NO_BUFFERS):
        self.spec, self.page, self.draw = spec, spec.page_tokens, Random(seed)
        sizes = [list(device), [host] * len(spec.groups)]
        self.arenas = [
            [Arena(n, group.page_bytes) for n, group in zip(of, spec.groups, strict=True)]
            for of in sizes
        ]
        self.transfer = HeldTransfer(spec, self.arenas)
        limits = AdmissionLimits(
            chunk_tokens=CHUNK, reserve_tokens=2, load_back=LoadBackPolicy(threshold_tokens=1),
            reuse=True, steps_at_once=steps_at_once,
        )  # fmt: skip
        options = CacheOptions(limits=limits, snapshot_pages=1, tiers=TierOptions(sleep=self.work))
        self.pools = [[PoisonedPages(arena) for arena in of] for of in self.arenas]
        pools = self.pools
        self.tables = BlockTable(len(spec.groups), 3, -(-MOST // self.page) + 1, buffers)
        self.cache = KVCache(
            spec, (pools[0], pools[1]), self.tables, self.transfer, options, self.arenas[HOST]
        )
        self.waiting, self.running, self.asked = [], [], 0
        self.finished: list[list[int]] = []
        # Those who come after find these, and these prompts: of others no state came inside.
        self.states = any(group.stateful and not group.scratch for group in spec.groups)
        self.whole: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.seen = Counter()

    def work(self, seconds=0.0):
        del seconds
        self.transfer.end(self.draw.choice(list(Direction)))

    # -- what a page holds -----------------------------------------------------------------------

    def rows_of(self, tier, group, page):
        return self.arenas[tier][group].bytes[page].view(np.int64)

    def expected(self, tokens, index):
        """Rows of the page at ``index`` that ``tokens`` fill."""
        first = index * self.page
        return [value_of(tuple(tokens[: at + 1])) for at in range(first, len(tokens))][: self.page]

    def verify(self, group, page, tokens, index):
        assert page != NONE, f"no page {index} of {group.name}"
        if group.stateful:
            assert self.rows_of(DEVICE, group.id, page)[0] == value_of(tuple(tokens)), group.name
            return
        want = self.expected(tokens, index)
        assert self.rows_of(DEVICE, group.id, page)[: len(want)].tolist() == want, group.name

    def write(self, group, page, tokens, index, tier=DEVICE):
        if group.stateful:
            self.rows_of(DEVICE, group.id, page)[0] = value_of(tuple(tokens))
            return
        want = self.expected(tokens, index)
        self.rows_of(tier, group.id, page)[: len(want)] = want

    # -- requests come ---------------------------------------------------------------------------

    def submit(self):
        if len(self.waiting) > 2:
            return
        kind = self.draw.random()
        if kind < 0.15 and self.prompts:
            known = list(self.draw.choice(self.prompts))
        elif kind < 0.4 and self.finished:  # a conversation that goes on
            known = list(self.draw.choice(self.finished))[: MOST - 3]
            known += [self.draw.randrange(3)] * self.draw.choice((0, 0, 2))
        else:
            stem = self.draw.randrange(3)
            known = [stem] * self.draw.randrange(1, 9) + [
                self.draw.randrange(2) for _ in range(self.draw.randrange(5))
            ]
        use = CacheUse.ALL if self.draw.random() < 0.8 else CacheUse(self.draw.randrange(3))
        total = min(MOST, len(known) + self.draw.randrange(1, 7))
        one = Asked(f"{self.asked}", known, total, use, prompt=len(known))
        one.receives = self.draw.random() < 0.15
        self.asked += 1
        self.waiting.append(one)

    def asking(self, one):
        prefix = PageHasher(NAMESPACE, self.page)
        prefix.extend(np.array(one.known, np.int32))
        return AdmissionRequest(
            prefix=prefix, tokens=len(one.known), total_tokens=one.total, use=one.use,
            receives=one.receives, request=RequestId(one.name) if one.name[-1] in "02468" else None,
            priority=self.draw.randrange(3), again=one.retracted is not None,
        )  # fmt: skip

    def admit(self):
        """The first that waits."""
        if not self.waiting:
            return
        one, admission = self.waiting[0], self.cache.admission
        asked, taken = self.asking(one), self.tables.taken
        quiet = not self.cache.tiers.copies.backups
        match = admission.match(asked.prefix, asked.tokens)
        saved = one.retracted is not None and one.retracted in self.cache.retraction
        found = (
            admission.admit(asked) if one.retracted is None
            else admission.resume(one.retracted, asked)
        )  # fmt: skip
        if isinstance(found, Refusal):
            self.seen[found.name] += 1
            assert self.tables.taken == taken
            return
        del self.waiting[0]
        one.row, one.computed, one.tickets = found.row, found.computed, found.tickets
        self.running.append(one)
        if saved:
            self.seen["restored"] += 1
            assert one.computed == one.retracted.tokens
        else:
            self.check_cached(one, found, match, quiet=quiet)
        one.retracted = None
        if one.receives:
            self._reserve(one)

    def check_cached(self, one, found: Admission, match, *, quiet):
        """It stands on what a match found, or on as much as needs no load, and says so."""
        cached, page = found.cached, self.page
        assert cached.total == found.computed
        assert cached.use is one.use
        if CacheUse.READ not in one.use:
            assert found.computed == 0
            return
        if quiet:
            assert found.computed in {match.end * page, match.device_end * page}
            assert cached.device == min(found.computed, match.device_end * page)
        lease_end = found.computed // page
        starts = self.cache.tiers.tree.starts(lease_end)
        for group in self.spec.groups:
            of = cached.groups_device[group.id], cached.groups_host[group.id]
            assert min(of) >= 0
            if not one.receives:
                assert sum(of) == (lease_end - starts[group.id]) * page
        self.seen["loaded"] += cached.host > 0
        counters = self.cache.tiers.pools.counters
        if not counters.evicted_device_pages and not counters.snapshots_skipped:
            # Nothing has ever left: who goes on from what has ended finds all of it.
            best = last_end(len(one.known), self.page)
            for old in self.whole:
                if one.known[: len(old)] == old and best >= len(old) // self.page:
                    assert lease_end >= len(old) // self.page
                    self.seen["went on"] += 1
            if one.known in self.prompts:
                assert lease_end == best
                self.seen["came again"] += 1

    def _reserve(self, one):
        """Another engine computes it, and writes what it needs at the end of its prompt."""
        tokens, held = len(one.known), one.computed // self.page
        pages = self.cache.hand_off.reserve(one.row, tokens)
        assert pages.tokens == tokens
        rule = handed_over if CacheUse.STORE in one.use else needed
        for group in self.spec.groups:
            span = rule(group.retention, tokens, self.page)
            parts = [mine for mine in pages.groups if mine.group == group.id]
            first, count = parts[0].first, sum(len(mine.pages) for mine in parts)
            if group.stateful:
                assert (first, count) == (NONE, min(1, len(span)))
            else:
                held_here = max(span.start, min(held, span.stop))
                assert (first, count) == (held_here, span.stop - held_here)
            for mine in parts:
                for at, page in enumerate(mine.pages.tolist()):
                    self.write(group, page, one.known, mine.first + at, mine.tier)

    def receive(self):
        """What was sent has come."""
        for one in self.running:
            if one.receives:
                self._gate([one])
                self.cache.hand_off.received(one.row, np.array(one.known, np.int32))
                one.receives, one.computed_here, one.computed = False, False, len(one.known)
                self.cache.prefilled(one.row, one.computed, one.total)
                self.seen["received"] += 1
                return

    # -- they compute ----------------------------------------------------------------------------

    def step(self):
        rows = [one for one in self.running if not one.receives]
        if not rows:
            return
        plan = []
        for one in rows:
            end = len(one.known)
            if one.prefilled:
                one.known.append((sum(one.known) + len(one.known)) % 3)
                end = one.computed + 1
            cut = self.cache.cut(one.row)
            end = min(end, one.computed + CHUNK, cut or end)
            plan.append((one, one.computed, end))
        while not self.cache.fits(*self._ends(plan)):
            if self.cache.progress.wait():
                continue
            if len(plan) < 2:  # others receive: they will end
                assert any(one.receives for one in self.running), "who runs alone does not fit"
                self.receive()
                return
            one, *_ = plan.pop()
            self.retract_one(one)
        at, (starts, ends) = np.array([one.row for one, *_ in plan]), self._ends(plan)
        self.cache.extend(at, starts, ends)
        self._gate([one for one, *_ in plan])
        for one, start, end in plan:
            self.forward(one, start, end)
        gives = self.cache.hand_off.gives_state(at.astype(np.int32), ends)
        for (one, start, end), gave in zip(plan, gives.tolist(), strict=True):
            one.computed, whole = end, start < one.prompt <= end
            if end // self.page > start // self.page:
                self.cache.commit(one.row, np.array(one.known[:end], np.int32))
                self._gave(one, gave)
            if whole:
                if self.draw.random() < 0.2:
                    self.send(one)
                self.cache.prefilled(one.row, end, one.total)
            if end >= one.total:
                self.finish(one)

    def _ends(self, plan):
        return (
            np.array([start for _, start, _ in plan], np.int64),
            np.array([end for *_, end in plan], np.int64),
        )

    def _gate(self, some):
        tickets = [ticket for one in some for ticket in one.tickets]
        gate = self.cache.tiers.copies.flights.gate(tickets)
        if gate is not None:
            gate.wait(LayerId(0))
        for one in some:
            one.tickets = ()

    def forward(self, one, start, end):
        """Read what is needed at ``start``, and write tokens up to ``end``."""
        for group in self.spec.groups:
            span = needed(group.retention, start, self.page)
            if group.stateful:
                slots = self.tables.slots
                source = slots.source(group.id).item(one.row)
                if start:
                    self.verify(group, source, one.known[:start], 0)
                else:
                    assert source in (NONE, slots.own(group.id).item(one.row))
                self.write(group, slots.own(group.id).item(one.row), one.known[:end], 0)
                continue
            table = self.tables.pages(group.id)[one.row]
            for index in span:
                self.verify(group, table.item(index), one.known[:start], index)
            for index in range(start // self.page, -(-end // self.page)):
                assert table.item(index) != NONE
                self.write(group, table.item(index), one.known[:end], index)

    def _gave(self, one, gave):
        """A state that has gone to the tree was announced."""
        for group in self.spec.groups:
            if group.stateful and self.tables.slots.own(group.id).item(one.row) == NONE:
                assert gave, "a state went without notice"
                self.seen["gave a state"] += 1

    # -- they leave ------------------------------------------------------------------------------

    def finish(self, one):
        self.running.remove(one)
        if one.use is CacheUse.ALL:
            self.finished.append(one.known[: one.computed])
            if one.computed_here or not self.states:
                self.whole.append(one.known[: one.computed])
                self.prompts.append(one.known[: one.prompt])
        self.cache.release(one.row, np.array(one.known[: one.computed], np.int32))
        self.seen["finished"] += 1

    def send(self, one):
        """Another engine goes on: all that it needs, or the same prompt could hit there, lies where
        the cache says."""
        self._gate([one])
        tokens = one.known[: one.computed]
        pages = self.cache.hand_off.pages(one.row, len(tokens))
        for group, mine in zip(self.spec.groups, pages.groups, strict=True):
            span = handed_over(group.retention, len(tokens), self.page)
            assert len(mine.pages) == (min(1, len(span)) if group.stateful else len(span))
            for at, page in enumerate(mine.pages.tolist()):
                self.verify(group, page, tokens, span.start + at)
        self.seen["sent"] += 1

    def abort(self):
        if self.waiting and self.draw.random() < 0.3:
            one = self.waiting.pop(self.draw.randrange(len(self.waiting)))
            if one.retracted is not None:
                self.cache.retraction.forget(one.retracted)
            else:
                self.cache.admission.abandon(self.asking(one))
            return
        if not self.running:
            return
        one = self.running.pop(self.draw.randrange(len(self.running)))
        if one.receives or self.draw.random() < 0.4:
            self.cache.drop(one.row)
        else:  # also before its loads have ended
            self.cache.release(one.row, np.array(one.known[: one.computed], np.int32))

    def retract(self):
        some = [one for one in self.running if not one.receives]
        if some:
            self.retract_one(self.draw.choice(some))

    def retract_one(self, one):
        self.running.remove(one)
        del one.known[max(one.computed + 1, one.prompt) :]
        one.retracted = self.cache.retract(one.row, np.array(one.known[: one.computed], np.int32))
        self.seen["saved" if one.retracted in self.cache.retraction else "not saved"] += 1
        one.row, one.computed, one.tickets = NONE, 0, ()
        one.prompt = len(one.known)
        self.waiting.insert(0, one)

    # -- time ------------------------------------------------------------------------------------

    def tick(self):
        for way in Direction:
            for _ in range(self.draw.randrange(3)):
                self.transfer.end(way, ok=way is Direction.LOAD or self.draw.random() < 0.9)
        self.cache.progress.tick()

    def push_out(self):
        self.cache.progress.push_out(DEVICE)

    def check(self):
        self.cache.check()
        assert self.tables.taken == len(self.running)
        counters = self.cache.tiers.pools.counters
        assert counters.retracted == self.seen["saved"] + self.seen["not saved"]
        for pool in (pool for of in self.pools for pool in of):
            pool.check()

    def run(self, steps, moves):
        self.run_some(self.draw.choice(moves) for _ in range(steps))
        self.drain()

    def run_some(self, moves):
        for move in moves:
            getattr(self, move)()
            self.check()

    def drain(self):
        """All that was asked for ends, and nothing is left."""
        while self.waiting or self.running:
            self.receive()
            self.step()
            self.tick()
            self.cache.progress.settle()
            self.admit()
            self.check()
        self.cache.progress.settle()
        assert not len(self.cache.retraction)
        assert self.cache.progress.flush()
        self.check()
        assert all(pool.free == pool.total for pool in self.cache.tiers.pools.stats())
