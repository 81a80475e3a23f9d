"""Plays the cache's part around a prefix tree and holds every answer against the perfect model.

Owns the pools, the requests, the copies in flight and what bytes each page holds (named by the
prefix they belong to). Every verb does one thing to tree and model and compares; ``verify`` holds
the whole of both against each other. Must not know Hypothesis, so that directed tests use it too.
"""

from collections import Counter
from collections.abc import Sequence
from typing import assert_never

import numpy as np

from stratakv.core.ids import NONE, GroupId, NodeIds, PageIds, PageKey, TicketId
from stratakv.memory.allocator import PageAllocator
from stratakv.spec.groups import CacheSpec
from stratakv.testing.tree_model import DEVICE, HOST, Freed, Outcome, Place, Prefix, TreeModel
from stratakv.testing.tree_records import Copy, Fetch, Request, keys_of
from stratakv.testing.tree_verify import verify_nodes, verify_pools, verify_reads
from stratakv.tree.check import check
from stratakv.tree.effects import Backup, Effect, FreeDevice, FreeHost, Persist, Remap
from stratakv.tree.nodes import Tier
from stratakv.tree.prefix_tree import PrefixTree
from stratakv.tree.residency import Residency


class TreeDriver:
    def __init__(
        self, spec: CacheSpec, device_pages: Sequence[int], host_pages: Sequence[int]
    ) -> None:
        self.spec = spec
        self.tree = PrefixTree(spec, device_pages[0] + host_pages[0])
        self.model = TreeModel(spec)
        self.pools = [[PageAllocator(n) for n in tier] for tier in (device_pages, host_pages)]
        self.bytes: dict[Freed, Prefix] = {}
        self.requests: list[Request] = []
        self.fetches: list[Fetch] = []
        self.copies: list[Copy] = []
        self.did: Counter[str] = Counter()
        self._prefix_of: dict[PageKey, Prefix] = {}
        self._serial = 0

    # -- requests ------------------------------------------------------------------------------

    def keys(self, prompt: Prefix) -> list[PageKey]:
        keys = keys_of(prompt, self.spec.page_tokens)
        for index, key in enumerate(keys):
            self._prefix_of[key] = prompt[: index + 1]
        return keys

    def match(self, prompt: Prefix, limit: int) -> tuple[int, int, int]:
        """(device_end, end, anchor_end), equal in tree and model."""
        found = tuple(self.tree.match(self.keys(prompt), limit))
        expected = self.model.match(prompt, limit)
        assert found == expected, f"match {prompt} to {limit}: {found}, not {expected}"
        return expected

    def arrive(self, prompt: Prefix, limit: int, *, load: bool, decline: bool = False) -> Request:
        """Match and lease; ``load`` loads what is on the host alone unless the pools are short."""
        device_end, end, _ = self.match(prompt, limit)
        request = self._load(prompt, end, decline=decline) if load and end > device_end else None
        if request is None:
            device_end = self.match(prompt, limit)[0]  # room for a load may have cost some of it
            request = self._leased(prompt, device_end, load=load)
            self.did["device hit"] += device_end > 0
        tickets = {
            copy.ticket
            for copy in self.copies
            if copy.load
            for places in copy.places.values()
            if set(places) & set(self.model.places(prompt, request.lease.end))
        }
        assert set(request.lease.loading) == tickets, f"tickets {request.lease.loading}"
        for group in self.model.groups:
            pages = self.tree.pages(request.lease, GroupId(group)).tolist()
            indices = self.model.needed(group, request.lease.end)
            request.table.update({(group, i): p for i, p in zip(indices, pages, strict=True)})
        self.requests.append(request)
        return request

    def _leased(self, prompt: Prefix, end: int, *, load: bool) -> Request:
        self._serial += 1
        lease = self.tree.lease(self.keys(prompt), end, load=load)
        held = self.model.lease(self._serial, prompt, end, load=load)
        assert lease.needs_load == bool(held.on_host), "what a lease must load"
        return Request(self._serial, prompt, lease, continued=end)

    def _load(self, prompt: Prefix, end: int, *, decline: bool) -> Request | None:
        request = self._leased(prompt, end, load=True)
        on_host = self.model.leases[request.id].on_host
        rows = request.lease.host or []
        places = {group: self._places(rows[group], group) for group in self.model.groups}
        assert {p for found in places.values() for p in found} == on_host, "what a load reads"
        pages: list[PageIds] = []
        for group in self.model.groups:
            ids = None if decline else self.alloc(DEVICE, group, len(places[group]))
            if ids is None:
                for done, taken in enumerate(pages):
                    self.pools[DEVICE][done].free(taken)
                self.release(request)
                self.did["load declined"] += 1
                return None
            pages.append(ids)
        assert not [p for p in on_host if self.model.spot(p).state != Residency.HOST]
        ticket = self._submit(load=True, rows=dict(enumerate(rows)), places=places)
        self.tree.copies.begin_load(request.lease, pages, ticket)
        landing = {
            place: page
            for group in self.model.groups
            for place, page in zip(places[group], pages[group].tolist(), strict=True)
        }
        self.model.begin_load(request.id, landing)
        self.did["load"] += 1
        return request

    def extend(self, request: Request, count: int, *, generous: bool) -> bool:
        """Compute, insert and lease the next pages. ``generous``: give every group every page, not
        only what it needs at the new end. False where the pools are short."""
        first = request.lease.end
        prompt = request.prompt[: first + count]
        pages = self._chunk(DEVICE, prompt, first, generous=generous)
        if pages is None:
            self.did["extend short"] += 1
            return False
        keys = self.keys(prompt)
        given = [np.array(column, np.int32) for column in pages]
        effects = self.tree.insert(keys, first, given)
        expected = self.model.place(DEVICE, prompt, first, pages)
        for group, column in enumerate(pages):
            for at, page in enumerate(column, first):
                if page != NONE:
                    request.table[group, at] = page
                    kept = self.model.spot((prompt[: at + 1], group)).pages[DEVICE] == page
                    if not kept and (group, at) not in expected.remapped:
                        request.own.append((DEVICE, group, page))
        request.table.update(self._apply(effects, expected).remapped)
        self.tree.advance(request.lease, keys, len(prompt))
        self.model.advance(request.id, prompt, len(prompt))
        self.did["extend"] += 1
        self.did["duplicate"] += bool(expected.remapped)
        return True

    def keep(self, request: Request, end: int, continued: int) -> None:
        """Make ``end`` a checkpoint of a running request."""
        expected = self.model.keep(request.id, end, continued)
        self._apply(self.tree.keep(request.lease, end, continued), expected)

    def release(self, holder: Request | Fetch) -> None:
        self.tree.release(holder.lease)
        self.model.release(holder.id)

    def finish(self, request: Request) -> None:
        """Also an abort: checkpoints are the caller's choice before."""
        self.requests.remove(request)
        self.release(request)
        self._give_back(request.own)

    # -- tiers ---------------------------------------------------------------------------------

    def alloc(self, tier: Tier, group: int, count: int) -> PageIds | None:
        """Pages of a pool; where it is short, evict once, then give up."""
        pool = self.pools[tier][group]
        if pool.available() < count:
            self.evict(tier, group, count - pool.available())
        return pool.alloc(count)

    def _chunk(
        self, tier: Tier, prompt: Prefix, first: int, *, generous: bool
    ) -> list[list[int]] | None:
        """Pages with bytes for [first, len(prompt)), NONE where a group holds none."""
        chunk: list[list[int]] = []
        for group in self.model.groups:
            span = self.model.needed(group, len(prompt))
            given = [generous or at in span for at in range(first, len(prompt))]
            ids = self.alloc(tier, group, sum(given))
            if ids is None:
                self._give_back(
                    [(tier, g, p) for g, column in enumerate(chunk) for p in column if p != NONE]
                )
                return None
            pages = iter(ids.tolist())
            chunk.append([next(pages) if give else NONE for give in given])
            for at, page in enumerate(chunk[group], first):
                if page != NONE:
                    self.bytes[tier, group, page] = prompt[: at + 1]
        return chunk

    def evict(self, tier: Tier, group: int, count: int) -> int:
        """Evict, and hold order, cascades and progress against the model; pages taken."""
        effects = self.tree.evict(tier, GroupId(group), count)
        expected, taken = Outcome(), 0
        for effect in effects:
            if isinstance(effect, (FreeDevice, FreeHost)[tier]) and effect.group == group:
                taken += self._taken(tier, group, effect.pages.tolist(), expected)
        assert self.model.byteless or taken <= count, f"asked for {count}, took {taken}"
        left = self.model.candidates(tier, group) if taken < count else {}
        assert not left, f"took {taken} of {count} while {tier.name} {group} could give {left}"
        self._apply(effects, expected)
        self.did[f"evict {tier.name} {'anchor' if group == 0 else 'other'}"] += taken
        return taken

    def _taken(self, tier: Tier, group: int, pages: list[int], expected: Outcome) -> int:
        """One batch of one path, top first. A node above a leaf may go only after it."""
        owner = {spots[group].pages[tier]: p for p, spots in self.model.nodes.items()}
        ranks = self.model.candidates(tier, group)
        for page in reversed(pages):
            if (tier, group, page) in expected.freed:  # pruned together with what was taken
                continue
            prefix = owner[page]
            if group == 0:
                ranks = self.model.candidates(tier, group)
            assert prefix in ranks, f"{tier.name} page {page} of {prefix} must not leave"
            rank, least = ranks.pop(prefix), min(ranks.values(), default=1 << 62)
            assert rank <= least, f"{prefix} of rank {rank} left before rank {least}"
            self.model.take(tier, group, prefix, expected)
        return len(pages)

    def backup(self, tip: Prefix, group: int, count: int) -> bool:
        """Begin to copy up to ``count`` unsaved pages above ``tip``; host short: evict once."""
        wanted = len(self._unsaved(tip, group)[:count])
        ids = self.alloc(HOST, group, wanted)
        if ids is None or not wanted:
            self.did["backup dropped"] += ids is None
            return False
        # Making room may have cost host-only nodes of this very path, and what hangs on them.
        places = self._unsaved(tip[: self.model.reach(tip)], group)[: len(ids)]
        self.pools[HOST][group].free(ids[len(places) :])
        ids = ids[: len(places)]
        if not places:
            return False
        rows = np.array([self._row(prefix) for prefix, _ in places], np.intp)
        self._submit(load=False, rows={group: rows}, places={group: places})
        device = self.tree.copies.begin_backup(GroupId(group), rows, ids)
        assert device.tolist() == [self.model.spot(p).pages[DEVICE] for p in places]
        self.model.begin_backup(places, ids.tolist())
        self.did["backup"] += 1
        return True

    def _unsaved(self, tip: Prefix, group: int) -> list[Place]:
        if not tip:
            return []
        path = [(tip[: at + 1], group) for at in range(len(tip))]
        places = [p for p in path if self.model.spot(p).state == Residency.DEVICE]
        rows = self.tree.copies.unsaved(GroupId(group), self.tree.nodes.path(self._row(tip)))
        assert self._places(rows, group) == places, "what is unsaved"
        return places

    def _submit(
        self, *, load: bool, rows: dict[int, NodeIds], places: dict[int, list[Place]]
    ) -> TicketId:
        self._serial += 1
        self.copies.append(Copy(TicketId(self._serial), load, rows, places))
        return self.copies[-1].ticket

    def end_copy(self, copy: Copy, *, ok: bool) -> None:
        """A copy ends: bytes arrive where they went. Loads cannot fail."""
        self.copies.remove(copy)
        source, target = (HOST, DEVICE) if copy.load else (DEVICE, HOST)
        for group, places in copy.places.items():
            for place in places if ok or copy.load else ():
                pages = self.model.spot(place).pages
                self.bytes[target, group, pages[target]] = self.bytes[source, group, pages[source]]
            if copy.load and places:
                self.tree.copies.end_load(GroupId(group), copy.rows[group])
                self.model.end_load(places)
            elif places:
                effects = self.tree.copies.end_backup(GroupId(group), copy.rows[group], ok=ok)
                self._apply(effects, self.model.end_backup(places, ok=ok))
        self.did["load done" if copy.load else "backup done" if ok else "backup failed"] += 1

    def fetch(self, prompt: Prefix, *, generous: bool) -> bool:
        """Begin to read what follows the device match from storage."""
        request = self._leased(prompt, self.match(prompt, len(prompt))[0], load=False)
        first = request.lease.end
        pages = self._chunk(HOST, prompt, first, generous=generous)
        if pages is None or first == len(prompt):
            self.release(request)
            return False
        self.fetches.append(Fetch(request.id, prompt, request.lease, pages))
        return True

    def end_fetch(self, fetch: Fetch, *, landed: bool) -> None:
        self.fetches.remove(fetch)
        first = fetch.lease.end
        if landed:
            given = [np.array(column, np.int32) for column in fetch.pages]
            effects = self.tree.land(self.keys(fetch.prompt), first, given)
            self._apply(effects, self.model.place(HOST, fetch.prompt, first, fetch.pages))
        else:
            mine = [(HOST, g, p) for g, column in enumerate(fetch.pages) for p in column]
            self._give_back([page for page in mine if page[2] != NONE])
        self.release(fetch)
        self.did["fetch landed" if landed else "fetch abandoned"] += 1

    def drain(self) -> None:
        """End everything, drop everything: every page of every pool must come home."""
        for request in list(self.requests):
            self.finish(request)
        for copy in list(self.copies):
            self.end_copy(copy, ok=True)
        for fetch in list(self.fetches):
            self.end_fetch(fetch, landed=False)
        self.verify()
        for tier in Tier:
            self.evict(tier, 0, len(self.tree.nodes))
        self.verify()
        assert not len(self.tree.nodes), "an idle tree cannot be emptied"
        for pool in (pool for tier in self.pools for pool in tier):
            assert pool.available() == pool.capacity, "a page is lost"
        assert not self.bytes, "a page was freed that nobody reported"

    # -- comparing -----------------------------------------------------------------------------

    def _apply(self, effects: Sequence[Effect], expected: Outcome) -> Outcome:
        """Execute effects in order; together they must be exactly the expected ones."""
        found = Outcome()
        for effect in effects:
            match effect:
                case FreeDevice(group, pages) | FreeHost(group, pages):
                    tier = DEVICE if isinstance(effect, FreeDevice) else HOST
                    gone = [(tier, int(group), page) for page in pages.tolist()]
                    found.freed.update(gone)
                    self._give_back(gone)
                case Remap(group, indices, canonical):
                    at = [(int(group), index) for index in indices.tolist()]
                    early = [page for page in found.freed if page[1] == group]
                    assert not early, f"{early} were freed before the request was remapped"
                    found.remapped.update(zip(at, canonical.tolist(), strict=True))
                case Backup(group, rows):
                    found.backups[int(group)] = [p for p, _ in self._places(rows, group)]
                case Persist():
                    raise AssertionError("nobody asked to persist")
                case _:
                    assert_never(effect)
        assert found == expected, f"effects {found}, not {expected}"
        return found

    def _give_back(self, pages: Sequence[Freed]) -> None:
        for tier, group, page in pages:
            self.pools[tier][group].free(np.array([page], np.int32))
            self.bytes.pop((tier, group, page), None)

    def _row(self, prefix: Prefix) -> int:
        return self.tree.nodes.index[self.keys(prefix)[-1]]

    def _places(self, rows: NodeIds, group: int) -> list[Place]:
        prefix_at = {row: self._prefix_of[key] for key, row in self.tree.nodes.index.items()}
        return [(prefix_at[row], group) for row in rows.tolist()]

    def verify(self) -> None:
        """The tree's own check, then everything the model knows."""
        check(self.tree)
        rows = np.array([self._row(prefix) for prefix in self.model.nodes], np.intp)
        verify_nodes(self.tree, self.model, rows, self.bytes)
        counts = self.tree.pins.evictable
        assert counts == self.model.evictable(), f"evictable {counts}"
        verify_pools(self.pools, self.model, self.requests, self.fetches)
        for request in self.requests:
            verify_reads(request, self.model, self.bytes)
