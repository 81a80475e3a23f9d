"""Servers as a user starts them, one role each, and routers in front of them. Owns the processes:
all logs are kept, and none is left behind."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.fixtures.servers import free_port

FLAGS = (
    "--page-tokens", "16", "--dtype", "float32", "--device-memory", "584KiB",
    "--host-memory", "1280KiB", "--max-running", "16", "--step-tokens", "256",
    "--chunk-tokens", "64", "--chat-tokens", "256", "--threads", "1",
    "--served-model-name", "tiny",
)  # fmt: skip
LISTENS = re.compile(r"^stratakv: listening on (http://\S+)$", re.MULTILINE)
BIN = Path(sys.executable).parent


@dataclass
class Started:
    process: subprocess.Popen
    log: Path
    line: tuple[str, ...]
    url: str

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def answers(self) -> bool:
        assert self.process.poll() is None, self.text()
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=PATIENCE_S).status_code == 200
        return False

    def kill(self) -> None:
        """As the kernel does where memory is out."""
        self.process.kill()
        self.process.wait()


class Fleet:
    """``start`` begins and does not wait: several start at once."""

    def __init__(self, logs: Path, undo: ExitStack) -> None:
        self._logs, self._undo = logs, undo
        self._count = 0

    def start(self, port: int, *line: str, host: str = "127.0.0.1") -> Started:
        self._count += 1
        log = self._logs / f"{self._count}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._undo.callback(process.wait)
        self._undo.callback(process.kill)
        return Started(process, log, line, f"http://{host}:{port}")

    def server(self, model: Path, *flags: str) -> Started:
        port = free_port()
        command = (str(BIN / "stratakv"), "serve", str(model), *FLAGS, "--port", str(port))
        return self.start(port, *command, *flags)

    def again(self, gone: Started) -> Started:
        """The same, after its end."""
        return self.start(int(gone.url.rpartition(":")[2]), *gone.line)


def ready(*started: Started) -> None:
    for one in started:
        wait_until(one.answers, f"{one.line[1]} that listens")


def metric(started: Started, name: str) -> float:
    text = httpx.get(f"{started.url}/metrics", timeout=PATIENCE_S).text
    found = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    assert len(found) == 1, (name, text)
    return float(found[0].rpartition(" ")[2])
