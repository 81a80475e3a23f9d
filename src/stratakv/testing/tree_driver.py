"""Plays the cache's part around a prefix tree and holds every answer against the perfect model.

Owns the requests and the fetches, on the tiers below. ``verify`` holds the whole of tree and model
against each other. Must not know Hypothesis, so that directed tests use it too.
"""

from collections.abc import Sequence
from typing import assert_never

import numpy as np

from stratakv.core.ids import NONE, GroupId, PageIds
from stratakv.spec.groups import CacheSpec
from stratakv.testing.tree_books import DEVICE, HOST, Prefix
from stratakv.testing.tree_chunks import ChunkDriver, pages_of
from stratakv.testing.tree_records import Claim, WalkFetch, WalkPrefetch, WalkRequest
from stratakv.testing.tree_verify import (
    verify_leases,
    verify_nodes,
    verify_pools,
    verify_reads,
    verify_spilled,
    verify_store,
)
from stratakv.tree.check import check
from stratakv.tree.lease import DeviceLease, LoadLease
from stratakv.tree.nodes import Tier
from stratakv.tree.residency import Residency


class TreeDriver(ChunkDriver):
    """Requests carry a page of their own for every state that they did not leave in the tree."""

    def __init__(
        self,
        spec: CacheSpec,
        device_pages: Sequence[int],
        host_pages: Sequence[int],
        policy: str = "lru",
    ) -> None:
        super().__init__(spec, device_pages, host_pages, policy)
        self.requests: list[WalkRequest] = []
        self.apart: list[WalkRequest] = []  # they go on beyond their leases
        self.fetches: list[WalkFetch] = []
        self.prefetches: list[WalkPrefetch] = []

    # -- requests ------------------------------------------------------------------------------

    def match(self, prompt: Prefix, limit: int) -> tuple[int, int, int]:
        """(device_end, end, anchor_end), equal in tree and model."""
        found = tuple(self.tree.match(self.keys(prompt), limit))
        expected = self.model.match(prompt, limit)
        assert found == expected, f"match {prompt} to {limit}: {found}, not {expected}"
        return expected

    def arrive(
        self,
        prompt: Prefix,
        limit: int,
        *,
        load: bool,
        decline: bool = False,
        spill: bool = False,
    ) -> WalkRequest:
        """Match and lease; ``load`` loads what is on the host alone unless the pools are short.
        ``spill``: but for what is read there."""
        device_end, end, _ = self.match(prompt, limit)
        request = None
        if load and end > device_end:
            claim = self.claim(prompt, end, load=True, spill=spill)
            request = self.load(claim, decline=decline)
        if request is None:
            device_end = self.match(prompt, limit)[0]  # room for a load may have cost some of it
            claim = self.claim(prompt, device_end, load=load, spill=spill)
            request = self.load(claim, decline=False)
            assert request is not None, "what is on the device needs no load"
            self.did["device hit"] += device_end > 0
        self.admit(request)
        return request

    def claim(
        self,
        prompt: Prefix,
        end: int,
        *,
        load: bool,
        starts: Sequence[int] | None = None,
        spill: bool = False,
    ) -> Claim:
        """A lease on [starts[g], ``end``) of every group, after its price."""
        serial, keys = self.next_serial(), self.keys(prompt)
        first = self.tree.starts(end) if starts is None else starts
        prices = [self.tree.leases.price(keys, end, first, group.id) for group in self.spec.groups]
        expected = self.model.prices(prompt, end, first)
        assert prices == expected, f"prices {prices}, not {expected}"
        for group in self.tree.spilled.groups:
            price = self.tree.spilled.price(keys, end, group)
            right = self.model.spilled_price(prompt, end, group)
            assert price == right, f"spilled at {price}, not {right}"
        take = self.tree.leases.take_to_load if load else self.tree.leases.take
        lease = take(keys, end, starts=starts, priority=serial % 4, spill=spill)
        held = self.model.lease(serial, prompt, end, load=load, starts=starts, spill=spill)
        assert isinstance(lease, LoadLease) == bool(held.on_host), "what a lease must load"
        return Claim(serial, prompt, lease)

    def load(self, claim: Claim, *, decline: bool) -> WalkRequest | None:
        """Begin the load that a lease plans, if it plans one; None, and it is released, where the
        device is short."""
        match claim.lease:
            case DeviceLease():
                lease = claim.lease
            case LoadLease():
                found = self._load(claim, claim.lease, decline=decline)
                if found is None:
                    return None
                lease = found
            case _:
                assert_never(claim.lease)
        return WalkRequest(claim.id, claim.prompt, lease, continued=lease.end)

    def _load(self, claim: Claim, lease: LoadLease, *, decline: bool) -> DeviceLease | None:
        on_host = self.model.leases[claim.id].on_host
        rows = lease.host
        places = {group: self.places_of(rows[group], group) for group in self.model.groups}
        assert {p for found in places.values() for p in found} == on_host, "what a load reads"
        pages: list[PageIds] = []
        for group in self.model.groups:
            ids = None if decline else self.alloc(DEVICE, group, len(places[group]))
            if ids is None:
                for done, taken in enumerate(pages):
                    self.pools[DEVICE][done].free(taken)
                self.release(claim)
                self.did["load declined"] += 1
                return None
            pages.append(ids)
        assert not [p for p in on_host if self.model.spot(p).state != Residency.HOST]
        ticket = self.submit(load=True, rows=dict(enumerate(rows)), places=places)
        moved = self.tree.leases.begin_load(lease, pages, ticket)
        landing = {
            place: page
            for group in self.model.groups
            for place, page in zip(places[group], pages[group].tolist(), strict=True)
        }
        self.model.begin_load(claim.id, landing)
        self.did["load"] += 1
        return moved

    def admit(self, request: WalkRequest) -> None:
        """It runs from now on: what it reads, and what it waits for."""
        places = self.model.leases[request.id].places()
        loads = [copy for copy in self.copies if copy.load]
        tickets = {c.ticket for c in loads for at in c.places.values() if set(at) & set(places)}
        assert set(request.lease.loading) == tickets, f"tickets {request.lease.loading}"
        for group, start in enumerate(request.lease.starts):
            pages = self.tree.leases.pages(request.lease, GroupId(group)).tolist()
            request.table.update({(group, at): page for at, page in enumerate(pages, start)})
        self.requests.append(request)

    def extend(
        self,
        request: WalkRequest,
        count: int,
        *,
        generous: bool,
        state: bool = True,
        received: bool = False,
    ) -> bool:
        """Compute, insert and lease the next pages. ``generous``: give every group every page, not
        only what it needs at the new end. ``state``: give the state at the new end too; without
        it a page of the request's own stands for it. ``received``: another engine has written what
        is at home on the host there. False where the pools are short."""
        first = request.lease.end
        prompt = request.prompt[: first + count]
        live = state or self.go_live(request, self.stateful)
        away = self.model.homes if received else set[int]()
        taken = self.taken(prompt, first, away, generous=generous, state=state) if live else None
        if taken is None:
            self.did["extend short"] += 1
            return False
        pages, host = taken
        keys = self.keys(prompt)
        given = [np.array(column, np.int32) for column in pages]
        done = self.tree.insert(keys, first, given)
        expected = self.model.place(DEVICE, prompt, first, pages)
        for group, column in enumerate(pages):
            for at, page in enumerate(column, first):
                if page != NONE:
                    request.table[group, at] = page
                    kept = self.model.spot((prompt[: at + 1], group)).pages[DEVICE] == page
                    if not kept and (group, at) not in expected.remapped:
                        request.own.append((DEVICE, group, page))
        request.table.update(self.apply(done.effects, expected, done.remaps).remapped)
        if received:
            came = self.tree.adopt_saved(keys, first, [np.array(of, np.int32) for of in host])
            self.apply(came, self.model.adopt_saved(prompt, first, host))
        self.tree.leases.advance(request.lease, keys, len(prompt), received=received)
        self.model.advance(request.id, prompt, len(prompt), received=received)
        if received:
            self._reread(request)
        starts = request.lease.starts
        request.table = {at: p for at, p in request.table.items() if at[1] >= starts[at[0]]}
        for group, page in request.live.items():
            self.bytes[DEVICE, group, page] = prompt
        request.part = 0
        if first == request.continued:
            self.branch(request)
        self.did["extend"] += 1
        self.did["extend without state"] += not state and bool(self.stateful)
        self.did["duplicate"] += bool(expected.remapped)
        return True

    def _reread(self, request: WalkRequest) -> None:
        """Of what is at home on the host it reads what its lease says."""
        for group in self.tree.spilled.groups:
            pages = self.tree.leases.pages(request.lease, group).tolist()
            request.table.update({(group, at): page for at, page in enumerate(pages)})

    def go_live(self, request: WalkRequest, groups: Sequence[int]) -> bool:
        """Take a page for each state of ``groups`` that the request has none for; all or none."""
        taken: dict[int, int] = {}
        for group in groups:
            if group in request.live:
                continue
            ids = self.alloc(DEVICE, group, 1)
            if ids is None:
                self.give_back([(DEVICE, g, page) for g, page in taken.items()])
                return False
            taken[group] = ids.item(0)
        self._own(request, taken)
        return True

    def _own(self, request: WalkRequest, live: dict[int, int]) -> None:
        request.live.update(live)
        request.own += [(DEVICE, group, page) for group, page in live.items()]
        for group, page in live.items():
            self.bytes[DEVICE, group, page] = request.prompt[: request.lease.end]

    def snapshot(self, request: WalkRequest) -> bool:
        """Give the tree the states at the lease's end, at a node that it has already, and go on
        with fresh pages. False where there is nothing to give, or no page to go on with."""
        end = request.lease.end
        prompt = request.prompt[:end]
        keys = self.keys(prompt)
        given = {
            group: page
            for group, page in request.live.items()
            if self.tree.starts(end)[group] < end and not self.tree.holds(keys[-1], GroupId(group))
        }
        if not given:
            return False
        for group in given:
            del request.live[group]
        if not self.go_live(request, list(given)):
            request.live.update(given)
            return False
        at = end - 1
        pages = [[request.table.get((group, at), NONE)] for group in self.model.groups]
        for group, page in given.items():
            pages[group] = [page]
            request.own.remove((DEVICE, group, page))
        expected = self.model.place(DEVICE, prompt, at, pages)
        done = self.tree.insert(keys, at, [np.array(column, np.int32) for column in pages])
        request.own = [page for page in request.own if page not in expected.freed]
        request.table.update(self.apply(done.effects, expected, done.remaps).remapped)
        self.did["late snapshot"] += 1
        return True

    def keep(self, request: WalkRequest, end: int, continued: int, instead_of: int = 0) -> None:
        """Make ``end`` a checkpoint of a running request."""
        expected = self.model.keep(request.id, end, continued, instead_of)
        self.apply(self.tree.checkpoints.keep(request.lease, end, continued, instead_of), expected)

    def branch(self, request: WalkRequest) -> None:
        """It has computed the first pages after what it continued."""
        effects = self.tree.checkpoints.branch(request.lease, request.continued)
        self.apply(effects, self.model.branch(request.id, request.continued))

    def pave(self, request: WalkRequest, end: int, every: int = 0) -> None:
        """Make ``end`` a milestone of a running request, if that is within its lease; then clear
        each ``every``-th milestone of its path, if any."""
        if 0 < end <= request.lease.end:
            effects = self.tree.checkpoints.pave(request.lease, end)
            self.apply(effects, self.model.pave(request.id, end))
            self.did["milestone"] += 1
        ends = self.model.milestones_of(request.id)[::every] if every else []
        self.tree.checkpoints.clear(request.lease, ends)
        self.model.clear(request.id, ends)
        self.did["milestone cleared"] += len(ends)

    def roll(self, request: WalkRequest) -> None:
        """Make the lease's end a checkpoint, which the next one takes the place of."""
        end, before = request.lease.end, request.rolling
        self.keep(request, end, request.continued, before)
        request.rolling = end
        self.did["rolling checkpoint"] += 0 < before < end

    def release(self, holder: Claim | WalkRequest | WalkFetch) -> None:
        self.tree.leases.release(holder.lease)
        self.model.release(holder.id)

    def go_apart(self, request: WalkRequest, beyond: int) -> None:
        """It goes on alone from now on, and has got ``beyond`` pages further than its lease."""
        self.requests.remove(request)
        self.apart.append(request)
        self.did["apart"] += 1
        end = request.lease.end + beyond
        self.tree.leases.let_go(request.lease, self.tree.starts(end))
        self.model.let_go(request.id, end)
        starts = request.lease.starts
        request.table = {at: p for at, p in request.table.items() if at[1] >= starts[at[0]]}

    def finish(self, request: WalkRequest) -> None:
        """Also an abort: checkpoints are the caller's choice before."""
        (self.requests if request in self.requests else self.apart).remove(request)
        self.release(request)
        self.give_back(request.own)

    # -- storage -------------------------------------------------------------------------------

    def fetch(self, prompt: Prefix, *, generous: bool) -> bool:
        """Begin to read what follows the device match from storage."""
        request = self.load(
            self.claim(prompt, self.match(prompt, len(prompt))[0], load=False), decline=False
        )
        assert request is not None, "what is on the device needs no load"
        first = request.lease.end
        pages = self.chunk(HOST, prompt, first, generous=generous)
        if pages is None or first == len(prompt):
            self.release(request)
            return False
        self.fetches.append(WalkFetch(request.id, prompt, request.lease, pages))
        return True

    def end_fetch(self, fetch: WalkFetch, *, landed: bool) -> None:
        self.fetches.remove(fetch)
        first = fetch.lease.end
        if landed:
            given = [np.array(column, np.int32) for column in fetch.pages]
            effects = self.tree.land(self.keys(fetch.prompt), first, given)
            self.apply(effects, self.model.place(HOST, fetch.prompt, first, fetch.pages))
        else:
            self.give_back(pages_of(HOST, fetch.pages))
        self.release(fetch)
        self.did["fetch landed" if landed else "fetch abandoned"] += 1

    # -- everything ----------------------------------------------------------------------------

    def drain(self) -> None:
        """End everything, drop everything: every page of every pool must come home."""
        for request in [*self.requests, *self.apart]:
            self.finish(request)
        for copy in list(self.copies):
            self.end_copy(copy, ok=True)
        for fetch in list(self.fetches):
            self.end_fetch(fetch, landed=False)
        self.verify()
        for tier in Tier:
            self.evict(tier, 0, len(self.tree))
        self.verify()
        assert not len(self.tree), "an idle tree cannot be emptied"
        for pool in (pool for tier in self.pools for pool in tier):
            assert pool.available() == pool.capacity, "a page is lost"
        assert not self.bytes, "a page was freed that nobody reported"

    def verify(self) -> None:
        """The tree's own check, then everything the model knows."""
        check(self.tree)
        rows = np.array([self.row(prefix) for prefix in self.model.nodes], np.intp)
        verify_nodes(self.tree, self.model, rows, self.bytes)
        counts = self.tree.internals.pins.evictable
        assert counts == self.model.evictable(), f"evictable {counts}"
        requests = [*self.requests, *self.apart]
        verify_leases(self.tree, self.model, rows, requests)
        verify_pools(self.pools, self.model, requests, [*self.fetches, *self.prefetches])
        verify_store(self.tree, self.model)
        for request in requests:
            verify_reads(request, self.model, self.bytes)
        verify_spilled(self.tree, self.model, requests)
