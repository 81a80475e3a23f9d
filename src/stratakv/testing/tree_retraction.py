"""Retracts and resumes a tree driver's requests, as ``cache.retraction`` does.

Owns the requests that are off the device. Their live pages are only counted here: their bytes are
no business of the tree. Must not choose who is retracted.
"""

from collections.abc import Sequence

from stratakv.core.ids import PageIds
from stratakv.spec.retention import needed
from stratakv.testing.tree_books import HOST, PageAt
from stratakv.testing.tree_driver import TreeDriver
from stratakv.testing.tree_records import RetractedRequest, WalkRequest
from stratakv.tree.lease import HostHold


class RetractionDriver:
    """``retracted`` is whom it can resume; one whose host pages were lost is gone."""

    def __init__(self, it: TreeDriver) -> None:
        self._it = it
        self.retracted: list[RetractedRequest] = []
        it.when_lost(self._lost)

    def retract(self, request: WalkRequest, part: int) -> bool:
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
        it.did["retracted" if room else "retracted unsaved"] += 1
        return room

    def _starts(self, request: WalkRequest, tokens: int) -> list[int]:
        """A state of the request's own stands for the one that it began with."""
        page, end = self._it.spec.page_tokens, request.lease.end
        return [
            (end if group.id in request.live else request.lease.starts[group.id])
            if group.stateful
            else min(end, needed(group.retention, tokens, page).start)
            for group in self._it.spec.groups
        ]

    def _unsaved(self, request: WalkRequest, starts: Sequence[int]) -> dict[int, list[PageAt]]:
        tip = request.prompt[: request.lease.end]
        return {
            group: [p for p in self._it.unsaved(tip, group) if len(p[0]) > starts[group]]
            for group in self._it.model.groups
        }

    def _room(self, request: WalkRequest, starts: Sequence[int]) -> bool:
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

    def _save(self, request: WalkRequest, starts: list[int]) -> None:
        it, end = self._it, request.lease.end
        places = {group: mine for group, mine in self._unsaved(request, starts).items() if mine}
        ids: dict[int, PageIds] = {}
        for group, mine in places.items():
            pages = it.pools[HOST][group].alloc(len(mine))
            assert pages is not None, "room was made for it"
            ids[group] = pages
        if places:
            it.begin_backup(places, ids)
        serial = it.next_serial()
        hold = it.tree.leases.hold(it.keys(request.prompt), end, starts)
        it.model.hold(serial, request.prompt, end, starts)
        self.retracted.append(RetractedRequest(serial, request, hold, sorted(request.live)))

    def resume(self, retracted: RetractedRequest, *, decline: bool) -> WalkRequest | None:
        """Seat it where it was, with what is on the host alone under way. None where the device is
        short: it stays retracted, and what a load brings stays cached."""
        it, was, hold = self._it, retracted.request, retracted.hold
        claim = it.claim(was.prompt, hold.end, load=True, starts=hold.starts)
        again = it.load(claim, decline=decline)
        if again is None:
            it.did["resume short"] += 1
            return None
        if not it.go_live(again, retracted.live):
            it.release(again)
            it.did["resume short"] += 1
            return None
        self.forget(retracted)
        again.continued, again.rolling, again.part = was.continued, was.rolling, was.part
        it.admit(again)
        it.did["resumed"] += 1
        return again

    def forget(self, retracted: RetractedRequest) -> None:
        """It ends, has come back, or was lost."""
        self.retracted.remove(retracted)
        self._it.tree.leases.release(retracted.hold)
        self._it.model.release(retracted.id)

    def drain(self) -> None:
        """Nobody comes back, and everything ends."""
        for retracted in list(self.retracted):
            self.forget(retracted)
        self._it.drain()

    def _lost(self, places: Sequence[PageAt], ended: Sequence[HostHold]) -> None:
        for retracted in list(self.retracted):
            lost = retracted.hold in ended
            held = self._it.model.leases[retracted.id].on_host
            assert lost != held.isdisjoint(places), "who stands on lost pages"
            assert lost != self._it.tree.leases.is_open(retracted.hold), "a hold on lost pages"
            if lost:
                self.retracted.remove(retracted)
                self._it.model.release(retracted.id)
                self._it.did["hold lost"] += 1
