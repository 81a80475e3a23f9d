"""Servers of several ranks as an operator starts them: real processes, each with a limit.

Owns their start, who is who among them, and that none outlives a test: what a server has started
is killed with it, whatever happened. ``launched`` ranks are what a launcher on several machines has
started, without the launcher, and without the seconds that imports take.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx
import torch

from stratakv.cli import main
from stratakv.serve import route, route_servers
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.fixtures.servers import free_port
from tests.forks import fork_server

FLAGS = (
    "--port", "0", "--page-tokens", "16", "--dtype", "float32", "--device-memory", "3MiB",
    "--host-memory", "4MiB", "--max-running", "8", "--step-tokens", "256", "--threads", "1",
    "--prefetch-policy", "wait-complete", "--prefetch-threshold", "16",
)  # fmt: skip
STRATAKV = (sys.executable, "-m", "stratakv")
MARK = "STRATAKV_TEST_SERVER"
"""In the environment of a server and of all that it starts, whatever groups they make."""
COMPLETIONS = "/v1/completions"
LISTENS = re.compile(r"^stratakv: listening on (http://\S+)$", re.MULTILINE)


class Listening:
    """What a client asks of a server. ``url``: None before it listens."""

    url: str | None = None

    def ask(self, prompt: list[int], count: int = 8) -> tuple[str, int]:
        """The answer, and how many tokens of the prompt came from storage."""
        answer = httpx.post(self.url + COMPLETIONS, json=body(prompt, count), timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        tiers = whole["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
        return whole["choices"][0]["text"], tiers["storage"]

    def stored(self) -> bool:
        """Whether nothing is on its way to be written any more, on any rank."""
        headers = {"Authorization": "Bearer k"}
        storage = self.url + "/cache/storage"
        found = httpx.get(storage, headers=headers, timeout=PATIENCE_S).json()
        return found["pages"]["stored"] > 0 and not found["busy"]


@dataclass
class Ranked(Listening):
    """``before``: what it printed until it listened."""

    process: subprocess.Popen
    log: Path
    mark: str
    before: list[str] = field(default_factory=list)

    def listen(self) -> "Ranked":
        """Wait until requests are taken."""
        for line in self.process.stdout:
            if found := LISTENS.match(line):
                self.url = found[1]
                return self
            self.before.append(line)
        raise AssertionError(f"no server: {self.logged()}")

    def logged(self) -> str:
        return self.log.read_text()

    def ends(self) -> int:
        """Its exit code, once everyone whom it has started has ended too."""
        code = self.process.wait(PATIENCE_S)
        wait_until(lambda: not self.alive(), f"the end of all that {self.process.pid} has started")
        return code

    def first_follower(self) -> int:
        """Wait until there is one; imports come before it."""

        def is_there() -> bool:
            assert self.process.poll() is None, self.logged()
            return bool(self.followers())

        wait_until(is_there, "a follower")
        return self.followers()[0]

    def alive(self) -> list[int]:
        """It, and everyone whom it has started, by age."""
        return marked(self.mark)

    def followers(self) -> list[int]:
        return [pid for pid in self.alive() if environment(pid).get("RANK", "0") != "0"]


CLONE_NEWNET = 0x40000000
MINUTE_S = PATIENCE_S / 5
SILENCE_S = 10
"""``--tp-timeout`` where a rank hangs on purpose: the others step every 2.5 s or more often, and so
must be kept waiting for that long by the machine alone before one of them counts as lost."""


def body(prompt: list[int], count: int, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, **more}


def marked(mark: str) -> list[int]:
    """Processes that run, not those that only wait for somebody to ask for their exit code."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return sorted(pid for pid in pids if environment(pid).get(MARK) == mark)


def end_all(mark: str) -> None:
    def none_is_left() -> bool:
        left = marked(mark)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    wait_until(none_is_left, "the end of all")


def environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode()
    except OSError:
        return {}
    return dict(part.split("=", 1) for part in text.split("\0") if "=" in part)


