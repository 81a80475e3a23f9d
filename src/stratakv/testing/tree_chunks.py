"""Pages with bytes for what a tree driver's requests compute, receive or fetch: all or none.

Owns the choice of which groups get a page where. Must not know requests.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from stratakv.core.ids import NONE
from stratakv.spec.groups import CacheSpec
from stratakv.testing.tree_books import DEVICE, HOST, Freed, Prefix
from stratakv.testing.tree_tiers import TierDriver
from stratakv.tree.nodes import Tier


class ChunkDriver(TierDriver):
    """``stateful``: the groups that carry a state."""

    def __init__(
        self,
        spec: CacheSpec,
        device_pages: Sequence[int],
        host_pages: Sequence[int],
        policy: str,
    ) -> None:
        super().__init__(spec, device_pages, host_pages, policy)
        self.stateful = [group.id for group in spec.groups if group.stateful]

    def taken(
        self, prompt: Prefix, first: int, away: AbstractSet[int], *, generous: bool, state: bool
    ) -> tuple[list[list[int]], list[list[int]]] | None:
        """Device pages for [first, len(prompt)), and of the groups ``away`` host pages in their
        place; all or none."""
        host = self.chunk(HOST, prompt, first, generous=True, groups=away)
        here = set(self.model.groups) - away
        pages = None
        if host is not None:
            pages = self.chunk(DEVICE, prompt, first, generous=generous, state=state, groups=here)
        if host is None or pages is None:
            self.give_back(pages_of(HOST, host or []))
            return None
        return pages, host

    def chunk(
        self,
        tier: Tier,
        prompt: Prefix,
        first: int,
        *,
        generous: bool,
        state: bool = True,
        groups: AbstractSet[int] | None = None,
    ) -> list[list[int]] | None:
        """Pages with bytes for [first, len(prompt)), NONE where a group holds none. ``groups``:
        those that hold any; None: all."""
        chunk: list[list[int]] = []
        for group in self.model.groups:
            span = self.model.needed(group, len(prompt))
            some = groups is None or group in groups
            given = [some and (generous or at in span) for at in range(first, len(prompt))]
            if not state and group in self.stateful:
                given[-1:] = [False]
            ids = self.alloc(tier, group, sum(given))
            if ids is None:
                self.give_back(pages_of(tier, chunk))
                return None
            pages = iter(ids.tolist())
            chunk.append([next(pages) if give else NONE for give in given])
            for at, page in enumerate(chunk[group], first):
                if page != NONE:
                    self.bytes[tier, group, page] = prompt[: at + 1]
        return chunk


def pages_of(tier: Tier, columns: Sequence[Sequence[int]]) -> list[Freed]:
    """What they name, by group."""
    return [(tier, g, p) for g, column in enumerate(columns) for p in column if p != NONE]
