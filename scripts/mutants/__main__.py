"""``python -m scripts.mutants [PACKAGE ...]``: run what has not been run, and print what is known.

Stop it at any moment: results are written every half minute, and it goes on where it was.
"""

import argparse
import importlib
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from scripts.mutants.mutations import Mutant
from scripts.mutants.results import Results
from scripts.mutants.rooms import LEFT_OUT, TESTS, files_of
from scripts.mutants.scores import verdict
from scripts.mutants.zygote import ROOT, Clean, Job, Verdict, imported, serve

WRITE_S: Final = 30.0
BUDGET_S: Final = 5.0
"""Processor seconds, as the clean run took them, of all tests that look for one mutant."""
TEST_S: Final = 5e-3
"""What a test costs beside itself."""
WALKS: Final = "tests/mutants/"
MEMORY: Final = Path("/dev/shm")
"""Where stores of the tests lie, if it is there: on a disk they wait longer than they compute."""
HEAVY: Final = ("torch", "numpy", "hypothesis", "xxhash", "pytest")
"""Imported before anything is forked, so that no child has to."""


@dataclass(slots=True)
class Room:
    """A package whose tests have been collected and have passed."""

    results: Results
    clean: Clean
    pipe: Connection
    scratch: Path
    whole: bool
    """Whether all tests of the room look; else only what they kill is known of a mutant."""
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    tries: Counter[str] = field(default_factory=Counter)

    def judge(self, name: str, mutant: Mutant) -> Verdict:
        """Of a mutant of the function ``name``."""
        path = str(mutant.path)
        by_line = self.clean.tests_of.get(path, {})
        lines = set(mutant.lines)
        near = set().union(*(by_line.get(line, set()) for line in lines))
        verdict = Verdict.NOT_SWAPPED
        job = Job(path, mutant.source(), mutant.function, mutant.lines.start, ())
        if mutant.swappable and near:
            verdict = self._swapped(job, name, self._ordered(name, near))
        if not self.whole:
            return verdict
        early = bool(lines & self.clean.early.get(path, set()))
        if verdict is Verdict.NOT_SWAPPED or (verdict is Verdict.SURVIVED and early):
            of_file = set[str]().union(*by_line.values())
            tests = near or of_file
            if early:  # what was made while importing may be used by who runs no line of the file
                tests = set(self.clean.seconds)
            verdict = self._imported(job, name, self._ordered(name, tests, of_file))
        return verdict

    def _imported(self, job: Job, name: str, tests: tuple[str, ...]) -> Verdict:
        """First those alone that killed a mutant of ``name``: most of the time of a run is that of
        collecting the tests anew."""
        self._prepare()
        likely = tuple(test for test in tests if self.kills[name, test])[:2]
        verdict = Verdict.SURVIVED
        for some in (likely, tests):
            if some and verdict is Verdict.SURVIVED:
                job = Job(job.path, job.source, job.name, job.line, some)
                verdict, killer = imported(job, self.clean.seconds, self.scratch / "fresh")
                self._learn(name, some, killer)
        return verdict

    def _prepare(self) -> None:
        """Import what the tests need, of others, so that no child has to."""
        for module in self.clean.modules:
            with suppress(Exception):
                importlib.import_module(module)
        self.clean.modules.clear()

    def _swapped(self, job: Job, name: str, tests: tuple[str, ...]) -> Verdict:
        self.pipe.send(Job(job.path, job.source, job.name, job.line, tests))
        verdict, killer = received(self.pipe)
        self._learn(name, tests, killer)
        return verdict

    def _learn(self, name: str, tests: tuple[str, ...], killer: str) -> None:
        """``tests`` were run for a mutant of ``name`` up to the ``killer``, if there is one."""
        last = tests.index(killer) + 1 if killer in tests else len(tests)
        self.tries.update(tests[:last])
        if killer in tests:
            self.kills[name, killer] += 1
            self.kills["", killer] += 1

    def _ordered(
        self, name: str, tests: set[str], likely: AbstractSet[str] = frozenset()
    ) -> tuple[str, ...]:
        """Before all others the ``likely`` ones; then those first that find most in their time, of
        this function and of any. Walks count for more, until they are known better. As many
        as ``BUDGET_S`` allows, and a case of every test before the many of one: what the first
        cases did not see the others seldom do."""
        seconds, kills = self.clean.seconds, self.kills

        def late(test: str) -> tuple[bool, float, str]:
            hoped = 1.0 if test.startswith(WALKS) else 0.3
            rate = (kills["", test] + hoped) / (self.tries[test] + 10) + kills[name, test]
            return test not in likely, (seconds[test] + TEST_S) / rate, test

        cases = Counter[str]()
        ranked: list[tuple[bool, float, str]] = []
        for unlikely, cost, test in sorted(map(late, tests)):
            of = test.partition("[")[0]
            cases[of] += 1
            ranked.append((unlikely, cost * cases[of], test))
        order = [test for *_, test in sorted(ranked)]
        spent = accumulate(seconds[test] for test in order)
        return tuple(test for test, sum_s in zip(order, spent, strict=True) if sum_s <= BUDGET_S)


