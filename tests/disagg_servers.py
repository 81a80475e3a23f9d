"""Servers of one role each, and routers in front of them. Owns the processes: all logs are kept,
and none is left behind. Ours come from the fork server, so that none imports again."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.fixtures.servers import free_port
from tests.rank_processes import Forked, forked
from tests.real_server import SMALL_FLAGS
from tests.scraped import scraped

FLAGS = (*SMALL_FLAGS, "--served-model-name", "tiny")
TAIL_CHARS = 4000
BIN = Path(sys.executable).parent


@dataclass
class Started:
    """``line``: what it was started with, a program or words of ``stratakv``."""

    process: subprocess.Popen | Forked
    log: Path
    line: tuple[str, ...]
    url: str
    killed: bool = False

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        """The end of its log, for who has to find out what it was doing."""
        return f"{self.log} ends with:\n{self.text()[-TAIL_CHARS:]}"

    def cpu_s(self) -> float:
        """What it has had of the processor."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def ready(self) -> None:
        """Once it answers. Its start is work of seconds, for which a crowded machine may take
        minutes: what is bounded is a time in which it gets no second of the processor, and all
        that it gets."""
        used_s = 0.0
        while True:
            try:
                wait_until(lambda: self.has_ended() or self.answers(), "a server that listens")
                break
            except AssertionError as error:
                before_s, used_s = used_s, self.cpu_s()
                if used_s < before_s + 1 or used_s > PATIENCE_S:
                    raise AssertionError(
                        f"{error}\n{used_s:.1f} s of CPU, {self.tail()}"
                    ) from error
        assert not self.has_ended(), f"it has ended, {self.tail()}"

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def answers(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=PATIENCE_S).status_code == 200
        return False

    def kill(self) -> None:
        """As the kernel does where memory is out."""
        self.killed = True
        self.process.kill()
        self.process.wait()


class Fleet:
    """``start`` begins and does not wait: several start at once."""

    def __init__(self, logs: Path, undo: ExitStack) -> None:
        self._logs, self._undo = logs, undo
        self._started: list[Started] = []

    @contextmanager
    def tails(self) -> Iterator[None]:
        """What fails within shows how the logs of all servers end that no test has killed."""
        try:
            yield
        except AssertionError as error:
            ends = [one.tail() for one in self._started if not one.killed]
            raise AssertionError("\n".join([str(error), *ends])) from error

    def start(self, port: int, *line: str) -> Started:
        """Any program."""
        log = self._next_log()
        around = os.environ | {"OMP_NUM_THREADS": "1"}
        around.pop("PYTHONDONTWRITEBYTECODE", None)  # each start would compile all it imports
        with log.open("wb") as out:
            process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=around
            )
        return self._begun(Started(process, log, line, f"http://127.0.0.1:{port}"))

    def stratakv(
        self, port: int, *words: str, host: str = "127.0.0.1", inside: str | None = None
    ) -> Started:
        """The command with ``words``, on ``port``. ``inside``: a network namespace."""
        log = self._next_log()
        process = forked([*words, "--port", str(port)], log, inside)
        return self._begun(Started(process, log, words, f"http://{host}:{port}"))

    def server(self, model: Path, *flags: str) -> Started:
        return self.stratakv(free_port(), "serve", str(model), *FLAGS, *flags)

    def again(self, gone: Started) -> Started:
        """The same server of ours, after its end."""
        return self.stratakv(int(gone.url.rpartition(":")[2]), *gone.line)

    def _next_log(self) -> Path:
        return self._logs / f"{len(self._started)}.log"

    def _begun(self, started: Started) -> Started:
        self._undo.callback(started.process.wait)
        self._undo.callback(started.process.kill)
        self._started.append(started)
        return started


def ready(*started: Started) -> None:
    for one in started:
        one.ready()


def metric(started: Started, name: str) -> float:
    """``name`` may have labels: ``x{state="free"}``."""
    text = httpx.get(f"{started.url}/metrics", timeout=PATIENCE_S).text
    plain, _, labels = name.partition("{")
    return scraped(text)[plain, *re.findall(r'"([^"]*)"', labels)]
