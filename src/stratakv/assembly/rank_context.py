"""The assembly's ranks: how those of one engine meet, and start alike.

Owns the group, the time that rank 0 broadcasts, and the check that all ranks were started with the
same settings and take the same memory. Must not start processes (``launch``) or know requests.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np

from stratakv.agreement.agreement import Agreement
from stratakv.agreement.ranks import Ranks
from stratakv.assembly.sizing import Sizes
from stratakv.core.clock import BroadcastClock, Clock, MonotonicClock
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.engine.ranks.step_messages import StepSync
from stratakv.spec.sharding import Sharding, default_cut
from stratakv.storage.backend import StorageBackend
from stratakv.storage.sharded import ShardedBackend
from stratakv.storage.store_key import StoreKey

HEARTBEAT_S: Final = 5.0


def heartbeat_s(config: EngineConfig) -> float:
    """How often ranks without work meet: well within the time after which one counts as lost."""
    return min(HEARTBEAT_S, config.tp_timeout / 4)


@dataclass(frozen=True, slots=True, eq=False)
class RankContext:
    """One rank's end of everything that ranks share."""

    ranks: Ranks
    agreement: Agreement
    clock: BroadcastClock
    sync: StepSync

    @classmethod
    def of(
        cls, ranks: Ranks, own: Clock | None = None, agreement: Agreement | None = None
    ) -> "RankContext":
        """``own``: this rank's own time, which rank 0 broadcasts."""
        agreement, clock = agreement or Agreement(ranks), BroadcastClock()
        return cls(ranks, agreement, clock, StepSync(agreement, own or MonotonicClock(), clock))

    @property
    def leads(self) -> bool:
        return self.agreement.leads

    @property
    def place(self) -> tuple[int, int]:
        """Which rank this is, and of how many."""
        return self.ranks.rank, self.ranks.size

    def same(self, what: Sequence[tuple[str, object]]) -> None:
        """ConfigError, on every rank, where one of these is not the same on all of them."""
        facts = [f"{name}: {value}" for name, value in what]
        everyone = [text.split("\0") for text in self.ranks.gather("\0".join(facts))]
        for rank, theirs in enumerate(everyone):
            for ours, other in zip(everyone[0], theirs, strict=True):
                if ours != other:
                    raise ConfigError(f"rank 0 has {ours}, rank {rank} has {other}; all must agree")

    def all_reduce_min(self, sizes: Sizes) -> Sizes:
        """What every rank can have: the smallest count of each pool."""
        counts = (sizes.max_model_len, *sizes.device, *sizes.host)
        lanes = self.ranks.all_reduce_min(np.array(counts, np.int64)).tolist()
        groups = len(sizes.device)
        return replace(
            sizes,
            max_model_len=lanes[0],
            device=tuple(lanes[1 : 1 + groups]),
            host=tuple(lanes[1 + groups :]),
        )


def check_alike(
    ranks: RankContext,
    config: EngineConfig,
    fingerprint: bytes,
    digest: bytes,
    key: StoreKey | None = None,
) -> None:
    """ConfigError where ranks were started with other settings, weights, caches or keys."""
    settings = asdict(config)
    settings.pop("storage")  # its URL may have a password, and ranks may reach it by other names
    settings.pop("storage_key_file")  # the same: what counts is that it holds one key
    flags = [(f"--{name.replace('_', '-')}", value) for name, value in settings.items()]
    weights = [("weights", fingerprint.hex()), ("a cache of", digest.hex())]
    stored: list[tuple[str, object]] = [("--storage", config.storage is not None)]
    stored.append(("--storage-key-file with key", None if key is None else key.id.hex()))
    ranks.same([*flags, *stored, *weights])


@dataclass(frozen=True, slots=True)
class ObjectSharding:
    """Which objects a rank's pages are stored as. ``cut``: slices of each group's heads. ``model``:
    its fingerprint, by which pages of models with the same cache are kept apart."""

    sharding: Sharding
    rank: int
    cut: int
    model: bytes = b""

    @property
    def other_cuts(self) -> tuple[int, ...]:
        """Those whose objects this rank would not find."""
        mine = self.sharding.alike(self.cut)
        return tuple(cut for cut in self.sharding.cuts if cut != mine)

    def refusal(self, theirs: int) -> str:
        """Why pages that are stored in ``theirs`` slices forbid these, and what is allowed."""
        why = (
            f"pages of this model are there in slices of --storage-shards {theirs}, which a server "
            f"with --storage-shards {self.cut} would never find"
        )
        joining = self.sharding.joining(theirs)
        if joining is not None:
            return f"{why}; allowed is --storage-shards {joining}"
        return (
            f"{why}, and no number of shards with --tp {self.sharding.ranks} would; "
            "allowed is another directory, database or prefix, or this one once it is cleared, by "
            f"a server with --storage-shards {theirs}, and --storage-shards {self.cut} for every "
            "server that shares it"
        )

    @property
    def whole_pages(self) -> bool:
        """Whether an object is a page, as it is where nobody shares."""
        return self.sharding.ranks == 1 and self.cut == 1

    def between(self, inner: StorageBackend) -> StorageBackend:
        """A backend of this rank's pages over one of slices."""
        if self.whole_pages:
            return inner
        return ShardedBackend.of(inner, self.sharding, self.rank, self.cut)


def sharing_of(sizes: Sizes, config: EngineConfig, rank: int, model: bytes = b"") -> ObjectSharding:
    """``model``: its fingerprint."""
    cut = default_cut(config.tp) if config.storage_shards is None else config.storage_shards
    return ObjectSharding(sizes.sharding, rank, cut, model)
