"""What the perfect model knows of marks: where checkpoints and milestones are, and what they need.

Owns the two sets, and the pages and leases that they are about. Slow and obvious, as ``tree_model``
is, which this is a part of. Must not import anything that decides in ``stratakv.tree``.
"""

from collections.abc import Sequence

from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import KeepAll, needed
from stratakv.testing.tree_books import EffectSet, LeasedPages, PageAt, Prefix, Spot
from stratakv.tree.residency import Residency


class MarksModel:
    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.groups = range(len(spec.groups))
        self.keeps_all = [isinstance(group.retention, KeepAll) for group in spec.groups]
        self.nodes: dict[Prefix, list[Spot]] = {}
        self.leases: dict[int, LeasedPages] = {}
        self.clock = 0
        self.checkpoints: set[Prefix] = set()
        self.milestones: set[Prefix] = set()
        self._needed: dict[tuple[int, int], range] = {}

    def tick(self) -> None:
        self.clock += 1

    def needed(self, group: int, end: int) -> range:
        """The design's ``needed`` at a page boundary."""
        if (group, end) not in self._needed:
            page, rule = self.spec.page_tokens, self.spec.groups[group].retention
            self._needed[group, end] = needed(rule, end * page, page)
        return self._needed[group, end]

    def starts(self, end: int) -> list[int]:
        """First page that each group needs at ``end``."""
        return [self.needed(group, end).start for group in self.groups]

    def places(self, prompt: Prefix, end: int) -> list[PageAt]:
        """Everything that any group needs at ``end``."""
        return [(prompt[: i + 1], g) for g in self.groups for i in self.needed(g, end)]

    def spot(self, place: PageAt) -> Spot:
        return self.nodes[place[0]][place[1]]

    def branches(self, prefix: Prefix) -> int:
        return sum(p[:-1] == prefix for p in self.nodes)

    # -- marks

    def marked_unsaved(self, holder: int) -> list[PageAt]:
        """What a mark needs on a lease's path and the device alone has."""
        prompt = self.leases[holder].prompt
        path = {prompt[:end] for end in range(1, self.leases[holder].end + 1)}
        wanted = [place for place in self.wanted() if place[0] in path]
        return [place for place in wanted if self.spot(place).state == Residency.DEVICE]

    def wanted(self) -> set[PageAt]:
        """Places of groups that do not keep all which some checkpoint or milestone needs."""
        return self.needed_by(self.checkpoints | self.milestones)

    def needed_by(self, marks: set[Prefix]) -> set[PageAt]:
        """Places of groups that do not keep all which some of ``marks`` needs."""
        return {
            place
            for prefix in marks
            for place in self.places(prefix, len(prefix))
            if not self.keeps_all[place[1]]
        }

    def keep(self, holder: int, end: int, continued: int, instead_of: int = 0) -> EffectSet:
        """Mark a checkpoint where everything it needs is present; make milestones of older ones
        above, and of the one at ``instead_of``, unless the tree branches there; and a checkpoint at
        ``continued`` where it does."""
        outcome = EffectSet()
        if not 0 < end <= self.leases[holder].end:
            return outcome
        prompt = self.leases[holder].prompt[:end]
        if not self._mark(prompt, self.checkpoints, outcome):
            return outcome
        for at in {*range(1, continued + 1), instead_of} & set(range(1, end)):
            if prompt[:at] in self.checkpoints and self.branches(prompt[:at]) <= 1:
                self.checkpoints.discard(prompt[:at])
                self.milestones.add(prompt[:at])
        self._branch(prompt[: min(continued, end - 1)], outcome)
        return outcome

    def branch(self, holder: int, end: int) -> EffectSet:
        """Mark a checkpoint where two prompts have parted."""
        outcome = EffectSet()
        self._branch(self.leases[holder].prompt[:end], outcome)
        return outcome

    def _branch(self, at: Prefix, outcome: EffectSet) -> None:
        if at and at not in self.checkpoints and self.branches(at) > 1:
            self._mark(at, self.checkpoints, outcome)

    def pave(self, holder: int, end: int) -> EffectSet:
        """Mark a milestone where everything it needs is present and no checkpoint is."""
        outcome, prompt = EffectSet(), self.leases[holder].prompt[:end]
        if prompt not in self.checkpoints:
            self._mark(prompt, self.milestones, outcome)
        return outcome

    def milestones_of(self, holder: int) -> list[int]:
        """Ends of milestones on a lease's path at which the tree does not branch."""
        prompt, ends = self.leases[holder].prompt, range(1, self.leases[holder].end + 1)
        marked = [end for end in ends if prompt[:end] in self.milestones]
        return [end for end in marked if self.branches(prompt[:end]) <= 1]

    def clear(self, holder: int, ends: Sequence[int]) -> None:
        self.milestones -= {self.leases[holder].prompt[:end] for end in ends}

    def _mark(self, prompt: Prefix, marks: set[Prefix], outcome: EffectSet) -> bool:
        """Let ``prompt`` be one of ``marks`` alone, if all that it needs is somewhere."""
        places = [p for p in self.places(prompt, len(prompt)) if not self.keeps_all[p[1]]]
        states = [self.spot(place).state for place in places]
        if all(self.keeps_all) or Residency.ABSENT in states:
            return False
        self.checkpoints.discard(prompt)
        self.milestones.discard(prompt)
        marks.add(prompt)
        self.stamp(places)
        for (prefix, group), state in zip(places, states, strict=True):
            if state == Residency.DEVICE:
                outcome.backups.setdefault(group, []).append(prefix)
        return True

    def stamp(self, places: Sequence[PageAt]) -> None:
        self.clock += 1
        for place in places:
            self.spot(place).used = self.clock
