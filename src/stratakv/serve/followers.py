"""The processes of ranks 1 and up on this machine, as rank 0 has started them.

Owns their start, their end, and who notifies whom of an end that nobody asked for: rank 0 sees its
children end, and a child sees the end of a pipe that only rank 0 holds. While ranks start, either
ends the other at once; later the lost collective does, and this only where it does not. Ctrl-C in a
terminal is for rank 0, which notifies the others. Must not know what ranks do.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Self

from stratakv.core.errors import ConfigError
from stratakv.core.logs import last_words

log = logging.getLogger(__name__)

END_S: Final = 30.0
"""What followers get to end when rank 0 has: to write what is queued for storage, above all."""
LOST_S: Final = 10.0
"""The same where rank 0 has not ended well: they have lost each other at about the same time."""
GRACE_S: Final = 3.0
"""A rank that cannot start gets that long to say why itself."""
LEASH: Final = "STRATAKV_LEASH"
"""Set for a process whose standard input ends with rank 0."""
INTERRUPTED: Final = 130


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True, eq=False)
class RankPlace:
    """``address``: where the ranks meet. ``listener``: the socket that listens there, where this
    process has it. ``up``: set once all of them have all they need. ``abandon``: end whom this
    process has started, at once and without a word."""

    rank: int
    size: int
    address: str
    listener: socket.socket | None = None
    up: threading.Event = field(default_factory=threading.Event)
    abandon: Callable[[], None] = _nothing


def launched(size: int) -> RankPlace | None:
    """Where a launcher has put this process; None where none has started it. ConfigError where it
    has started another number of ranks than ``--tp`` says."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    place = f"RANK={os.environ['RANK']} WORLD_SIZE={os.environ['WORLD_SIZE']}"
    try:
        rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError:
        rank, started = -1, 0
    if not 0 <= rank < started:
        raise ConfigError(f"{place}: allowed are numbers as a launcher sets them, or none at all")
    if started != size:
        raise ConfigError(
            f"--tp {size}: the launcher has started {started} ranks; allowed is --tp {started}"
        )
    if size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ConfigError(
            "RANK and WORLD_SIZE are set, MASTER_ADDR and MASTER_PORT are not: allowed are all of "
            "them, as torchrun sets them, or none"
        )
    return RankPlace(rank, size, "env://")


def hold_leash(place: RankPlace) -> None:
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


@contextmanager
def ended_by_interrupt(place: RankPlace) -> Generator[None]:
    """Ctrl-C ends this process at once while it starts, and those that it has started. Python's own
    handler would have to wait for the collective that the main thread is in, which waits for ranks
    that may not come. A child of rank 0 receives no Ctrl-C."""
    reader, writer = socket.socketpair()

    def wait() -> None:
        with reader:
            if reader.recv(1):
                last_words("interrupted")
                place.abandon()
                os._exit(INTERRUPTED)

    threading.Thread(target=wait, daemon=True).start()
    writer.settimeout(0)  # as the wakeup descriptor must be
    answer = signal.signal(signal.SIGINT, _nothing)  # but the byte
    before = signal.set_wakeup_fd(writer.fileno())
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGINT, answer)
        writer.close()  # which ends the thread


@dataclass(slots=True, eq=False)
class Followers:
    """Ranks 1 and up, as children of this process; a context manager. Each runs the same command
    line, and finds its rank in the environment, as under torchrun."""

    line: Sequence[str]
    size: int
    place: RankPlace = field(init=False)
    _running: list["subprocess.Popen[bytes]"] = field(
        default_factory=list["subprocess.Popen[bytes]"], init=False
    )
    _ending: bool = field(default=False, init=False)
    _well: bool = field(default=False, init=False)

    def __enter__(self) -> Self:
        listener = socket.create_server(("127.0.0.1", 0))  # nobody else gets its port meanwhile
        port = str(listener.getsockname()[1])
        address = f"tcp://127.0.0.1:{port}"
        self.place = RankPlace(0, self.size, address, listener, abandon=self.abandon)
        command = [sys.executable, "-m", "stratakv", *self.line]
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, LEASH: "stdin"}
        # They inherit it: a terminal sends Ctrl-C to all, from before they could say so themselves.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for rank in range(1, self.size):
                named = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.size)}
                env = os.environ | named | meet
                child = subprocess.Popen(command, stdin=subprocess.PIPE, env=env)
                self._running.append(child)
                threading.Thread(target=self._watch, args=(rank, child), daemon=True).start()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException:
            self.abandon()
            listener.close()
            raise
        return self

    def ended(self, code: int) -> None:
        """Rank 0 has, with that exit code: the others have ended well if it has."""
        self._well = code == 0

    def __exit__(self, *_: object) -> None:
        assert self.place.listener is not None
        self.place.listener.close()  # where the ranks have not met
        if not self.place.up.is_set():  # nothing was served or stored
            self.abandon()
        self._ending = True
        for child in self._running:
            assert child.stdin is not None
            child.stdin.close()
        patience_s = END_S if self._well else LOST_S
        for rank, child in enumerate(self._running, 1):
            try:
                child.wait(patience_s)
            except subprocess.TimeoutExpired:
                log.warning("rank %d did not end within %g s and is killed", rank, patience_s)
                child.kill()
                child.wait()

    def abandon(self) -> None:
        self._ending = True
        for child in self._running:
            child.kill()
        for child in self._running:
            child.wait()

    def _watch(self, rank: int, child: "subprocess.Popen[bytes]") -> None:
        code = child.wait()
        if self._ending or (code == 0 and self.place.up.is_set()):
            return
        log.error("rank %d of %d has ended: %s", rank, self.size, _description(code))
        if self.place.up.is_set():  # the next collective fails, and clients get errors
            return
        threading.Event().wait(GRACE_S)
        if not self._ending:
            log.error("the ranks could not start without it")
            self.abandon()
            os._exit(1)  # the main thread waits in a collective; nothing was served or stored


def _description(code: int) -> str:
    """``code``: as ``Popen`` has it."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
