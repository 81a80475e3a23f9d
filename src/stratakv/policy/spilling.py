"""What a request books that leaves the full pages of some groups on the host.

Owns this arithmetic, which is pure. Must not spill anybody (``cache.spilling``).

Of such a group it holds on the device its buffer, into which selected rows are copied, and the
pages that have no whole copy on the host yet: those of a step's tokens, the one that is filling,
and the one that was filled before and is being saved. On the host it comes to hold all the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stratakv.core.ids import GroupId
from stratakv.policy.admission import Demand, Pages
from stratakv.spec.budget import FILLING_PAGES


@dataclass(frozen=True, slots=True)
class SpillRules:
    """``buffers``: pages of each group's buffer; what is booked of their host pages stands behind
    the groups, in this order."""

    page_tokens: int
    buffers: Mapping[GroupId, int]

    def staging(self, tokens: int) -> int:
        """Pages on the device beside the buffer, of a request that computes up to ``tokens`` before
        they are committed."""
        return -(-tokens // self.page_tokens) + FILLING_PAGES

    def resident(self, wanted: Demand) -> Demand:
        """``wanted`` by a request that keeps all on the device, which needs no host page to run."""
        none = (0,) * len(self.buffers)
        return self._behind(wanted, none, none, none, none)

    def spilled(self, wanted: Demand, tokens: int, away: Mapping[GroupId, int]) -> Demand:
        """The same of one that is spilled and computes ``tokens`` at once; of its prefix it reads
        ``away`` pages on the host already. What it receives nobody can take from it, on neither
        tier."""
        staging = self.staging(tokens)
        growth, peak = list(wanted.growth), list(wanted.peak)
        fixed, rest = list(wanted.fixed), list(wanted.rest)
        host: list[Pages] = []
        for group, buffer in self.buffers.items():
            near = max(0, wanted.cached - away.get(group, 0))
            more, most = wanted.growth[group] + near, wanted.peak[group]
            host.append((more, most, wanted.fixed[group], wanted.rest[group]))
            growth[group] = peak[group] = held = buffer + staging
            receives = wanted.fixed[group] > 0
            fixed[group], rest[group] = (held, 0) if receives else (0, held)
        found = replace(
            wanted, growth=tuple(growth), peak=tuple(peak), fixed=tuple(fixed), rest=tuple(rest)
        )
        return self._behind(found, *zip(*host, strict=True))

    def _behind(
        self, wanted: Demand, growth: Pages, peak: Pages, fixed: Pages, rest: Pages
    ) -> Demand:
        return replace(
            wanted,
            growth=(*wanted.growth, *growth),
            peak=(*wanted.peak, *peak),
            fixed=(*wanted.fixed, *fixed),
            rest=(*wanted.rest, *rest),
        )
