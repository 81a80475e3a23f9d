"""A process that has collected the tests and run them once, and is forked for every mutant.

Owns the children: what is changed in them, when they are given up, and what they leave behind. The
limits count processor time, so that a busy machine ends nobody; the wall's are far away.
"""

import gc
import importlib.machinery
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import _lru_cache_wrapper
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType
from typing import Final

import coverage
import pytest
from _pytest.runner import runtestprotocol

ROOT: Final = Path(__file__).resolve().parents[2]
SLOW_S: Final = 4.0
"""A test that takes longer looks for no mutants."""
CPU_S, CPU_FACTOR = 4.0, 20.0
WALL_S, WALL_FACTOR = 8.0, 15.0
ROOM_BYTES: Final = 6 << 30
"""Of address space, beyond what is in use when a child begins."""


class Verdict(Enum):
    KILLED = 1
    SURVIVED = 0
    HUNG = 2
    NOT_SWAPPED = 3


@dataclass(frozen=True, slots=True)
class Job:
    """``source``: of the whole file, mutated in the function ``name`` around ``line``."""

    path: str
    source: str
    name: str
    line: int
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Clean:
    """What the run without a mutant said: processor seconds of every test that passed, tests by
    line of every file, lines that ran before any test, and what did not pass or is too slow."""

    seconds: dict[str, float]
    tests_of: dict[str, dict[int, set[str]]]
    early: dict[str, set[int]]
    not_passed: list[str]
    modules: list[str]
    """What the tests have imported that is not of this project."""


class Tests:
    """A pytest plugin that runs every test once, then serves mutants instead of ending."""

    def __init__(self, pipe: Connection, room: str, basetemp: Path) -> None:
        self._pipe = pipe
        self._basetemp = basetemp
        self._seconds: dict[str, float] = {}
        self._bad: set[str] = set()
        self._coverage = coverage.Coverage(
            data_file=None, include=[f"{ROOT}/src/stratakv/{room}/*"], config_file=False
        )
        self._coverage.start()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped:
            self._bad.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        order = list(items.values())
        for item, following in zip(order, [*order[1:], None], strict=True):
            self._coverage.switch_context(item.nodeid)
            begun_s = time.process_time()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self._seconds[item.nodeid] = time.process_time() - begun_s
        self._coverage.stop()
        self._pipe.send(self._clean())
        forget_caches()
        functions = functions_by_place()
        gc.freeze()
        while (job := self._next()) is not None:
            chosen = [items[name] for name in job.tests]
            seconds = self._seconds
            verdict, killer = forked(lambda write: _swapped(job, functions, chosen, seconds, write))  # noqa: B023
            for left in self._basetemp.glob("*"):
                shutil.rmtree(left, ignore_errors=True)
            self._pipe.send((verdict, killer))
        return True

    def _next(self) -> Job | None:
        try:
            return self._pipe.recv()
        except EOFError:
            return None

    def _clean(self) -> Clean:
        data = self._coverage.get_data()
        tests_of: dict[str, dict[int, set[str]]] = {}
        early: dict[str, set[int]] = {}
        slow = {name for name, spent in self._seconds.items() if spent > SLOW_S}
        for path in data.measured_files():
            by_line = data.contexts_by_lineno(path)
            early[path] = {line for line, names in by_line.items() if "" in names}
            tests_of[path] = {
                line: set(names) - {""} - self._bad for line, names in by_line.items()
            }
        seconds = {name: spent for name, spent in self._seconds.items() if name not in self._bad}
        ours = ("stratakv", "tests", "scripts", "conftest", "_pytest", "__")
        modules = [name for name in sys.modules if not name.startswith(ours)]
        return Clean(seconds, tests_of, early, sorted(self._bad | slow), modules)


def forget_caches() -> None:
    """What was made by code without a mutant must not stand in for what a mutant would make."""
    for found in gc.get_objects():
        if type(found) is _lru_cache_wrapper and found.__module__.startswith(("stratakv", "tests")):
            found.cache_clear()


def functions_by_place() -> dict[tuple[str, str, int], list[FunctionType]]:
    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    for function in gc.get_objects():
        if type(function) is FunctionType:  # isinstance would wake proxies
            code = function.__code__
            if "/src/stratakv/" in code.co_filename:
                place = (code.co_filename, code.co_qualname, code.co_firstlineno)
                found.setdefault(place, []).append(function)
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part
            yield from _codes(part)


