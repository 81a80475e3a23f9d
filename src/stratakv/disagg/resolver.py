"""Looks hosts up in bounded time. The system waits for its name servers as long as it likes, and a
client names the host.

Owns the threads that wait for them: one for a host however often that is asked for, and so many at
a time; one whose asker has left ends when the system gives up. An address needs none.
"""

import socket
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from threading import Lock, Thread
from typing import TypeAlias

Addresses: TypeAlias = Sequence[str]


def start(thread: Thread) -> None:
    """OSError where the system has none left. Who waits for other machines is a daemon, and none of
    a pool: for those the process would wait at its end."""
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(str(error)) from error


class Resolver:
    """``most``: hosts that are looked up at a time; one more is an error at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = Lock()
        self._under_way: dict[str, Future[Addresses]] = {}

    def addresses(self, host: str, timeout_s: float) -> Addresses | None:
        """In the order in which they are to be tried; None: not within ``timeout_s``. OSError where
        it has none."""
        with suppress(OSError, ValueError):
            return _addresses(host, socket.AI_NUMERICHOST)
        found = self._look_up_once(host)
        return found.result() if wait([found], timeout_s).done else None

    def _look_up_once(self, host: str) -> "Future[Addresses]":
        with self._lock:
            found = self._under_way.get(host)
            if found is None:
                if len(self._under_way) == self._most:
                    raise OSError(f"{self._most} hosts are being looked up already")
                found = Future()
                name = "stratakv-resolve"
                start(Thread(target=self._look_up, args=(host, found), name=name, daemon=True))
                self._under_way[host] = found
            return found

    def _look_up(self, host: str, found: "Future[Addresses]") -> None:
        try:
            addresses = _addresses(host, 0)
        except (OSError, ValueError) as error:
            found.set_exception(OSError(str(error) or repr(error)))
        else:
            found.set_result(addresses)
        finally:
            with self._lock:
                del self._under_way[host]


def _addresses(host: str, flags: int) -> Addresses:
    """ValueError where no host could have that name."""
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    return [str(address[0]) for *_, address in infos]
