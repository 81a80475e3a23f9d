"""The cache machine with rows that may be spilled, whose reader is the production's buffer: beside
what a row's books say of every token, each selection is planned, copied and read.

The walk asserts after every move what a bounded buffer over host pages must be: each page of a row
lies on the host or on the device and never on both; host pages of a row are whole, and none is
there twice; what is on the host has its bytes; what a buffer's table names is there; the order is a
permutation of positions; pages of every pool are owned once or free, and nobody has written to one
that is free.
"""

import numpy as np

from stratakv.cache.records import CacheUse
from stratakv.core.ids import NONE
from stratakv.sparse.hot_buffer import HotBuffers, HotBufferShape
from stratakv.sparse.reads import device_rows
from tests.cache_machine import CHUNK, DEVICE, HOST, MOST, CacheMachine, value_of

TOP_K = 3


class SpillingMachine(CacheMachine):
    """``buffers``: pages of each group's buffer, by group."""

    def __init__(self, spec, seed, device, host, buffers, steps_at_once=1):
        super().__init__(spec, seed, device, host, steps_at_once, buffers)
        self.at_once = steps_at_once
        most = self.tables.max_pages * self.page
        self.hot = {
            group: HotBuffers(
                HotBufferShape(entries=pages * self.page, page_rows=self.page, top_k=TOP_K),
                1, self.tables.rows, most,
            )
            for group, pages in buffers.items()
        }  # fmt: skip
        self.times = {group: self.tables.spilled[group].times.copy() for group in buffers}

    def submit(self):
        """Some are so long that two of them fill a small host."""
        before = self.asked
        super().submit()
        if self.asked == before:
            return
        one = self.waiting[-1]
        if self.draw.random() < 0.5:
            longer = self.draw.randrange(8, MOST - 4)
            one.known += [self.draw.randrange(2) for _ in range(longer - len(one.known))]
            one.prompt = len(one.known)
            one.total = min(MOST, one.prompt + self.draw.randrange(2, 7))
        if self.cache.admission.refusal(one.total, one.use) is not None:
            one.use = CacheUse.ALL  # a longer one that is apart fits no device

    def admit(self):
        """Who comes in spilled has booked its buffer, the pages of what it computes at once, the
        one that is filling and the one that is being saved."""
        before, self.evicted = len(self.running), self._evicted()
        super().admit()
        if len(self.running) == before or not self.spilled(one := self.running[-1]):
            return
        left = 0 if one.receives else max(len(one.known) - one.computed, self.at_once)
        tokens = min(left, CHUNK * self.at_once) if left > 1 else self.at_once
        booked = dict(column for part in self.cache.beside for column in part.columns())
        for group in self.tables.spilled:
            pages = booked[f"booked of group {group}"].item(one.row)
            taken = bool(len(one.known) % self.page) if one.receives else 0
            want = -(-tokens // self.page) + 2 - taken
            assert pages == want, f"{one.name} has booked {pages} pages"
        self.seen["admitted spilled"] += 1
        self.seen["received on the host"] += one.receives

    def check_cached(self, one, found, match, *, quiet):
        """Or on nothing, where nobody runs and its prefix, which is on the device alone, leaves no
        room there."""
        if not found.computed and match.end > 0 and len(self.running) == 1:
            self.seen["computed again"] += 1
            return
        # An attempt that has failed may have evicted what the match saw.
        super().check_cached(one, found, match, quiet=quiet and self._evicted() == self.evicted)

    def _evicted(self):
        return self.cache.tiers.pools.counters.evicted_device_pages

    def retract_all(self):
        """Nobody runs, and what they keep fills the host."""
        for one in [one for one in self.running if not one.receives]:
            self.retract_one(one)

    def spilled(self, one):
        return any(one.row in places for places in self.tables.spilled.values())

    # -- what a spilled row reads ----------------------------------------------------------------

    def forward(self, one, start, end):
        for group, places in self.tables.spilled.items():
            if one.row in places:
                self._read_away(one, group, places, start)
        super().forward(one, start, end)

    def verify(self, group, page, tokens, index):
        """What lies on the host has been read there."""
        if page != NONE or not group.at_home_on_host:
            super().verify(group, page, tokens, index)

    def _read_away(self, one, group, places, start):
        if self.times[group][one.row] != places.times[one.row]:
            self.hot[group].clear(one.row)
            self.times[group][one.row] = places.times[one.row]
        table = self.tables.pages(group)[one.row]
        for index in range(-(-start // self.page)):
            assert (table.item(index) == NONE) != (places.host.item(one.row, index) == NONE)
        away = np.flatnonzero(places.host[one.row] != NONE)
        entries = (away[:, None] * self.page + np.arange(self.page)).ravel()
        if not len(entries):
            return
        self.seen["read on the host"] += 1
        drawn = self.draw.choices(entries.tolist(), k=TOP_K)
        selection = np.array([drawn], np.int32)
        at = np.array([one.row], np.int32)
        swap = self.hot[group].swap_in(0, at, selection)
        buffer = self.flat(DEVICE, group)
        rows = device_rows(swap.positions, places.buffer[at], self.page)[0]
        host = self.flat(HOST, group)
        for entry, to in zip(drawn, rows.tolist(), strict=True):
            if entry in swap.misses.entries:
                page = places.host.item(one.row, entry // self.page)
                buffer[to] = host[page * self.page + entry % self.page]
        found = [value_of(tuple(one.known[: entry + 1])) for entry in drawn]
        assert buffer[rows].tolist() == found, f"group {group} of {one.name}"
        self.seen["hits"] += len(set(drawn)) - len(swap.misses)
        self.seen["misses"] += len(swap.misses)

    def flat(self, tier, group):
        """All rows of a pool, one after the other."""
        return self.arenas[tier][group].bytes.reshape(-1).view(np.int64)

    # -- they leave ------------------------------------------------------------------------------

    def send(self, one):
        """Who is spilled is not sent: what it reads is not all on the device."""
        if not self.spilled(one):
            super().send(one)

    def retract_one(self, one):
        self.seen["spilled, retracted"] += self.spilled(one)
        super().retract_one(one)

    def abort(self):
        before = [one for one in self.running if self.spilled(one)]
        super().abort()
        self.seen["spilled, aborted"] += any(one not in self.running for one in before)

    # -- what holds after every move -------------------------------------------------------------

    def check(self):
        super().check()
        for group, places in self.tables.spilled.items():
            for one in self.running:
                if one.row in places:
                    self._check_row(one, group, places)
                else:
                    assert (places.host[one.row] == NONE).all()
        self.seen["spilled"] += self.cache.tiers.pools.counters.spilled
        self.seen["near"] += any(self.spilled(one) for one in self.running)

    def _check_row(self, one, group, places):
        table, host = self.tables.pages(group)[one.row], places.host[one.row]
        away = np.flatnonzero(host != NONE)
        assert len(set(host[away].tolist())) == len(away), "a host page twice"
        assert (table[away] == NONE).all(), "a page in two places"
        rows = self.flat(HOST, group)
        there = len(one.known) if one.receives else one.computed
        for index in away.tolist():
            assert (index + 1) * self.page <= there, "a page that is not whole"
            want = self.expected(one.known[:there], index)
            assert rows[host[index] * self.page :][: self.page].tolist() == want
        if self.times[group][one.row] != places.times[one.row]:
            return  # what is in its buffer was somebody else's
        hot = self.hot[group]
        assert sorted(hot.lru[0, one.row].tolist()) == list(range(hot.shape.entries))
        named = np.flatnonzero(hot.resident[0, one.row] != NONE)
        entries = hot.resident[0, one.row, named].tolist()
        assert len(set(entries)) == len(entries), "an entry twice"
        at = device_rows(named[None].astype(np.int32), places.buffer[[one.row]], self.page)[0]
        found = [value_of(tuple(one.known[: entry + 1])) for entry in entries]
        assert self.flat(DEVICE, group)[at].tolist() == found