def received(pipe: Connection) -> Any:
    """The zygote's next answer; its last words where it has ended."""
    answer = pipe.recv()
    if isinstance(answer, str):
        raise SystemExit(answer)
    return answer


def run(name: str, chosen: argparse.Namespace, until_s: float) -> None:
    results = Results(name)
    left = [
        row for row in results.left(again=chosen.again, quick=chosen.quick) if chosen.only in row[0]
    ]
    if not left or time.monotonic() >= until_s:
        return
    scratch = Path(tempfile.mkdtemp(prefix="mutants-", dir=MEMORY if MEMORY.is_dir() else None))
    here, there = Pipe()
    files = chosen.tests or files_of(name)
    given = (there, here, name, files, scratch / "swapped")
    zygote = Process(target=serve, args=given, daemon=True)
    zygote.start()
    there.close()
    try:
        clean = received(here)
        spent = sum(clean.seconds.values())
        print(
            f"{name}: {len(clean.seconds)} tests in {spent:.0f} s, {len(left)} mutants", flush=True
        )
        for test in clean.not_passed:
            print(f"  left out, skipped, failed or slow: {test}", flush=True)
        room = Room(results, clean, here, scratch, whole=not chosen.tests)
        _judge_all(room, left, until_s)
        here.send(None)
        zygote.join()
    finally:
        results.write()
        shutil.rmtree(scratch, ignore_errors=True)


def _judge_all(room: Room, left: list[tuple[str, Mutant]], until_s: float) -> None:
    results, written_s, begun_s = room.results, time.monotonic(), time.monotonic()
    for done, (name, mutant) in enumerate(left, 1):
        verdict = room.judge(name, mutant)
        if room.whole or verdict in (Verdict.KILLED, Verdict.HUNG):
            results.functions[name].note(mutant, verdict)
        if verdict is not Verdict.KILLED and room.whole:
            print(f"  {verdict.name.lower()}: {name}: {mutant.text}", flush=True)
        now_s = time.monotonic()
        if now_s - written_s > WRITE_S:
            results.write()
            written_s = now_s
            rest_s = (now_s - begun_s) / done * (len(left) - done)
            print(f"  {done} of {len(left)}, {rest_s / 60:.0f} minutes left", flush=True)
        if now_s > until_s:
            return


def report(names: list[str]) -> None:
    columns = ("mutants", "killed", "hung", "survived", "equivalent", "not run")
    print(f"{'':14}" + "".join(f"{column:>12}" for column in columns) + "  score")
    for name in names:
        counts = Results(name).counts()
        row = "".join(f"{counts[column]:12,}" for column in columns)
        print(f"{name:14}{row}  {verdict(name, counts)}")
    for path, why in LEFT_OUT.items():
        print(f"left out: {path} ({why})")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts.mutants", description=__doc__)
    parser.add_argument("packages", nargs="*", default=[], metavar="PACKAGE")
    parser.add_argument("--again", action="store_true", help="run survivors again too")
    parser.add_argument("--quick", action="store_true", help="only bodies of functions")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="functions with TEXT in the name"
    )
    parser.add_argument(
        "--tests", nargs="+", metavar="FILE", help="look with these alone; note only what they kill"
    )
    parser.add_argument("--minutes", type=float, default=24 * 60, help="stop after so many")
    parser.add_argument("--report", action="store_true", help="run nothing")
    chosen = parser.parse_args()
    names = chosen.packages or list(TESTS)
    if unknown := set(names) - set(TESTS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(TESTS)}")
    if not chosen.report:
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[variable] = "1"
        os.chdir(ROOT)
        for module in HEAVY:
            __import__(module)
        until_s = time.monotonic() + 60 * chosen.minutes
        for name in names:
            run(name, chosen, until_s)
    report(names)


if __name__ == "__main__":
    main()