class FirstFailure:
    """A pytest plugin that ends the process as soon as a test fails. To say why would take longer
    than most tests do."""

    def __init__(self, report: Callable[[str], None], seconds: dict[str, float]) -> None:
        self._report, self._seconds = report, seconds

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        limit(self._seconds[item.nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.excinfo is not None:  # no test that is run here was skipped before
            self._report(item.nodeid)
            os._exit(Verdict.KILLED.value)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            os._exit(Verdict.KILLED.value)


def _swapped(
    job: Job,
    functions: dict[tuple[str, str, int], list[FunctionType]],
    items: list[pytest.Item],
    seconds: dict[str, float],
    report: Callable[[str], None],
) -> Verdict:
    """In a child: put the mutated code in place, and run tests until one fails."""
    module = compile(job.source, job.path, "exec", dont_inherit=True)
    # Of functions of one name (a property and its setter) the last that begins above the line.
    ours = [c for c in _codes(module) if c.co_qualname == job.name and c.co_firstlineno <= job.line]
    code = max(ours, key=lambda c: c.co_firstlineno, default=None)
    if code is None or (job.path, job.name, code.co_firstlineno) not in functions:
        return Verdict.NOT_SWAPPED
    for function in functions[job.path, job.name, code.co_firstlineno]:
        if function.__code__.co_freevars != code.co_freevars:
            return Verdict.NOT_SWAPPED
        function.__code__ = code
    items[0].config.pluginmanager.register(FirstFailure(report, seconds))
    for item, then in zip(items, [*items[1:], None], strict=True):
        runtestprotocol(item, log=False, nextitem=then)
    return Verdict.SURVIVED


def limit(seconds: float) -> None:
    """A test that took ``seconds`` ends this process where it takes a lot longer now."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S + CPU_FACTOR * seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL_S + WALL_FACTOR * seconds)


def forked(work: Callable[[Callable[[str], None]], Verdict]) -> tuple[Verdict, str]:
    """Do ``work`` in a child of its own group; also, the test that it says found the mutant."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        _alone(work, writer)
    os.close(writer)
    with os.fdopen(reader) as words:
        killer = words.read()
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it had started
    if os.WIFSIGNALED(status):
        times = {signal.SIGPROF, signal.SIGALRM, signal.SIGXCPU}
        return (Verdict.HUNG if os.WTERMSIG(status) in times else Verdict.KILLED), killer
    return Verdict(os.WEXITSTATUS(status)), killer


def _alone(work: Callable[[Callable[[str], None]], Verdict], writer: int) -> None:
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    limit(10.0)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    verdict = Verdict.KILLED
    try:
        verdict = work(lambda text: void(os.write(writer, text.encode())))
    except BaseException:  # noqa: BLE001 - whatever a mutant does, it ends here
        verdict = Verdict.KILLED
    finally:
        os._exit(verdict.value)


def void(_: object) -> None: ...


def arguments(basetemp: Path) -> list[str]:
    return [
        "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-s", "-m", "not long", "--assert=plain",
        "--hypothesis-profile=mutants", f"--basetemp={basetemp}",
    ]  # fmt: skip


def serve(
    pipe: Connection, theirs: Connection, room: str, files: list[str], basetemp: Path
) -> None:
    """In the zygote: until None comes, or who asks is gone and has left ``theirs`` closed."""
    theirs.close()
    output = basetemp.with_name("output.txt")
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    code = pytest.main([*arguments(basetemp), *files], [Tests(pipe, room, basetemp)])
    if code:
        pipe.send("\n".join(output.read_text().splitlines()[-30:]) or f"pytest ended with {code}")
    os._exit(0)


def imported(job: Job, seconds: dict[str, float], basetemp: Path) -> tuple[Verdict, str]:
    """The verdict on a mutant that is there from the first import on."""

    def work(report: Callable[[str], None]) -> Verdict:
        real = importlib.machinery.SourceFileLoader.get_code

        def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
            if loader.path == job.path:
                return compile(job.source, job.path, "exec", dont_inherit=True)
            return real(loader, name)

        importlib.machinery.SourceFileLoader.get_code = get_code
        plugin = FirstFailure(report, seconds)
        code = pytest.main([*arguments(basetemp), *job.tests], [plugin])
        return Verdict.KILLED if code else Verdict.SURVIVED

    assert not [name for name in sys.modules if name.split(".")[0] == "stratakv"]
    found = forked(work)
    shutil.rmtree(basetemp, ignore_errors=True)
    return found
