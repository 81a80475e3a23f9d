"""Starts and stops ``stratakv serve``. Owns the processes and their logs; knows no conversation."""

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

READY: Final = re.compile(r"^stratakv: listening on (http://\S+)$", re.MULTILINE)
BUDGET: Final = re.compile(r"^pages of .*?^total [^\n]*$", re.MULTILINE | re.DOTALL)
PATIENCE_S: Final = 300.0
"""Against a hang; a machine that is ten times slower needs less."""
START_S: Final = PATIENCE_S
STOP_S: Final = PATIENCE_S
POLL_S: Final = 0.05


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that was started. ``log``: everything it prints."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def wait_ready(self) -> str:
        """The address, once requests are taken. DemoError where that does not come to pass."""
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            if found := READY.search(self.text()):
                return found[1]
            if (code := self.process.poll()) is not None:
                raise DemoError(f"the server {self.name} ended with exit code {code} at its start")
            time.sleep(POLL_S)
        raise DemoError(f"the server {self.name} did not listen within {START_S:g} s")

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def budget(self) -> str:
        """The table of its pools that a server prints at its start."""
        found = BUDGET.search(self.text())
        return found[0] if found else ""

    def stop(self) -> int:
        """SIGTERM, then the exit code; killed, and so not 0, where it does not end."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass  # ended below
        finally:
            self.process.kill()
            code = self.process.wait()
        return code


class Servers:
    """All servers of a run; leaving the context stops every one, whatever has happened."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.started: list[Server] = []
        self.exit_codes: dict[str, int] = {}

    def start(self, name: str, model: Path, *flags: str) -> Server:
        """Begin to start a server; ``wait_ready`` tells when it is."""
        log = self._logs / f"{name.replace(' ', '-')}.log"
        command = [str(executable()), "serve", str(model), *flags]
        with uninterrupted(), log.open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
            self.started.append(Server(name, process, log))
        return self.started[-1]

    def end(self, server: Server) -> None:
        """Stop one, and note how it has ended; nothing where that was done."""
        with uninterrupted():
            if server.name not in self.exit_codes:
                self.exit_codes[server.name] = server.stop()

    def stop(self) -> None:
        """Stop what still runs, and note how each has ended."""
        with uninterrupted():
            for server in self.started:
                self.end(server)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back: between a process's start and its entry in a list, or between
    the ends of two, they would leave a server behind. They take effect when the block ends."""
    came: list[int] = []
    usual = {
        number: signal.signal(number, lambda number, _frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def executable() -> Path:
    """The ``stratakv`` command of this Python's environment."""
    beside = Path(sys.executable).with_name("stratakv")
    found = str(beside) if beside.exists() else shutil.which("stratakv")
    if found is None:
        raise DemoError("the command 'stratakv' is not installed; 'make demo' installs it")
    return Path(found)