@contextmanager
def started(
    words: list[object],
    log: Path,
    command: tuple[object, ...] = STRATAKV,
    *,
    in_terminal: bool = False,
    lives_s: float = 2 * PATIENCE_S,
    **more: str,
) -> Iterator[Ranked]:
    """``command`` with ``words``, in an environment with ``more``; nobody has waited for it. It is
    killed after ``lives_s``, whatever becomes of the test.
    ``in_terminal``: all it starts can be sent Ctrl-C together."""
    mark = uuid.uuid4().hex
    # A test run that is killed takes its servers with it.
    leash = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [*leash, *map(str, command), *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0 if in_terminal else None,
            env=os.environ | {"OMP_NUM_THREADS": "1", MARK: mark} | more,
        )
    limit = threading.Timer(lives_s, end_all, [mark])
    limit.start()
    try:
        yield Ranked(process, log, mark)
    finally:
        limit.cancel()
        end_all(mark)
        process.communicate(timeout=PATIENCE_S)


@dataclass
class Launched(Listening):
    """By rank: its process, and the file of what it says."""

    processes: list[BaseProcess] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    def listen(self) -> "Launched":
        def listens() -> bool:
            found = LISTENS.search(self.logged(0))
            assert found or all(process.is_alive() for process in self.processes), self.all_logged()
            self.url = found and found[1]
            return found is not None

        wait_until(listens, "rank 0, listening,")
        return self

    def logged(self, rank: int) -> str:
        return self.logs[rank].read_text()

    def last_words(self, rank: int) -> str:
        """Why it has ended. Other threads may have logged behind that."""
        lines = self.logged(rank).splitlines()
        return [line for line in lines if line.startswith("stratakv: ")][-1]

    def all_logged(self) -> str:
        return "\n".join(f"rank {rank}: {self.logged(rank)}" for rank in range(len(self.logs)))

    def ends(self, rank: int) -> int:
        """Its exit code."""
        process = self.processes[rank]
        process.join(PATIENCE_S)
        assert process.exitcode is not None, f"rank {rank} is left: {self.all_logged()}"
        return process.exitcode


@contextmanager
def launched(words: list[list[object]], folder: Path) -> Iterator[Launched]:
    """Every rank's own ``words``, as on machines of their own; nobody has waited for them."""
    context = fork_server()
    ranks, meet = Launched(), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    try:
        for rank, mine in enumerate(words):
            log = folder / f"rank{rank}"
            log.touch()
            place = meet | {"RANK": str(rank), "WORLD_SIZE": str(len(words))}
            process = context.Process(target=_launched, args=([*map(str, mine)], log, place))
            process.start()
            ranks.processes.append(process)
            ranks.logs.append(log)
        yield ranks
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


def _launched(words: list[str], log: Path, place: dict[str, str]) -> None:
    os.environ.update(place)
    run_command(words, log)


class Forked:
    """A process of the fork server, with the verbs of ``subprocess.Popen``."""

    def __init__(self, process: BaseProcess) -> None:
        process.start()
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        """Its exit code."""
        self._process.join(PATIENCE_S)
        assert self._process.exitcode is not None, f"{self.pid} has not ended"
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def forked(words: list[object], log: Path, inside: str | None = None) -> Forked:
    """``stratakv`` with ``words``; what it prints goes to ``log`` too. ``inside``: a network
    namespace."""
    log.touch()
    given = [*map(str, words)], log, inside
    return Forked(fork_server().Process(target=run_command, args=given))


def run_command(words: list[str], log: Path, inside: str | None = None) -> None:
    """What a process of the fork server does that is ``stratakv`` with ``words``. A router holds
    nobody for dead whom a crowded machine keeps waiting: that would be 502."""
    if inside is not None:
        with Path("/run/netns", inside).open("rb") as place:
            assert ctypes.CDLL(None).setns(place.fileno(), CLONE_NEWNET) == 0
    route.CONNECT_S, route_servers.PROBE = MINUTE_S, httpx.Timeout(MINUTE_S)
    with log.open("ab") as mine:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(mine.fileno(), stream.fileno())
    torch.set_num_threads(1)
    sys.exit(main(words))


@contextmanager
def streaming(server: Ranked | Launched, prompt: list[int], count: int) -> Iterator[Iterator[str]]:
    """The lines of an answer of which the first has come."""
    with httpx.Client(timeout=PATIENCE_S) as http:
        asked = body(prompt, count, stream=True)
        with http.stream("POST", server.url + COMPLETIONS, json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)
            yield lines
