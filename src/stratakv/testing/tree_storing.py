"""Gives a tree driver a store below the host: writes, prefetches and uses, as ``cache`` does.

Owns the writes and prefetches under way and the holds of what has landed. No object is kept here:
whether the store has a page is the caller's word. Must not choose what happens.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from stratakv.core.ids import NONE, GroupId, NodeIds
from stratakv.testing.tree_books import DEVICE, HOST, PageAt, Prefix
from stratakv.testing.tree_driver import TreeDriver
from stratakv.testing.tree_records import WalkPrefetch, WalkRequest, Written
from stratakv.tree.effects import Persist
from stratakv.tree.lease import DeviceLease, HostHold
from stratakv.tree.stored import TOUCH_STEPS

MOST_WRITES: Final = 3
"""More would pin all of so small a host."""


class StoringDriver:
    """``job_pages``: the most pages of one write; longer wishes are cut. ``step`` is the cache's
    count of steps."""

    def __init__(self, it: TreeDriver) -> None:
        self.writes: list[Written] = []
        self.landed: list[WalkPrefetch] = []
        self.job_pages = 3
        self.step = 0
        self._it = it
        it.when_persisted(self.want)

    # -- attach and detach ---------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return self._it.model.store.active

    def start(self) -> None:
        """Another store: nothing is known to be in it."""
        self.forget()
        self._it.model.store.open()
        self._it.tree.stored.open()

    def stop(self) -> None:
        """From now on nothing new is written; what is under way goes on."""
        self._it.model.store.close()
        self._it.tree.stored.close()

    def forget(self) -> None:
        self._it.tree.stored.forget()
        self._it.model.store.forget()

    # -- writing -------------------------------------------------------------------------------

    def want(self, effect: Persist) -> None:
        for at in range(0, len(effect.nodes), self.job_pages):
            self._begin(effect.group, effect.nodes[at : at + self.job_pages])
        while len(self.writes) > MOST_WRITES:
            self.end_write(self.writes[0], [True] * len(self.writes[0].writing.rows))

    def _begin(self, group: GroupId, rows: NodeIds) -> None:
        it = self._it
        serial = it.next_serial()
        it.model.tick()
        self.writes.append(Written(serial, it.tree.stored.begin(group, rows)))
        it.model.store.begin(serial, it.places_of(rows, group), it.model.clock)
        it.did["persist"] += 1

    def end_write(self, write: Written, kept: Sequence[bool]) -> None:
        self.writes.remove(write)
        self._it.tree.stored.end(write.writing, np.array(kept, np.bool_))
        self._it.model.store.end(write.id, kept)
        self._it.did["stored" if all(kept) else "store failed"] += 1

    # -- use -----------------------------------------------------------------------------------

    def use(self, request: WalkRequest) -> None:
        """A request stands on its lease: what storage lacks of it is written, the rest touched."""
        it, store, lease = self._it, self._it.model.store, request.lease
        prompt = request.prompt[: lease.end]
        for effect in it.tree.stored.unstored(lease):
            places = [(prompt[: at + 1], int(effect.group)) for at in range(len(prompt))]
            found = it.places_of(effect.nodes, effect.group)
            assert found == store.worthy(places), f"unstored {found}"
            self.want(effect)
            it.did["healed"] += 1
        every = [
            (prompt[: at + 1], group) for at in range(len(prompt)) for group in it.model.groups
        ]
        assert not store.worthy(every), "a use leaves a page behind that storage lacks"
        self._touch(lease, prompt)

    def _touch(self, lease: DeviceLease, prompt: Prefix) -> None:
        it, store = self._it, self._it.model.store
        it.model.tick()
        touched: list[PageAt] = []
        for group, rows in it.tree.stored.to_touch(lease, self.step):
            touched += it.places_of(rows, group)
        on_path = {place for place in store.marked if prompt[: len(place[0])] == place[0]}
        with_bytes = {place for place in on_path if it.spec.groups[place[1]].page_bytes}
        assert len(set(touched)) == len(touched), "touched a page twice"
        assert set(touched) <= with_bytes, f"touched {touched}, of which storage has {with_bytes}"
        store.touched.update((place, it.model.clock) for place in touched)
        ages = sorted((len(prefix), -store.touched[prefix, group]) for prefix, group in with_bytes)
        for (above, older), (below, newer) in pairwise(ages if self.active else ()):
            assert older <= newer or above == below, f"{ages}: a parent looks older than its child"
        self.step += 1 + TOUCH_STEPS * (it.model.clock % 3) // 2
        it.did["touched"] += bool(touched)

    # -- prefetch ------------------------------------------------------------------------------

    def _hold(self, prompt: Prefix, starts: Sequence[int]) -> tuple[int, HostHold]:
        """Of what is in the tree of ``prompt``."""
        it = self._it
        serial = it.next_serial()
        end = it.model.reach(prompt)
        hold = it.tree.leases.hold_present(it.keys(prompt), end, starts)
        held = it.model.store.hold(prompt[:end], starts)
        it.model.leases[serial] = held
        assert (hold.end, hold.starts) == (held.end, held.starts), f"{hold}, not {held}"
        for group, rows in enumerate(hold.host):
            expected = {place for place in held.on_host if place[1] == group}
            assert set(it.places_of(rows, group)) == expected, f"what is held of group {group}"
        it.did["hold short"] += hold.end < end
        return serial, hold

    def prefetch(self, prompt: Prefix) -> bool:
        """Hold what the host has of ``prompt`` and begin to read all that it lacks; False where it
        lacks nothing, or the host has no room."""
        it, end = self._it, len(prompt)
        number, hold = self._hold(prompt, [0] * len(it.model.groups))
        have = it.model.leases[number].on_host
        lacking = [
            [at for at in it.model.needed(group, end) if (prompt[: at + 1], group) not in have]
            for group in it.model.groups
        ]
        first = min((pages[0] for pages in lacking if pages), default=end)
        mine = WalkPrefetch(number, prompt, hold, first, [[] for _ in lacking])
        it.prefetches.append(mine)
        for group, pages in enumerate(lacking):
            ids = it.alloc(HOST, group, len(pages))
            if ids is None:
                self._abandon(mine)
                return False
            at = dict(zip(pages, ids.tolist(), strict=True))
            mine.pages[group] = [at.get(index, NONE) for index in range(first, end)]
            it.bytes.update({(HOST, group, page): prompt[: i + 1] for i, page in at.items()})
        if first == end:
            self._abandon(mine)
        return first < end

    def _abandon(self, fetch: WalkPrefetch) -> None:
        it = self._it
        it.prefetches.remove(fetch)
        mine = [(HOST, group, page) for group, column in enumerate(fetch.pages) for page in column]
        it.give_back([page for page in mine if page[2] != NONE])
        self._release(fetch)
        it.did["prefetch abandoned"] += 1

    def _release(self, fetch: WalkPrefetch) -> None:
        self._it.tree.leases.release(fetch.hold)
        self._it.model.release(fetch.id)

    def end_prefetch(self, fetch: WalkPrefetch, arrived: int) -> None:
        """Its first ``arrived`` pages have come: hand the largest usable end to the tree, hold that
        as far as it can be held, and give the rest back."""
        it, prompt = self._it, fetch.prompt
        end = self._usable(fetch, min(fetch.first + arrived, len(prompt)))
        if end <= fetch.first:
            self._abandon(fetch)
            return
        first, spare = fetch.first, []
        kept = [list[int]() for _ in fetch.pages]
        for group, column in enumerate(fetch.pages):
            span = it.model.needed(group, end)
            for at, page in enumerate(column, first):
                if at < end:
                    kept[group].append(page if at in span else NONE)
                if page != NONE and at not in span:
                    spare.append((HOST, group, page))
        it.prefetches.remove(fetch)
        it.give_back(spare)
        given = [np.array(column, np.int32) for column in kept]
        effects = it.tree.land(it.keys(prompt)[:end], first, given)
        it.apply(effects, it.model.place(HOST, prompt[:end], first, kept))
        found = it.match(prompt, end)[1]
        assert found == end, f"landed to {end}, usable to {found}"
        before = fetch.hold, fetch.id
        fetch.id, fetch.hold = self._hold(prompt[:end], it.tree.starts(end))
        it.tree.leases.release(before[0])
        it.model.release(before[1])
        self.landed.append(fetch)
        it.did["prefetch landed"] += 1
        it.did["prefetch cut"] += end < len(prompt)

    def _usable(self, fetch: WalkPrefetch, most: int) -> int:
        """The largest end at which everything needed is held or has arrived; 0 if there is none."""
        model = self._it.model
        have = set(model.leases[fetch.id].on_host)
        for group, column in enumerate(fetch.pages):
            come = [at for at, page in enumerate(column, fetch.first) if page != NONE and at < most]
            have.update((fetch.prompt[: at + 1], group) for at in come)
        ends = range(most, 0, -1)
        return next((end for end in ends if have.issuperset(model.places(fetch.prompt, end))), 0)

    def let_go(self, fetch: WalkPrefetch) -> None:
        """The request that waited for it is admitted, or gone."""
        self.landed.remove(fetch)
        self._release(fetch)

    # -- everything ----------------------------------------------------------------------------

    def squeeze(self, group: int) -> None:
        """All that counts as evictable on the device can be had, whatever storage holds below; only
        a copy may keep what is above it."""
        it, tree = self._it, self._it.tree
        moving = {at for copy in it.copies for places in copy.places.values() for at, _ in places}
        pins = it.model.pinned()[0]
        kept = sum(
            spots[group].pages[DEVICE] != NONE
            and not pins[prefix, group]
            and any(at[: len(prefix)] == prefix for at in moving)
            for prefix, spots in it.model.nodes.items()
        )
        count = tree.eviction.evictable(DEVICE, GroupId(group))
        taken = it.evict(DEVICE, group, count)
        assert taken >= count - kept, f"of {count} evictable pages {taken} left, {kept} may stay"
        it.did["squeezed"] += bool(count and (self.landed or self.writes or it.prefetches))

    def drain(self) -> None:
        self.stop()
        for write in list(self.writes):
            self.end_write(write, [True] * len(write.writing.rows))
        for fetch in list(self._it.prefetches):
            self._abandon(fetch)
        for fetch in list(self.landed):
            self.let_go(fetch)
