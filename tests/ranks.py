"""Several ranks of one test, each a process of its own, that can talk through gloo.

Owns starting them, what they bring back, and their end: a rank that raises or hangs fails the test
in time, and none outlives it. Must not know what they run.
"""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT_S = 60.0
SLACK_S = 3.0
PRELOADED = ("transformers.models.auto.modeling_auto", "stratakv.serve.wiring", "tests.ranks")
"""What every rank needs and takes seconds to import: the server that ranks are forked from does."""


def run_ranks(
    ranks: int, function: Callable[..., object], *args: object, timeout_s: float = TIMEOUT_S
) -> list[object]:
    """``function(*args)`` in each of ``ranks`` processes, within a process group of gloo; what it
    returns, by rank. ``function`` and ``args`` are pickled, so both come from a module.

    AssertionError with the traceback of every rank that raised, or that ended or hung without a
    word; then all of them are killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    # Plain bytes: what torch would share between processes outlives one that is killed.
    job = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory() as folder:
        started: list[tuple[BaseProcess, Connection]] = []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            given = (rank, ranks, Path(folder) / "store", timeout_s, theirs, job)
            process = context.Process(target=_rank, args=given, daemon=True)
            process.start()
            theirs.close()
            started.append((process, mine))
        try:
            # A rank that waits for one that hangs raises first, and says where.
            said = _gather([pipe for _, pipe in started], timeout_s + SLACK_S)
            if not any(fault for fault, _ in said):
                for process, _ in started:
                    process.join(SLACK_S)
        finally:
            for process, pipe in started:
                process.kill()
                process.join()
                pipe.close()
    faults = [f"rank {rank}: {fault}" for rank, (fault, _) in enumerate(said) if fault]
    assert not faults, "\n".join(faults)
    return [result for _, result in said]


def _gather(pipes: list[Connection], timeout_s: float) -> list[tuple[str | None, object]]:
    """Per rank (what went wrong, result). One that raises leaves the others two seconds: what they
    say then shows who was first."""
    said: dict[int, tuple[str | None, object]] = {}
    deadline = time.monotonic() + timeout_s
    while len(said) < len(pipes) and (left := deadline - time.monotonic()) > 0:
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in said], left)
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                said[rank] = _received(pipe)
                if said[rank][0]:
                    deadline = min(deadline, time.monotonic() + 2)
    hung = (f"nothing within {timeout_s} s", None)
    return [said.get(rank, hung) for rank in range(len(pipes))]


def _received(pipe: Connection) -> tuple[str | None, object]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return "ended without a word", None


def _rank(
    rank: int,
    ranks: int,
    store: Path,
    timeout_s: float,
    pipe: Connection,
    job: bytes,
) -> None:
    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(job)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        said = (None, function(*args))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever it is, the test must hear of it
        said = (traceback.format_exc(), None)
    pipe.send_bytes(pickle.dumps(said))
    pipe.close()
