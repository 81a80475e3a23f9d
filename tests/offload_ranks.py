"""What one rank does in the tests of ranked engines whose selected rows are on the host.

Owns the acts; runs in processes that ``tests.ranks`` starts. Rank 0 has the clients, the others
follow. Pages of both tiers that nobody owns are NaN on every rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.utils import logging

from stratakv.agreement.torch_ranks import TorchRanks
from stratakv.assembly.build import Sockets
from stratakv.assembly.device import CPU
from stratakv.assembly.models import EngineParts, build_sized
from stratakv.assembly.rank_context import RankContext, sharing_of
from stratakv.assembly.sizing import size
from stratakv.assembly.stores import reach_store
from stratakv.core.config import EngineConfig
from stratakv.core.ids import RequestId
from stratakv.engine.huggingface.model import load_model
from stratakv.storage.io_worker import Backends
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.storage_faults import Faults, FaultyBackend
from stratakv.transfer.host_rows import CpuHostRows
from tests.engines import PoisoningAllocator, greedy, poison_unowned, tokens_of

SLOW = Faults(seed=5, read_fails=0.1, read_misses=0.1, delay_s=0.002)


@dataclass(frozen=True)
class OffloadPlay:
    """``device`` and ``host``: pages of every group. ``prompts``: all at once."""

    path: Path
    store: Path
    config: EngineConfig
    device: Sequence[int]
    host: Sequence[int]
    prompts: Sequence[Sequence[int]]
    answer: int


@dataclass
class OffloadPlayed:
    """``tokens`` by act and prompt, an aborted one's as far as it came; ``spilled``: requests that
    were spilled as they ran, ``retracted`` ones, and rows and pages read on the host, of this
    rank. ``stored``: tokens that came from the store."""

    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    spilled: int = 0
    retracted: int = 0
    rows: int = 0
    pages: int = 0
    stored: int = 0


def perform(play: OffloadPlay) -> OffloadPlayed:
    """All acts: cold, again, with aborts; then after a restart over the store, whose reads fail and
    are late on one rank alone."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    played = OffloadPlayed()
    model = load_model(play.path, "float32", ranks=dist.get_world_size())

    def first(serve: "OffloadServe") -> None:
        serve("cold")
        serve("again")
        serve("aborted", abort=True)
        assert serve.port.flush()

    _engine(play, model, played, first, Faults())
    _engine(play, model, played, lambda serve: serve("restarted"), Faults())
    faults = SLOW if dist.get_rank() == 1 else Faults()
    _engine(play, model, played, lambda serve: serve("unwell"), faults)
    return played


class OffloadServe:
    """Rank 0's clients."""

    def __init__(self, parts: EngineParts, play: OffloadPlay, played: OffloadPlayed) -> None:
        self.port = parts.port
        self._play, self._played = play, played
        self._turn = 0

    def __call__(self, act: str, *, abort: bool = False) -> None:
        """``abort``: every second request ends early, each later than the one before."""
        self._turn += 100
        names = [f"{self._turn + at}" for at in range(len(self._play.prompts))]
        for name, prompt in zip(names, self._play.prompts, strict=True):
            self.port.submit(greedy(name, prompt, self._play.answer))
        outputs, steps = [], 0
        while self.port.has_work():
            outputs += self.port.step()
            steps += 1
            at = 2 * (steps // 4)
            if abort and steps % 4 == 0 and at < len(names):
                self.port.abort(RequestId(names[at]))
        self.port.check()
        found = [[one for one in outputs if one.request == name] for name in names]
        self._played.tokens[act] = list(map(tokens_of, found))
        self._played.stored += sum(
            output.cached.storage for output in outputs if output.cached is not None
        )


class PlayedRows(CpuHostRows):
    """Counts for ``OffloadPlayed``."""

    rows = pages_read = 0

    def load(self, layer, device, host):
        PlayedRows.rows += len(host)
        super().load(layer, device, host)

    def pages(self, layer, pages):
        PlayedRows.pages_read += len(pages)
        return super().pages(layer, pages)


def _engine(
    play: OffloadPlay,
    model,
    played: OffloadPlayed,
    act: Callable[[OffloadServe], None],
    faults: Faults,
) -> None:
    context = RankContext.of(TorchRanks(PATIENCE_S))
    rank = context.ranks.rank
    config = replace(play.config, tp=context.ranks.size)
    sizes = replace(
        size(model.facts, config, device_free=None),
        device=tuple(play.device),
        host=tuple(play.host),
        max_model_len=play.config.max_model_len,
    )
    sharing = sharing_of(sizes, config, rank)
    url = f"file://{play.store}?quota=1GiB"
    reached = reach_store(url, sizes.spec, sizes.host, sharing)
    reading = FaultyBackend(reached.backends.reading, faults)
    store = replace(reached, backends=Backends(reading, reached.backends.writing)).open(sharing)
    device = replace(CPU, allocator=PoisoningAllocator, host_rows=PlayedRows)
    parts = build_sized(model, config, sizes, Sockets(ranks=context), device)
    poison_unowned(parts)
    parts.engine.attach_storage(store.worker)
    try:
        if rank == 0:
            act(OffloadServe(parts, play, played))
            parts.port.close()
        else:
            parts.port.follow()
        counters = parts.cache.tiers.pools.counters.snapshot()
    finally:
        parts.transfer.close()
    played.spilled += counters["spilled"]
    played.retracted += counters["retracted"]
    played.rows, played.pages = PlayedRows.rows, PlayedRows.pages_read
    dist.barrier()
