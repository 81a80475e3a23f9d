"""A tree with pools under a policy, and the order in which its pages leave."""

from collections.abc import Iterator, Sequence

from stratakv.core.ids import GroupId, PageKey, TicketId
from stratakv.memory.allocator import PageAllocator
from stratakv.spec.retention import Retention
from stratakv.testing.specs import small_spec
from stratakv.tree.check import check
from stratakv.tree.effects import Effect, FreeDevice, FreeHost
from stratakv.tree.lease import LoadLease
from stratakv.tree.nodes import Tier
from stratakv.tree.policies import EVICTION_POLICIES
from stratakv.tree.prefix_tree import PrefixTree

DEVICE, HOST = Tier.DEVICE, Tier.HOST
ANCHOR = GroupId(0)
Prompt = tuple[int, ...]


class Cache:
    """A tree with pools; one symbol of a prompt is one page."""

    def __init__(self, policy: str, *rules: Retention, pages: int = 64) -> None:
        spec = small_spec(rules, page_tokens=1)
        self.groups = range(len(spec.groups))
        self.tree = PrefixTree(spec, 2 * pages, EVICTION_POLICIES[policy])
        self.pools = [[PageAllocator(pages) for _ in self.groups] for _ in Tier]

    def keys(self, prompt: Prompt) -> list[PageKey]:
        return [PageKey(repr(prompt[: at + 1]).encode()) for at in range(len(prompt))]

    def serve(self, *prompts: Prompt, priority: int = 0) -> None:
        """Compute what is not cached, keep the end as a checkpoint, and finish."""
        for prompt in prompts:
            keys = self.keys(prompt)
            have = self.tree.match(keys, len(keys) - 1).device_end
            lease = self.tree.leases.take(keys, have, priority=priority)
            taken = [pool.alloc(len(keys) - have) for pool in self.pools[DEVICE]]
            pages = [ids for ids in taken if ids is not None]
            self.do(self.tree.insert(keys, have, pages).effects)
            self.tree.leases.advance(lease, keys, len(keys))
            self.do(self.tree.checkpoints.keep(lease, len(keys), have))
            self.tree.leases.release(lease)
            check(self.tree)

    def use(self, *prompts: Prompt, times: int = 1, priority: int = 0) -> None:
        for prompt in prompts * times:
            keys = self.keys(prompt)
            self.tree.leases.release(self.tree.leases.take(keys, len(keys), priority=priority))
            check(self.tree)

    def save(self, prompt: Prompt) -> None:
        for group in self.groups:
            rows = self.tree.backups.unsaved(
                GroupId(group), self.tree.internals.nodes.path(self.row(prompt))
            )
            pages = self.pools[HOST][group].alloc(len(rows))
            assert pages is not None
            self.tree.copies.begin_backup(GroupId(group), rows, pages)
            self.do(self.tree.copies.end_backup(GroupId(group), rows, ok=True))

    def load(self, prompt: Prompt) -> None:
        """A request comes for a prompt that is on the host, loads it, and finishes."""
        lease = self.tree.leases.take_to_load(self.keys(prompt), len(prompt))
        assert isinstance(lease, LoadLease)
        rows = list(lease.host)
        taken = [pool.alloc(len(r)) for pool, r in zip(self.pools[DEVICE], rows, strict=True)]
        moved = self.tree.leases.begin_load(
            lease, [ids for ids in taken if ids is not None], TicketId(1)
        )
        for group in self.groups:
            self.tree.copies.end_load(GroupId(group), rows[group])
        self.tree.leases.release(moved)
        check(self.tree)

    def do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, FreeDevice | FreeHost):
                tier = DEVICE if isinstance(effect, FreeDevice) else HOST
                self.pools[tier][effect.group].free(effect.pages)

    def evict(self, count: int, group: int = 0, tier: Tier = DEVICE) -> int:
        before = self.pools[tier][group].available()
        self.do(self.tree.eviction.evict(tier, GroupId(group), count))
        check(self.tree)
        return self.pools[tier][group].available() - before

    def row(self, prompt: Prompt) -> int:
        return self.tree.internals.nodes.index[self.keys(prompt)[-1]]

    def left(self, *prompts: Prompt) -> list[Prompt]:
        """Those of ``prompts`` that are usable to their ends."""
        return [p for p in prompts if self.tree.match(self.keys(p), len(p)).end == len(p)]


def singles(*symbols: int) -> list[Prompt]:
    return [(symbol,) for symbol in symbols]


def gone_in_order(cache: Cache, *prompts: Prompt, group: int = 0) -> Iterator[Prompt]:
    """``prompts`` in the order in which they leave, one page at a time."""
    left = list(prompts)
    while left and cache.evict(1, group):
        now = cache.left(*left)
        yield from (prompt for prompt in left if prompt not in now)
        left = now
