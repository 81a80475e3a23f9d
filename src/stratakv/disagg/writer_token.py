"""Whether another process of this machine may still write into our memory.

Through shared memory a writer's own process copies the bytes: what the written side tears down
stops nobody. So each link holds an open file for as long as it may write, and its peer looks
whether that is closed. The kernel closes it with the process, however that ends.

Owns the file and the question. Linux only.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_OUR_PIDS: Final = Path("/proc/self/ns/pid")


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """Where to look for a token. ``machine``: boot and name space of process ids."""

    machine: str
    pid: int
    file: int
    name: str


class WriterToken:
    """Open until ``close``. ``name`` differs from that of every other token."""

    def __init__(self, name: str) -> None:
        self._file = os.memfd_create(name, os.MFD_CLOEXEC)
        self.place = TokenPlace(_machine(), os.getpid(), self._file, name)

    def close(self) -> None:
        """Its owner writes no more. Twice is once."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def may_write(place: TokenPlace) -> bool:
    """Whether the token is open. Not, of a process of another machine or container: no memory is
    shared with that."""
    if place.machine != _machine():
        return False
    link = f"/proc/{place.pid}/fd/{place.file}"
    try:
        return os.readlink(link).startswith(f"/memfd:{place.name} ")
    except FileNotFoundError:
        return False
    except OSError:
        # A process whose files we may not see may be the one.
        return Path(f"/proc/{place.pid}").exists()


def _machine() -> str:
    return f"{_BOOT_ID.read_text().strip()} {_OUR_PIDS.readlink()}"
