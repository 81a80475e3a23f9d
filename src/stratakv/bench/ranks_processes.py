"""The ranks of a bench as processes of this machine: started here, and ended whatever happens.

Owns starting them, what they bring back, and what a rank that dies or hangs is called. Must not
know what they measure.
"""

import multiprocessing
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from stratakv.agreement.torch_ranks import TorchRanks, join
from stratakv.core.errors import RankLostError

COLLECTIVE_S: Final = 20.0
"""How long one rank may let the others wait, where all have less to do than that."""
GRIEF_S: Final = 2.0
"""What the others get to say why they end, when one has raised."""
_PRELOADED: Final = ["stratakv.bench.ranks_engine"]

Said = TypeVar("Said")


@dataclass(frozen=True, slots=True)
class _Fault:
    why: str


def on_ranks(
    size: int, act: Callable[[TorchRanks, int], Said], count: int, limit_s: float
) -> list[Said]:
    """What ``act(ranks, count)`` returns on each of ``size`` ranks. ``act`` is a module's function,
    and what it returns can be pickled.

    RankLostError with what went wrong on each rank, where one raises, dies, or has not returned
    within ``limit_s``. No process is left behind.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)  # torch is imported once, not once a rank
    started: list[tuple[BaseProcess, Connection]] = []
    with tempfile.TemporaryDirectory(prefix="stratakv-bench-") as folder:
        address = (Path(folder) / "ranks").as_uri()
        try:
            for rank in range(size):
                mine, theirs = context.Pipe(duplex=False)
                given = (rank, size, address, theirs, act, count)
                process = context.Process(target=_rank, args=given, daemon=True)
                process.start()
                theirs.close()
                started.append((process, mine))
            return _gather([pipe for _, pipe in started], limit_s)
        finally:
            for process, pipe in started:
                process.kill()
                process.join()
                pipe.close()


def _rank(
    rank: int,
    size: int,
    address: str,
    pipe: Connection,
    act: Callable[[TorchRanks, int], object],
    count: int,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench answers it, and ends this process
    torch.set_num_threads(1)
    try:
        ranks = join(rank, size, address, COLLECTIVE_S)
        said = act(ranks, count)
    except BaseException:  # noqa: BLE001 - whatever it is, the bench must hear of it
        said = _Fault(traceback.format_exc())
    pipe.send(said)
    pipe.close()


def _gather(pipes: Sequence[Connection], limit_s: float) -> list[Any]:
    """By rank. The first fault leaves the others a moment to tell theirs."""
    said: dict[int, object] = {}
    faults: dict[int, str] = {}
    end_s = time.monotonic() + limit_s
    while left := [rank for rank in range(len(pipes)) if rank not in said and rank not in faults]:
        ready = wait([pipes[rank] for rank in left], max(0.0, end_s - time.monotonic()))
        if not ready:
            faults |= {rank: f"nothing within {limit_s:g} s" for rank in left if not faults}
            break
        for rank in left:
            if pipes[rank] not in ready:
                continue
            try:
                heard: object = pipes[rank].recv()
            except EOFError:
                heard = _Fault("ended without a word")
            if isinstance(heard, _Fault):
                faults[rank] = heard.why
                end_s = min(end_s, time.monotonic() + GRIEF_S)
            else:
                said[rank] = heard
    if faults:
        raise RankLostError("\n".join(f"rank {rank}: {why}" for rank, why in faults.items()))
    return [said[rank] for rank in range(len(pipes))]
