"""A cache of requests over a few pages, driven by hand: no model, no engine, nothing that moves a
byte. Owns which page of whom holds which token: a page is worth what was written into it.
"""

from collections.abc import Sequence

import numpy as np

from stratakv.cache.kv_cache import CacheOptions, KVCache
from stratakv.cache.prices import AdmissionLimits, AdmissionRequest
from stratakv.cache.records import Admission, CacheUse, Refusal
from stratakv.core.page_keys import Namespace, PageHasher
from stratakv.memory.allocator import PageAllocator
from stratakv.memory.block_table import BlockTable
from stratakv.policy.load_back import LoadBackPolicy
from stratakv.sim.instant_transfer import InstantTransfer
from stratakv.spec.groups import CacheSpec
from stratakv.tiers.tiered_cache import TierOptions
from stratakv.tree.nodes import TIERS, Tier

NAMESPACE = Namespace(model=b"m", spec_digest=b"s")
NO_THRESHOLD = LoadBackPolicy(threshold_tokens=1)


class SmallCache(KVCache):
    """``device``, ``host``: pages of each group; ``pages``: the most of one request. Every prompt
    is a run of one symbol, or of those that are given."""

    def __init__(
        self,
        spec: CacheSpec,
        device: int | Sequence[int],
        host: int | Sequence[int] = 0,
        *,
        rows: int = 3,
        pages: int = 16,
        reuse: bool = True,
        reserve: int = 0,
        tiers: TierOptions | None = None,
    ) -> None:
        count, page = len(spec.groups), spec.page_tokens
        sizes = [[n] * count if isinstance(n, int) else list(n) for n in (device, host)]
        limits = AdmissionLimits(
            chunk_tokens=2 * page, reserve_tokens=reserve, load_back=NO_THRESHOLD, reuse=reuse
        )
        options = CacheOptions(limits=limits, snapshot_pages=1, tiers=tiers or TierOptions())
        pools = [[PageAllocator(pages) for pages in of] for of in sizes]
        self.rows = BlockTable(count, rows, pages)
        super().__init__(spec, (pools[0], pools[1]), self.rows, InstantTransfer(), options)

    def ask(
        self,
        tokens: Sequence[int],
        more: int = 0,
        *,
        use: CacheUse = CacheUse.ALL,
        again: bool = False,
    ) -> AdmissionRequest:
        """A request for ``tokens``, which may become ``more``."""
        prefix = PageHasher(NAMESPACE, self.spec.page_tokens)
        prefix.extend(np.array(tokens, np.int32))
        total = len(tokens) + more
        return AdmissionRequest(
            prefix=prefix, tokens=len(tokens), total_tokens=total, use=use, again=again
        )

    def enter(self, tokens: Sequence[int], more: int = 0, **asked: CacheUse) -> Admission:
        """Admitted, as it must be."""
        found = self.admission.admit(self.ask(tokens, more, **asked))
        assert not isinstance(found, Refusal), found
        return found

    def compute(self, row: int, tokens: Sequence[int], start: int, end: int | None = None) -> None:
        """Forwards over tokens [start, end), cut where the cache says, each with its commit."""
        stop = len(tokens) if end is None else end
        while start < stop:
            chunk = min(stop, self.cut(row) or stop)
            self.extend(np.array([row]), np.array([start], np.int64), np.array([chunk], np.int64))
            self.commit(row, np.array(tokens[:chunk], np.int32))
            start = chunk

    def serve(self, tokens: Sequence[int], **asked: CacheUse) -> Admission:
        """From its admission to its end."""
        found = self.enter(tokens, **asked)
        self.compute(found.row, tokens, found.computed)
        self.release(found.row, np.array(tokens, np.int32))
        self.progress.settle()
        self.check()
        return found

    def picture(self) -> tuple[object, ...]:
        """All that a refusal must leave as it was."""
        free = [[space.available() for space in self.tiers.pools.tiers[tier]] for tier in TIERS]
        held = [
            [self.tiers.tree.held(tier, g.id).tolist() for g in self.spec.groups] for tier in TIERS
        ]
        booked = [column.tolist() for _, column in self._sequences.columns()]
        return free, held, booked, len(self.tiers.tree.leases), self.rows.taken

    def free_pages(self) -> list[int]:
        return [space.available() for space in self.tiers.pools.tiers[Tier.DEVICE]]
