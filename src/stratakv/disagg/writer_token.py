"""Whether another process of this machine may still write into our memory.

Through shared memory a writer's own process copies the bytes: what the written side tears down
stops nobody. So each link holds an open file for as long as it may write, and its peer looks
whether that is closed. The kernel closes it with the process, however that ends.

What a peer says of its file is believed only where that is open as it is met, is no file of ours
that is no token, and can be looked at; else nobody would know when its link has ended.

Owns the file and the question. Linux only.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stratakv.core.errors import TransportError

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_OUR_PIDS: Final = Path("/proc/self/ns/pid")
_BORN: Final = 19
"""Among the fields of a process's ``stat`` behind its name: when it began, in ticks."""


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """Where to look for a token. ``machine``: boot and name space of process ids."""

    machine: str
    pid: int
    file: int
    name: str


_open: Final[set[TokenPlace]] = set()
"""Tokens of this process."""


class WriterToken:
    """Open until ``close``. ``name`` differs from that of every other token."""

    def __init__(self, name: str) -> None:
        self._file = os.memfd_create(name, os.MFD_CLOEXEC)
        self.place = TokenPlace(_machine(), os.getpid(), self._file, name)
        _open.add(self.place)

    def close(self) -> None:
        """Its owner writes no more. Twice is once."""
        file, self._file = self._file, -1
        if file >= 0:
            _open.discard(self.place)
            os.close(file)


def watched(place: TokenPlace) -> Callable[[], bool]:
    """Asks whether a peer with this token may still write here. Never, of a process of another
    machine or container: no memory is shared with that. TransportError where the token is not open,
    or nobody could say when it is closed."""
    if place.machine != _machine():
        return _never
    if place.pid == os.getpid():
        if place not in _open:
            raise TransportError("its token is none of this process's, whose number it has")
        return lambda: place in _open
    born = _born(place.pid)
    try:
        found = _is_open(place)
    except OSError as error:
        message = f"process {place.pid} cannot be looked into ({error.strerror}), so nobody could "
        message += "say when it writes no more: allowed are servers of one user, or transports "
        raise TransportError(message + "without shared memory") from None
    if not found or born is None:
        raise TransportError(f"process {place.pid} has no such token open")
    return lambda: _born(place.pid) == born and _may_be_open(place)


def _never() -> bool:
    return False


def _is_open(place: TokenPlace) -> bool:
    try:
        link = os.readlink(f"/proc/{place.pid}/fd/{place.file}")
    except FileNotFoundError:
        return False
    return link.startswith(f"/memfd:{place.name} ")


def _may_be_open(place: TokenPlace) -> bool:
    try:
        return _is_open(place)
    except OSError:
        return True  # it could be looked at before, and is the same process


def _born(pid: int) -> str | None:
    """When a process began; None where there is none that runs. Its number may be another's by
    then."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[_BORN]


def _machine() -> str:
    return f"{_BOOT_ID.read_text().strip()} {_OUR_PIDS.readlink()}"
