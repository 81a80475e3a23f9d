"""What one rank does in the tests of ranked engines: build the server's engine, take part, tell.

Owns the acts of the play; runs in processes that ``tests.ranks`` starts. Rank 0 has the clients,
the others follow.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers.utils import logging

from stratakv.agreement.torch_ranks import TorchRanks
from stratakv.assembly.build import Sockets
from stratakv.assembly.models import build_sized
from stratakv.assembly.rank_context import RankContext, sharing_of
from stratakv.assembly.sizing import size
from stratakv.assembly.stores import reach_store
from stratakv.core.config import EngineConfig
from stratakv.engine.huggingface.model import load_model
from stratakv.engine.huggingface.model_facts import read_facts
from stratakv.engine.ranks.ranked import RankedEngine
from stratakv.storage.backend import ObjectKey, WriteStatus
from stratakv.storage.io_worker import Backends
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.storage_faults import Faults, FaultyBackend
from tests.engines import greedy, tokens_of


@dataclass(frozen=True)
class Play:
    """``prompts``: run one after the other, so that each finds what those before it have left."""

    path: Path
    store: Path
    config: EngineConfig
    prompts: list[list[int]]
    count: int

    @property
    def url(self) -> str:
        """With segments of 16 MiB: every rank that writes has one of each group."""
        return f"file://{self.store}?quota=1GiB"


@dataclass
class Played:
    """``tokens``: of each prompt, by act; ``cached``: what it found on each tier, likewise."""

    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    cached: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)


class Written:
    """A backend that remembers what was stored through it, for an act that takes some away."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.keys: list[ObjectKey] = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def write(self, keys, pages):
        statuses = self._inner.write(keys, pages)
        kept = {WriteStatus.STORED, WriteStatus.PRESENT}
        self.keys += [key for key, status in zip(keys, statuses, strict=True) if status in kept]
        return statuses


def perform(play: Play) -> Played:
    """All acts. The same process group carries several engines, one after the other."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    played = Played()
    model = load_model(play.path, "float32", ranks=dist.get_world_size())
    first: list[ObjectKey] = []

    def caches(serve) -> None:
        serve("recomputed")
        serve("again")
        assert serve.engine.flush()
        serve("stored")

    def restarted(serve) -> None:
        serve("restarted")

    def unwell(serve) -> None:
        serve("unwell")

    _engine(play, model, played, caches, written=first)
    _engine(play, model, played, restarted)
    _remove_some(play, first)
    _engine(play, model, played, restarted_with_gaps)
    faults = Faults(seed=3, read_fails=0.2, read_misses=0.1, read_corrupt=0.1, delay_s=0.003)
    _engine(play, model, played, unwell, faults=faults if dist.get_rank() == 1 else Faults())
    return played


def restarted_with_gaps(serve) -> None:
    serve("gaps")


class _Serve:
    """Rank 0's clients."""

    def __init__(self, engine: RankedEngine, play: Play, played: Played) -> None:
        self.engine = engine
        self._play = play
        self._played = played
        self._turn = 0

    def __call__(self, act: str) -> None:
        tokens, found = [], []
        for prompt in self._play.prompts:
            self._turn += 1
            self.engine.submit(greedy(f"r{self._turn}", prompt, self._play.count))
            outputs = []
            while self.engine.has_work():
                outputs += self.engine.step()
            tokens.append(tokens_of(outputs))
            for output in outputs:
                if output.cached is not None:
                    cached = output.cached
                    found.append((cached.device, cached.host, cached.storage))
        self.engine.check()
        self._played.tokens[act] = tokens
        assert len(found) == len(tokens)
        self._played.cached[act] = found


def _engine(
    play: Play,
    model,
    played: Played,
    act: Callable[[_Serve], None],
    written: list[ObjectKey] | None = None,
    faults: Faults | None = None,
) -> None:
    context = RankContext.of(TorchRanks(PATIENCE_S))
    rank = context.ranks.rank
    config = replace(play.config, tp=context.ranks.size)
    sizes = context.all_reduce_min(size(model.facts, config, device_free=None))
    sharing = sharing_of(sizes, config, rank)
    reached = reach_store(play.url, sizes.spec, sizes.host, sharing)
    kept = Written(reached.backends.writing)
    unwell = FaultyBackend(reached.backends.reading, faults or Faults())
    store = replace(reached, backends=Backends(unwell, kept)).open(sharing)
    parts = build_sized(model, config, sizes, Sockets(ranks=context))
    parts.engine.attach_storage(store.worker)
    try:
        if rank == 0:
            act(_Serve(parts.port, play, played))
            parts.port.close()
        else:
            parts.port.follow()
    finally:
        parts.transfer.close()
    assert (unwell.injected > 0) == (faults is not None and faults != Faults())
    if written is not None:
        written += kept.keys
    dist.barrier()


def _remove_some(play: Play, keys: list[ObjectKey]) -> None:
    """Delete a random third of what the last rank that writes has written."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counts = [0] * ranks
    dist.all_gather_object(counts, len(keys))
    if rank == max(np.flatnonzero(counts)):
        config = replace(play.config, tp=ranks)
        sizes = size(read_facts(play.path, "float32"), config, device_free=None)
        sharing = sharing_of(sizes, config, rank)
        reached = reach_store(play.url, sizes.spec, sizes.host, sharing)
        chosen = np.random.default_rng(5).random(len(keys)) < 1 / 3
        gone = [key for key, taken in zip(keys, chosen, strict=True) if taken]
        assert reached.backends.writing.remove(gone) > 0
        reached.close()
    dist.barrier()
