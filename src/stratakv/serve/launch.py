"""From a command line to servers that run: one process, or one per rank.

Owns what a process of a server does as the rank it is, and its exit code. A launcher such as
torchrun may have started every rank; then none is started here (``followers``). Must not know what
ranks do.
"""

import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from stratakv.agreement.torch_ranks import TorchRanks, join
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError, StrataError
from stratakv.engine.ranked import RankedEngine
from stratakv.serve.followers import Followers, Place, hold_leash, launched
from stratakv.serve.server import bound_socket, serve_forever
from stratakv.serve.sizing import ranks_here
from stratakv.serve.wiring import build_follower, build_service, check_service
from stratakv.serve.wiring_ranks import Seat
from stratakv.spec.budget_table import BudgetTable
from stratakv.storage.io_worker import IoWorker

log = logging.getLogger(__name__)

CLOSE_S: Final = 10.0


def serve_alone(path: Path, config: EngineConfig, server: ServerConfig) -> int:
    """Serve until a signal ends it; the exit code."""
    # A port that is taken shows now, not after a large model was loaded.
    bound_socket(server.host, server.port).close()
    service, parts = build_service(path, config, server)
    _show(parts.table)
    try:
        return serve_forever(service, host=server.host, port=server.port, drain_s=server.drain_s)
    finally:
        parts.transfer.close()


def share_threads(config: EngineConfig) -> None:
    """The ranks of one machine have its cores together."""
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks_here(config)))


def serve_ranks(path: Path, config: EngineConfig, server: ServerConfig, line: Sequence[str]) -> int:
    """The same as one of ``--tp`` ranks. ``line``: the arguments with which the others are started
    on this machine, where no launcher has."""
    place = launched(config.tp)
    if place is None or place.rank == 0:
        bound_socket(server.host, server.port).close()
    check_service(path, config, server)  # before anyone waits for anyone
    if place is not None:
        hold_leash(place)
        return _serve(path, config, server, place)
    with Followers(line, config.tp) as followers:
        code = _serve(path, config, server, followers.place)
        followers.well = code == 0
        return code


def _show(table: BudgetTable) -> None:
    sys.stdout.write(f"{table.render()}\n")
    sys.stdout.flush()


def _serve(path: Path, config: EngineConfig, server: ServerConfig, place: Place) -> int:
    try:
        ranks = join(place.rank, place.size, place.address, config.tp_timeout)
        if place.rank > 0:
            return _follow(path, config, ranks, place)
        return _lead(path, config, server, ranks, place)
    except ConfigError:
        raise
    except StrataError as error:
        log.error("%s", error)
        return 1


def _lead(
    path: Path, config: EngineConfig, server: ServerConfig, ranks: TorchRanks, place: Place
) -> int:
    service, parts = build_service(path, config, server, Seat(ranks))
    try:
        ranks.ready()
        place.up.set()
        _show(parts.table)
        return serve_forever(
            service,
            host=server.host,
            port=server.port,
            drain_s=server.drain_s,
            stopped=parts.port.close,
        )
    finally:
        parts.transfer.close()


def _follow(path: Path, config: EngineConfig, ranks: TorchRanks, place: Place) -> int:
    """A follower ends when rank 0 says so, or is lost: a signal to the whole process group, as from
    a terminal, is rank 0's to answer."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    parts = build_follower(path, config, Seat(ranks))
    assert isinstance(parts.port, RankedEngine), "a follower without a rank 0"
    closing: list[threading.Thread] = []

    def close_beside(worker: IoWorker) -> None:
        """Close a store that was detached, without a step having to wait for it."""
        closing.append(threading.Thread(target=worker.close, args=(CLOSE_S,), daemon=True))
        closing[-1].start()

    try:
        ranks.ready()
        place.up.set()
        parts.port.follow(close_beside)
    finally:
        for thread in closing:
            thread.join(CLOSE_S)
        parts.transfer.close()
    return 0
