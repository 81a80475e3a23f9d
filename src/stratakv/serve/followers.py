"""The processes of ranks 1 and up on this machine, as rank 0 has started them.

Owns their start, their end, and who tells whom of an end that nobody asked for: rank 0 sees its
children end, and a child sees the end of a pipe that only rank 0 holds. While ranks start, either
ends the other at once; later the lost collective does, and this only where it does not. Must not
know what ranks do.
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
from typing import Final, Self

from stratakv.core.errors import ConfigError

log = logging.getLogger(__name__)

END_S: Final = 30.0
"""What followers get to end when rank 0 has: to write what is queued for storage, above all."""
LOST_S: Final = 10.0
"""The same where rank 0 has not ended well: they have lost each other at about the same time."""
GRACE_S: Final = 3.0
"""A rank that cannot start gets that long to say why itself."""
LEASH: Final = "STRATAKV_LEASH"
"""Set for a process whose standard input ends with rank 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """``address``: where the ranks meet. ``up``: set once all of them have all they need."""

    rank: int
    size: int
    address: str
    up: threading.Event = field(default_factory=threading.Event)


def launched(size: int) -> Place | None:
    """Where a launcher has put this process; None where none has started it. ConfigError where it
    has started another number of ranks than ``--tp`` says."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if started != size:
        raise ConfigError(
            f"--tp {size}: the launcher has started {started} ranks; allowed is --tp {started}"
        )
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise ConfigError(
            "RANK and WORLD_SIZE are set, MASTER_ADDR and MASTER_PORT are not: allowed are all of "
            "them, as torchrun sets them, or none"
        )
    return Place(rank, size, "env://")


def hold_leash(place: Place) -> None:
    """End this process when the rank 0 that has started it is gone. Nothing where a launcher has:
    ends are its business then."""
    if LEASH not in os.environ:
        return

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        if place.up.is_set():  # its own loop knows, and may be writing to storage
            threading.Event().wait(END_S)
        log.error("rank 0 has ended; rank %d of %d ends too", place.rank, place.size)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@dataclass(slots=True, eq=False)
class Followers:
    """Ranks 1 and up, as children of this process; a context manager. Each runs the same command
    line, and finds its rank in the environment, as under torchrun. ``well``: whether rank 0 has
    ended as it should, which is what whoever runs it says."""

    line: Sequence[str]
    size: int
    well: bool = field(default=False, init=False)
    place: Place = field(init=False)
    _running: list["subprocess.Popen[bytes]"] = field(
        default_factory=list["subprocess.Popen[bytes]"], init=False
    )
    _ending: bool = field(default=False, init=False)

    def __enter__(self) -> Self:
        port = str(_free_port())
        self.place = Place(0, self.size, f"tcp://127.0.0.1:{port}")
        command = [sys.executable, "-m", "stratakv", *self.line]
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, LEASH: "stdin"}
        for rank in range(1, self.size):
            named = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.size)}
            child = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | named | meet)
            self._running.append(child)
            threading.Thread(target=self._watch, args=(rank, child), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        for child in self._running:
            assert child.stdin is not None
            child.stdin.close()
        patience_s = END_S if self.well else LOST_S
        for rank, child in enumerate(self._running, 1):
            try:
                child.wait(patience_s)
            except subprocess.TimeoutExpired:
                log.warning("rank %d did not end within %g s and is killed", rank, patience_s)
                child.kill()
                child.wait()

    def _watch(self, rank: int, child: "subprocess.Popen[bytes]") -> None:
        code = child.wait()
        if self._ending or (code == 0 and self.place.up.is_set()):
            return
        log.error("rank %d of %d has ended: %s", rank, self.size, _told(code))
        if self.place.up.is_set():  # the next collective fails, and clients are told
            return
        threading.Event().wait(GRACE_S)
        if not self._ending:
            log.error("the ranks could not start without it")
            os._exit(1)  # the main thread waits in a collective; nothing was served or stored


def _told(code: int) -> str:
    """``code``: as ``Popen`` has it."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
