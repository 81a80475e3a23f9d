"""Retracts and resumes a tree driver's requests, as ``cache.parking`` does.

Owns the requests that are off the device. Their live pages are only counted here: their bytes are
no business of the tree. Must not choose who is retracted.
"""

from collections.abc import Sequence

from stratakv.core.ids import PageIds
from stratakv.spec.retention import needed
from stratakv.testing.tree_books import HOST, Place
from stratakv.testing.tree_driver import TreeDriver
from stratakv.testing.tree_records import Parked, Request
from stratakv.tree.lease import HostHold


class ParkingDriver:
    """``parked`` is whom it can resume; one whose host pages were lost is gone."""

    def __init__(self, it: TreeDriver) -> None:
        self._it = it
        self.parked: list[Parked] = []
        it.on_lost = self._lost

    def park(self, request: Request, part: int) -> bool:
        """Save what ``request`` needs to go on ``part`` tokens behind its lease's end, less than a
        page; hold that on the host alone and let go of the device. False where the host has no
        room: then it is only ended."""
        it, end = self._it, request.lease.end
        if it.go_live(request, [g.id for g in it.spec.groups if g.stateful] if part else []):
            request.part = max(request.part, part)
        starts = self._starts(request, end * it.spec.page_tokens + request.part)
        room = end + request.part > 0 and self._room(request, starts)
        if room:
            self._save(request, starts)
        it.finish(request)
        it.did["parked" if room else "retracted unsaved"] += 1
        return room

    def _starts(self, request: Request, tokens: int) -> list[int]:
        """A state of the request's own stands for the one that it began with."""
        page, end = self._it.spec.page_tokens, request.lease.end
        return [
            (end if group.id in request.live else request.lease.starts[group.id])
            if group.stateful
            else min(end, needed(group.retention, tokens, page).start)
            for group in self._it.spec.groups
        ]

    def _unsaved(self, request: Request, starts: Sequence[int]) -> dict[int, list[Place]]:
        tip = request.prompt[: request.lease.end]
        return {
            group: [p for p in self._it.unsaved(tip, group) if len(p[0]) > starts[group]]
            for group in self._it.model.groups
        }

    def _room(self, request: Request, starts: Sequence[int]) -> bool:
        """Making room may cost some of its own pages their host copy, so it looks again."""
        pools = self._it.pools[HOST]
        for _ in range(3):
            wanted = {g: len(places) for g, places in self._unsaved(request, starts).items()}
            short = {g: n - pools[g].available() for g, n in wanted.items()}
            if max(short.values()) <= 0:
                return True
            for group, count in short.items():
                if count > 0 and self._it.evict(HOST, group, count) < count:
                    return False
        return False

    def _save(self, request: Request, starts: list[int]) -> None:
        it, end = self._it, request.lease.end
        places = {group: mine for group, mine in self._unsaved(request, starts).items() if mine}
        ids: dict[int, PageIds] = {}
        for group, mine in places.items():
            pages = it.pools[HOST][group].alloc(len(mine))
            assert pages is not None, "room was made for it"
            ids[group] = pages
        if places:
            it.begin_backup(places, ids)
        it.serial += 1
        hold = it.tree.leases.hold(it.keys(request.prompt), end, starts)
        it.model.hold(it.serial, request.prompt, end, starts)
        self.parked.append(Parked(it.serial, request, hold, sorted(request.live)))

    def resume(self, parked: Parked, *, decline: bool) -> Request | None:
        """Seat it where it was, with what is on the host alone under way. None where the device is
        short: it stays parked, and what a load brings stays cached."""
        it, was, hold = self._it, parked.request, parked.hold
        claim = it.claim(was.prompt, hold.end, load=True, starts=hold.starts)
        again = it.load(claim, decline=decline)
        if again is None:
            it.did["resume short"] += 1
            return None
        if not it.go_live(again, parked.live):
            it.release(again)
            it.did["resume short"] += 1
            return None
        self.forget(parked)
        again.continued, again.rolling, again.part = was.continued, was.rolling, was.part
        it.seat(again)
        it.did["resumed"] += 1
        return again

    def forget(self, parked: Parked) -> None:
        """It ends, has come back, or was lost."""
        self.parked.remove(parked)
        self._it.tree.leases.release(parked.hold)
        self._it.model.release(parked.id)

    def drain(self) -> None:
        """Nobody comes back, and everything ends."""
        for parked in list(self.parked):
            self.forget(parked)
        self._it.drain()

    def _lost(self, places: Sequence[Place], ended: Sequence[HostHold]) -> None:
        for parked in list(self.parked):
            lost = parked.hold in ended
            held = self._it.model.leases[parked.id].on_host
            assert lost != held.isdisjoint(places), "who stands on lost pages"
            assert lost != self._it.tree.leases.is_open(parked.hold), "a hold on lost pages"
            if lost:
                self.parked.remove(parked)
                self._it.model.release(parked.id)
                self._it.did["hold lost"] += 1
