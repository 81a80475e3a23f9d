"""From a command line to servers that run: one process, or one per rank.

Owns the processes of a server: which rank this one is, the followers that rank 0 has started on its
own machine, and how each ends. A launcher such as torchrun may have started every rank; then none
is started here. Must not know what ranks do.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from stratakv.agreement.torch_ranks import join
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError, StrataError
from stratakv.engine.ranked import RankedEngine
from stratakv.serve.server import bound_socket, serve_forever
from stratakv.serve.wiring import build_follower, build_service, check_service
from stratakv.serve.wiring_ranks import Seat
from stratakv.spec.budget_table import BudgetTable
from stratakv.storage.io_worker import IoWorker

log = logging.getLogger(__name__)

END_S: Final = 30.0
"""What followers get to end when rank 0 has: to write what is queued for storage, above all."""
CLOSE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Place:
    """``address``: where the ranks meet."""

    rank: int
    size: int
    address: str


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


def serve_ranks(path: Path, config: EngineConfig, server: ServerConfig, line: Sequence[str]) -> int:
    """The same as one of ``--tp`` ranks. ``line``: the arguments with which the others are started
    on this machine, where no launcher has."""
    place = launched(config.tp)
    if place is not None:
        return _serve(path, config, server, place)
    bound_socket(server.host, server.port).close()
    check_service(path, config, server)  # what is refused, is refused once
    if torch.get_num_threads() > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // config.tp))
    with Followers(line, config.tp) as place:
        return _serve(path, config, server, place)


def _show(table: BudgetTable) -> None:
    sys.stdout.write(f"{table.render()}\n")
    sys.stdout.flush()


def launched(size: int) -> Place | None:
    """Where a launcher has put this process; None where none has started it. ConfigError where it
    has started another number of ranks than ``--tp`` says."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if started != size:
        raise ConfigError(f"--tp {size}: the launcher has started {started} ranks; allowed is that")
    return Place(rank, size, "env://")


def _serve(path: Path, config: EngineConfig, server: ServerConfig, place: Place) -> int:
    try:
        seat = Seat(join(place.rank, place.size, place.address, config.tp_timeout))
        if place.rank > 0:
            return _follow(path, config, seat)
        return _lead(path, config, server, seat)
    except StrataError as error:
        if isinstance(error, ConfigError):
            raise
        log.error("%s", error)
        return 1


def _lead(path: Path, config: EngineConfig, server: ServerConfig, seat: Seat) -> int:
    service, parts = build_service(path, config, server, seat)
    _show(parts.table)
    try:
        return serve_forever(
            service,
            host=server.host,
            port=server.port,
            drain_s=server.drain_s,
            stopped=parts.port.close,
        )
    finally:
        parts.transfer.close()


def _follow(path: Path, config: EngineConfig, seat: Seat) -> int:
    """A follower ends when rank 0 says so, or is lost: a signal to the whole process group, as from
    a terminal, is rank 0's to answer."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    parts = build_follower(path, config, seat)
    assert isinstance(parts.port, RankedEngine), "a follower without a rank 0"
    try:
        parts.port.follow(_close_beside)
    finally:
        parts.transfer.close()
    return 0


def _close_beside(worker: IoWorker) -> None:
    """Close a store that was detached, without a step having to wait for it."""
    threading.Thread(target=worker.close, args=(CLOSE_S,), daemon=True).start()


@dataclass(slots=True, eq=False)
class Followers:
    """Ranks 1 and up, as children of this process; a context manager. Each runs the same command
    line, and finds its rank in the environment, as under torchrun."""

    line: Sequence[str]
    size: int
    _running: list["subprocess.Popen[bytes]"] = field(
        default_factory=list["subprocess.Popen[bytes]"], init=False
    )
    _ending: bool = field(default=False, init=False)

    def __enter__(self) -> Place:
        port = str(_free_port())
        command = [sys.executable, "-m", "stratakv", *self.line]
        for rank in range(1, self.size):
            named = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.size)}
            meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            child = subprocess.Popen(command, env=os.environ | named | meet)
            self._running.append(child)
            threading.Thread(target=self._watch, args=(rank, child), daemon=True).start()
        return Place(0, self.size, f"tcp://127.0.0.1:{port}")

    def __exit__(self, *_: object) -> None:
        self._ending = True
        for child in self._running:
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                log.warning("a follower did not end within %s s and is killed", END_S)
                child.kill()
                child.wait()

    def _watch(self, rank: int, child: "subprocess.Popen[bytes]") -> None:
        code = child.wait()
        if code and not self._ending:  # its own words are in the log above
            log.error("rank %d of %d has ended with exit code %d", rank, self.size, code)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
