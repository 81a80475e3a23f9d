"""What the perfect model keeps its books in. Owns the records, no rules."""

from collections import Counter
from dataclasses import dataclass, field

from stratakv.core.ids import NONE
from stratakv.tree.nodes import Tier
from stratakv.tree.residency import Residency

DEVICE, HOST = Tier.DEVICE, Tier.HOST
Prefix = tuple[int, ...]
"""One symbol per page; ``prefix[:i + 1]`` names page i."""
PageAt = tuple[Prefix, int]
"""One group's page of one prefix."""
Freed = tuple[Tier, int, int]
"""Tier, group, page id."""


@dataclass(slots=True)
class Spot:
    """Where one group's page of one node is; ``used`` is when it was last stamped."""

    pages: list[int] = field(default_factory=lambda: [NONE, NONE])
    moving: Residency | None = None
    used: int = 0

    @property
    def state(self) -> Residency:
        if self.moving is not None:
            return self.moving
        device, host = (page != NONE for page in self.pages)
        if device:
            return Residency.BOTH if host else Residency.DEVICE
        return Residency.HOST if host else Residency.ABSENT


@dataclass(slots=True)
class LeasedPages:
    """A lease on pages [starts[g], ``end``) of every group. ``on_host`` are the places that it pins
    there: those that a planned load will read, or all that a hold (``retracted``) found. ``away``:
    of a ``spilled`` request, those that it reads there."""

    prompt: Prefix
    end: int
    starts: list[int]
    on_host: set[PageAt] = field(default_factory=set[PageAt])
    retracted: bool = False
    spilled: bool = False
    away: set[PageAt] = field(default_factory=set[PageAt])

    def spill(self) -> None:
        self.spilled = True

    def places(self) -> list[PageAt]:
        return [
            (self.prompt[: index + 1], group)
            for group, start in enumerate(self.starts)
            for index in range(start, self.end)
        ]


@dataclass(slots=True)
class EffectSet:
    """Effects, without their order."""

    freed: Counter[Freed] = field(default_factory=Counter[Freed])
    remapped: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    backups: dict[int, list[Prefix]] = field(default_factory=dict[int, list[Prefix]])
    persists: dict[int, list[Prefix]] = field(default_factory=dict[int, list[Prefix]])
