"""The perfect model of the prefix tree: dictionaries of prefixes, read off the design's text.

Owns its own books: for every prefix page and group which tier holds which page, who pins it and
when it was last used; and gives what the tree must answer, free and remap. Slow and obvious on
purpose: nothing is kept that can be recounted. Must not import anything that decides in
``stratakv.tree``.
"""

from collections import Counter
from collections.abc import Sequence

from stratakv.core.ids import NONE
from stratakv.spec.groups import CacheSpec
from stratakv.testing.tree_books import DEVICE, HOST, EffectSet, LeasedPages, PageAt, Prefix, Spot
from stratakv.testing.tree_marks_model import MarksModel
from stratakv.testing.tree_store_model import StoreModel
from stratakv.tree.nodes import Tier
from stratakv.tree.residency import Residency, ResidencyEvent

WARM = 1 << 50
"""Above every time."""
_LEAVES = (ResidencyEvent.DEVICE_EVICTED, ResidencyEvent.HOST_EVICTED)


class TreeModel(MarksModel):
    """``stepped`` counts residency transitions: what a campaign has covered."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self.hits: Counter[Prefix] = Counter()
        self.stepped: Counter[tuple[Residency, ResidencyEvent]] = Counter()
        self.byteless = spec.groups[0].page_bytes == 0
        self.homes = {group.id for group in spec.groups if group.at_home_on_host}
        self.store = StoreModel(spec, self.nodes, self.wanted)

    # -- questions -----------------------------------------------------------------------------

    def reach(self, prompt: Prefix) -> int:
        """How many leading pages of ``prompt`` have a node."""
        known = 0
        while known < len(prompt) and prompt[: known + 1] in self.nodes:
            known += 1
        return known

    def match(self, prompt: Prefix, limit: int) -> tuple[int, int, int]:
        """(device_end, end, anchor_end) by trying every end."""
        anchor_end = self.reach(prompt[:limit])
        device_end = end = 0
        for at in range(1, anchor_end + 1):
            spots = [self.spot(place) for place in self.places(prompt, at)]
            if all(spot.state != Residency.ABSENT for spot in spots):
                end = at
            if all(spot.pages[DEVICE] != NONE for spot in spots):
                device_end = at
        return device_end, end, anchor_end

    def pinned(self) -> tuple[Counter[PageAt], Counter[PageAt]]:
        """Pins per tier, recounted from the leases and the copies in flight."""
        pins: tuple[Counter[PageAt], Counter[PageAt]] = (Counter(), self.store.pins())
        for held in self.leases.values():
            for place in held.on_host if held.retracted else held.places():
                far = place in held.on_host or place in held.away
                pins[HOST if far else DEVICE][place] += 1
        for prefix, spots in self.nodes.items():
            for group, spot in enumerate(spots):
                if spot.moving is not None:
                    pins[DEVICE][prefix, group] += 1
                    pins[HOST][prefix, group] += 1
        return pins

    def prices(self, prompt: Prefix, end: int, starts: Sequence[int]) -> list[tuple[int, int]]:
        """By group: pages that such a lease would pin where nothing does, and would load."""
        pins = self.pinned()[DEVICE]
        counts = [[0, 0] for _ in self.groups]
        for place in LeasedPages(prompt, end, list(starts)).places():
            if self.spot(place).pages[DEVICE] == NONE:
                counts[place[1]][1] += 1
            elif not pins[place]:
                counts[place[1]][0] += 1
        return [(to_pin, to_load) for to_pin, to_load in counts]

    def spilled_price(self, prompt: Prefix, end: int, group: int) -> tuple[int, int, int]:
        """Of a group that such a lease spills: pages that nothing pins where it would, on the
        device and on the host, and how many it would read there."""
        pins, counts, away = self.pinned(), [0, 0], 0
        for at in range(end):
            place = (prompt[: at + 1], group)
            far = self.store.readable(place)
            away += far
            counts[HOST if far else DEVICE] += not pins[HOST if far else DEVICE][place]
        return counts[DEVICE], counts[HOST], away

    def sole(self, holder: int, group: int) -> int:
        """Pages of a group that nothing but this lease pins on the device."""
        pins = self.pinned()[DEVICE]
        return sum(pins[p] == 1 for p in self.leases[holder].places() if p[1] == group)

    def kept_unsaved(self, holder: int) -> list[PageAt]:
        """What a lease holds on the device alone and somebody may want again."""
        wanted = self.wanted()
        return [
            place
            for place in self.leases[holder].places()
            if self.spot(place).state == Residency.DEVICE
            and (self.keeps_all[place[1]] or place in wanted)
        ]

    def evictable(self) -> list[list[int]]:
        """[tier][group]: resident pages that nothing pins on the tier."""
        counts = [[0] * len(self.groups) for _ in Tier]
        pins = self.pinned()
        for prefix, spots in self.nodes.items():
            for group, spot in enumerate(spots):
                for tier in Tier:
                    counts[tier][group] += (
                        spot.pages[tier] != NONE and not pins[tier][prefix, group]
                    )
        return counts

    def candidates(self, tier: Tier, group: int) -> dict[Prefix, int]:
        """Pages that may leave right now, each with its rank; 0 is the cold end, and below ``WARM``
        is what milestones alone need."""
        pins = self.pinned()
        free = [
            prefix
            for prefix, spots in self.nodes.items()
            if spots[group].pages[tier] != NONE and not pins[tier][prefix, group]
        ]
        if group == 0:
            busy = {place[0] for tier_pins in pins for place, count in tier_pins.items() if count}
            free = [prefix for prefix in free if self._anchor_may_leave(tier, prefix, busy)]
        whole = self.keeps_all[group]
        wanted, warm = self.wanted(), self.needed_by(self.checkpoints)
        ranks: dict[Prefix, int] = {}
        for prefix in free:
            place = (prefix, group)
            idle = not pins[DEVICE][place] and not pins[HOST][place]
            used = self.spot(place).used
            if not whole and idle and place not in warm:
                ranks[prefix] = used if place in wanted else 0
            else:
                ranks[prefix] = used + WARM if used else 0
        return ranks

    def maybe_cold(self, place: PageAt) -> bool:
        """Whether only holds and writes on the host keep a page from the cold end, or from where
        milestones have theirs. Such a pin is no use of it: one that was there already stays, and
        one that was used since is warm."""
        unused = not self.keeps_all[place[1]] and not self.pinned()[DEVICE][place]
        return unused and place not in self.needed_by(self.checkpoints)

    def _anchor_may_leave(self, tier: Tier, prefix: Prefix, busy: set[Prefix]) -> bool:
        below = self.below(prefix)
        # On the host a path may have holes: only a child counts.
        children = [p for p in below if len(p) == len(prefix) + 1]
        if any(self.nodes[p][0].pages[tier] != NONE for p in children):
            return False
        if self.nodes[prefix][0].pages[1 - tier] != NONE:
            return True
        return not busy.intersection((prefix, *below))

    def below(self, prefix: Prefix) -> list[Prefix]:
        """Every node under ``prefix``, deepest first."""
        found = [p for p in self.nodes if len(p) > len(prefix) and p[: len(prefix)] == prefix]
        return sorted(found, key=len, reverse=True)

    # -- leases --------------------------------------------------------------------------------

    def lease(
        self,
        holder: int,
        prompt: Prefix,
        end: int,
        *,
        load: bool,
        starts: Sequence[int] | None = None,
        spill: bool = False,
    ) -> LeasedPages:
        held = LeasedPages(prompt, end, list(self.starts(end) if starts is None else starts))
        places = held.places()
        if spill:
            held.spill()
            held.away.update(self._far(places))
        if load:
            here = {p for p in places if self.spot(p).pages[DEVICE] != NONE}
            held.on_host = set(places) - here - held.away
        self.leases[holder] = held
        self.stamp(places)
        self.hits.update(prompt[: at + 1] for at in range(end))
        return held

    def hold(self, holder: int, prompt: Prefix, end: int, starts: Sequence[int]) -> LeasedPages:
        """Pin host copies. It is no use of anything, when it begins as when it ends."""
        held = LeasedPages(prompt, end, list(starts), retracted=True)
        held.on_host = set(held.places())
        self.leases[holder] = held
        return held

    def _far(self, places: Sequence[PageAt]) -> set[PageAt]:
        """Those that a spilled request reads on the host."""
        return {place for place in places if place[1] in self.homes and self.store.readable(place)}

    def spill(self, holder: int) -> None:
        """All that a lease holds stays where it is, until ``settle``."""
        self.leases[holder].spill()

    def settle(self, holder: int) -> set[PageAt]:
        """What a spilled lease finds whole on both tiers, and reads on the host from now on."""
        held = self.leases[holder]
        near = [p for p in held.places() if p[1] in self.homes and p not in held.away]
        found = {p for p in near if held.spilled and self.spot(p).state == Residency.BOTH}
        held.away.update(found)
        return found

    def leavable(self, holder: int, group: int) -> int:
        """Pages of a group that nobody would hold on the device if this request were spilled."""
        pins = self.pinned()[DEVICE]
        mine = [p for p in self.leases[holder].places() if p[1] == group]
        return sum(pins[p] == 1 and self.spot(p).state == Residency.BOTH for p in mine)

    def advance(self, holder: int, prompt: Prefix, end: int, *, received: bool = False) -> None:
        """A state that was not kept at ``end`` is the request's own: nothing is held of it.
        ``received``: what a spilled request lacked is on the host."""
        held = self.leases[holder]
        before = set(held.places())
        held.prompt, held.end, held.starts = prompt, end, self.starts(end)
        for group in self.spec.groups:
            if group.stateful and self.spot((prompt[:end], group.id)).pages[DEVICE] == NONE:
                held.starts[group.id] = end
        entering = [place for place in held.places() if place not in before]
        self.stamp(entering)
        if received and held.spilled:
            held.away.update(self._far(entering))

    def let_go(self, holder: int, end: int) -> None:
        """Its request has got to ``end`` without it, and needs no more than that there."""
        held = self.leases[holder]
        needs = [min(start, held.end) for start in self.starts(end)]
        held.starts = [max(pair) for pair in zip(held.starts, needs, strict=True)]

    def release(self, holder: int) -> None:
        """The end of a lease is its last use."""
        held = self.leases.pop(holder)
        if not held.retracted:
            self.stamp(held.places())

    # -- pages come ----------------------------------------------------------------------------

    def place(
        self, tier: Tier, prompt: Prefix, first: int, pages: Sequence[Sequence[int]]
    ) -> EffectSet:
        """A request's (device) or storage's (host) pages for [first, len(prompt))."""
        outcome, wanted = EffectSet(), self.wanted()
        self.clock += 1
        for at in range(first, len(prompt)):
            spots = self.nodes.setdefault(prompt[: at + 1], [Spot() for _ in self.groups])
            for group, spot in enumerate(spots):
                page, there = pages[group][at - first], spot.pages[tier] != NONE
                if page == NONE:
                    continue
                fresh = self._offer(tier, group, at, spot, page, outcome)
                if not there and (fresh or tier == HOST):
                    place = (prompt[: at + 1], group)
                    self.store.entered(place, self.clock, fetched=tier == HOST)
                if fresh:
                    # Pages of a partial group arrive cold: a lease or a checkpoint warms them.
                    warm = self.keeps_all[group] or (prompt[: at + 1], group) in wanted
                    spot.used = self.clock if warm else 0
        if tier == DEVICE:
            for group in (g for g in self.groups if self.keeps_all[g]):
                path = [prompt[: at + 1] for at in range(first, len(prompt))]
                unsaved = [p for p in path if self.nodes[p][group].state == Residency.DEVICE]
                if unsaved:
                    outcome.backups[group] = unsaved
        return outcome

    def adopt_saved(self, prompt: Prefix, first: int, pages: Sequence[Sequence[int]]) -> EffectSet:
        """Host pages for [first, len(prompt)) that another engine has filled, of nodes that are
        there."""
        outcome = EffectSet()
        self.clock += 1
        for at in range(first, len(prompt)):
            for group, spot in enumerate(self.nodes[prompt[: at + 1]]):
                page = pages[group][at - first]
                if page == NONE:
                    continue
                if spot.pages[HOST] != NONE:
                    outcome.freed[HOST, group, page] += 1
                    continue
                spot.used = self.clock if spot.state == Residency.ABSENT else spot.used
                self.step(spot, ResidencyEvent.SAVED)
                spot.pages[HOST] = page
                self.store.entered((prompt[: at + 1], group), self.clock, fetched=False)
        path = [prompt[: at + 1] for at in range(first, len(prompt))]
        for prefix, group in self.store.worthy([(p, g) for g in self.groups for p in path]):
            outcome.persists.setdefault(group, []).append(prefix)
        return outcome

    def _offer(
        self, tier: Tier, group: int, at: int, spot: Spot, page: int, outcome: EffectSet
    ) -> bool:
        """Whether the page has just become present; a second copy is not a use of the first."""
        mine, before = spot.pages[tier], spot.state
        if mine == NONE:
            self.step(spot, (ResidencyEvent.INSERTED, ResidencyEvent.FETCHED)[tier])
            spot.pages[tier] = page
            return before == Residency.ABSENT
        if tier == HOST:
            outcome.freed[HOST, group, page] += 1
        elif spot.moving != Residency.LOADING and page != mine:
            outcome.remapped[group, at] = mine
            outcome.freed[DEVICE, group, page] += 1
        return False

    # -- copies --------------------------------------------------------------------------------

    def begin_backup(self, places: Sequence[PageAt], pages: Sequence[int]) -> None:
        for place, page in zip(places, pages, strict=True):
            spot = self.spot(place)
            self.step(spot, ResidencyEvent.BACKUP_BEGUN)
            spot.moving, spot.pages[HOST] = Residency.SAVING, page

    def end_backup(self, places: Sequence[PageAt], *, ok: bool) -> EffectSet:
        outcome = EffectSet()
        for place in places:
            spot = self.spot(place)
            self.step(spot, ResidencyEvent.BACKUP_DONE if ok else ResidencyEvent.BACKUP_FAILED)
            spot.moving = None
            if not ok:
                outcome.freed[HOST, place[1], spot.pages[HOST]] += 1
                spot.pages[HOST] = NONE
        for prefix, group in self.store.worthy(places if ok else ()):
            outcome.persists.setdefault(group, []).append(prefix)
        return outcome

    def begin_load(self, holder: int, pages: dict[PageAt, int]) -> None:
        held = self.leases[holder]
        assert set(pages) == held.on_host
        for place, page in pages.items():
            spot = self.spot(place)
            self.step(spot, ResidencyEvent.LOAD_BEGUN)
            spot.moving, spot.pages[DEVICE] = Residency.LOADING, page
        held.on_host = set()

    def end_load(self, places: Sequence[PageAt]) -> None:
        for place in places:
            self.step(self.spot(place), ResidencyEvent.LOAD_DONE)
            self.spot(place).moving = None

    # -- pages go ------------------------------------------------------------------------------

    def take(self, tier: Tier, group: int, prefix: Prefix, outcome: EffectSet) -> None:
        """Evict one candidate, with everything that must go along."""
        spots = self.nodes[prefix]
        if group or spots[0].pages[1 - tier] != NONE:
            self._leave(tier, group, spots[group], outcome)
            self._prune(prefix if group else (), outcome)
            return
        for node in (*self.below(prefix), prefix):
            self._drop(node, outcome)
        self._prune(prefix[:-1], outcome)

    def _leave(self, tier: Tier, group: int, spot: Spot, outcome: EffectSet) -> None:
        outcome.freed[tier, group, spot.pages[tier]] += 1
        self.step(spot, _LEAVES[tier])
        spot.pages[tier] = NONE

    def _drop(self, prefix: Prefix, outcome: EffectSet) -> None:
        for group, spot in enumerate(self.nodes[prefix]):
            for tier in Tier:
                if spot.pages[tier] != NONE:
                    self._leave(tier, group, spot, outcome)
        del self.nodes[prefix]
        del self.hits[prefix]
        self.checkpoints.discard(prefix)
        self.milestones.discard(prefix)

    def _prune(self, prefix: Prefix, outcome: EffectSet) -> None:
        """Nodes of an anchor without bytes go once nothing lies on or below them."""
        pins = self.pinned() if self.byteless else ()
        while self.byteless and prefix in self.nodes and not self.branches(prefix):
            spots = self.nodes[prefix]
            held = any(spot.state != Residency.ABSENT for spot in spots[1:])
            if held or any(tier_pins[prefix, 0] for tier_pins in pins):
                return
            self._drop(prefix, outcome)
            prefix = prefix[:-1]

    def step(self, spot: Spot, event: ResidencyEvent) -> None:
        self.stepped[spot.state, event] += 1
