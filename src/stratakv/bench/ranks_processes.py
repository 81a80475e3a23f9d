"""Ranks as processes of this machine, for a bench and for tests: started here, and ended whatever
happens.

Owns starting them, what they bring back, and what a rank that dies or hangs is called. Must not
know what they do.
"""

import multiprocessing
import pickle
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
GRIEF_S: Final = 10.0
"""What the others get to say why they end, when one has raised; and all to end, when they have
reported what they bring back."""
_PRELOADED: Final = ("stratakv.bench.ranks_engine",)

Given = TypeVar("Given")
Returned = TypeVar("Returned")


@dataclass(frozen=True, slots=True)
class _Fault:
    why: str


def on_ranks(
    size: int,
    act: Callable[[TorchRanks, Given], Returned],
    given: Given,
    limit_s: float,
    *,
    collective_s: float = COLLECTIVE_S,
) -> list[Returned]:
    """What ``act(ranks, given)`` returns on each of ``size`` ranks. ``act`` is a module's function;
    what it is given and what it returns can be pickled. ``collective_s``: how long one rank may let
    the others wait, once all are there.

    RankLostError with what went wrong on each rank, where one raises, dies, or has not returned
    within ``limit_s``. No process is left behind.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED])  # torch is imported once, not once a rank
    # Plain bytes, both ways: what torch shares between processes outlives one that is killed.
    job = pickle.dumps((act, given))
    started: list[tuple[BaseProcess, Connection]] = []
    with tempfile.TemporaryDirectory(prefix="stratakv-ranks-") as folder:
        address = (Path(folder) / "ranks").as_uri()
        try:
            for rank in range(size):
                mine, theirs = context.Pipe(duplex=False)
                arguments = (rank, size, address, theirs, job, collective_s)
                process = context.Process(target=_rank, args=arguments, daemon=True)
                process.start()
                theirs.close()
                started.append((process, mine))
            answers = _gather([pipe for _, pipe in started], limit_s)
            for process, _ in started:
                process.join(GRIEF_S)
            return answers
        finally:
            for process, pipe in started:
                process.kill()
                process.join()
                pipe.close()


def _rank(
    rank: int, size: int, address: str, pipe: Connection, job: bytes, collective_s: float
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who has started it answers, and ends it
    torch.set_num_threads(1)
    try:
        act, given = pickle.loads(job)
        ranks = join(rank, size, address, collective_s)
        ranks.ready()
        answers = pickle.dumps(act(ranks, given))
    except BaseException:  # noqa: BLE001 - whatever it is, who waits must be notified
        answers = pickle.dumps(_Fault(traceback.format_exc()))
    pipe.send_bytes(answers)
    pipe.close()


def _gather(pipes: Sequence[Connection], limit_s: float) -> list[Any]:
    """By rank. The first fault leaves the others a moment to report theirs, which shows who was
    first."""
    answers: dict[int, object] = {}
    end_s = time.monotonic() + limit_s
    while left := [rank for rank in range(len(pipes)) if rank not in answers]:
        ready = wait([pipes[rank] for rank in left], max(0.0, end_s - time.monotonic()))
        if not ready:
            break
        for rank in left:
            if pipes[rank] in ready:
                answers[rank] = _received(pipes[rank])
                if isinstance(answers[rank], _Fault):
                    end_s = min(end_s, time.monotonic() + GRIEF_S)
    hung = _Fault(f"nothing within {limit_s:g} s")
    whole = [answers.get(rank, hung) for rank in range(len(pipes))]
    faults = [
        f"rank {rank}: {one.why}" for rank, one in enumerate(whole) if isinstance(one, _Fault)
    ]
    if faults:
        raise RankLostError("\n".join(faults))
    return whole


def _received(pipe: Connection) -> object:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return _Fault("ended without a word")
