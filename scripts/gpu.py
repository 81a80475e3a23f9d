"""``make gpu``: tests that need a GPU, then benches on it; figures go to ``bench/results/``.

Owns the parts, their order, what of them is done, and the time that one call takes. A part that
ends well is written down with what it ran on, and is skipped by the next call on the same GPU,
driver and commit; one that time has cut short is begun anew. Must not need torch to say that there
is no GPU.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "bench" / "results"
LIMIT_S: Final = 540.0
"""Of a call."""
KILLED_S: Final = 10.0
"""For what a killed part has printed: who left its group may hold the pipe."""
LEAST_S: Final = 20.0
"""With less left no part is begun."""
TAIL_CHARS: Final = 4000
DONE, FAILED, NO_GPU, AGAIN = 0, 1, 2, 3
"""Exit codes."""
QUERY: Final = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total",
    "--format=csv,noheader",
)


@dataclass(frozen=True, slots=True)
class Part:
    """``command``: of which ``{figures}`` is a file that it writes."""

    name: str
    command: tuple[str, ...]

    def line(self, figures: Path) -> list[str]:
        return [word.replace("{figures}", str(figures)) for word in self.command]


def _tests(name: str, only: str = "") -> Part:
    """``only``: a class of them."""
    words = ("-m", "pytest", "-p", "no:xdist", "-rs", "-m", "gpu")
    some = ("-k", only) if only else ()
    title = f"tests-{name}-{only.removeprefix('Test').lower()}" if only else f"tests-{name}"
    return Part(title, (sys.executable, *words, *some, f"tests/gpu/test_gpu_{name}.py"))


def _bench(name: str) -> Part:
    words = ("-m", "stratakv", "bench", name, "--device", "cuda", "--json", "{figures}")
    return Part(f"bench-{name}", (sys.executable, *words))


PARTS: Final = (
    *(_tests("kernels", dtype) for dtype in ("TestFloat32", "TestBfloat16", "TestFloat16")),
    *map(_tests, ("transfer", "graphs", "hits", "offload")),
    *map(_bench, ("transfer", "sparse", "serve")),
)


@dataclass(frozen=True, slots=True)
class Machine:
    """``gpu``: its name; ``commit``: of the code, with ``-changed`` where that is not all of it."""

    gpu: str
    driver: str
    memory: str
    commit: str

    @property
    def place(self) -> str:
        """Where its results go: a name for a folder."""
        return re.sub(r"[^a-z0-9.]+", "-", f"{self.gpu} {self.driver} {self.commit}".lower())


@dataclass(frozen=True, slots=True)
class Outcome:
    """``code``: of the process; None: time was up."""

    code: int | None
    output: str


Run = Callable[[Sequence[str], float], Outcome]


def machine_of(ask: Callable[[Sequence[str]], str | None]) -> Machine | None:
    """None where there is no GPU. ``ask``: what a command prints; None: it fails."""
    found = ask(QUERY)
    if found is None or not found.strip():
        return None
    gpu, driver, memory = (word.strip() for word in found.strip().splitlines()[0].split(","))
    commit = (ask(("git", "rev-parse", "--short", "HEAD")) or "unknown").strip()
    changed = ask(("git", "status", "--porcelain", "--untracked-files=no"))
    return Machine(gpu, driver, memory, f"{commit}-changed" if changed else commit)


def is_done(place: Path, part: Part) -> bool:
    """Whether it has ended well there, as it is now."""
    try:
        record = json.loads((place / f"{part.name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return record["code"] == 0 and record["command"] == " ".join(part.command)


def run_parts(
    machine: Machine,
    results: Path,
    run: Run,
    clock: Callable[[], float] = time.monotonic,
    parts: Sequence[Part] = PARTS,
) -> int:
    """The exit code. What has failed is run again by the next call."""
    place, end, code = results / machine.place, clock() + LIMIT_S, DONE
    place.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if is_done(place, part):
            print(f"{part.name}: done before")
            continue
        left = end - clock()
        if left < LEAST_S:
            print(f"{part.name}: no time left; call again")
            return AGAIN
        begin, figures = clock(), place / f"{part.name}.figures.json"
        found = run(part.line(figures), left)
        if found.code is None:
            print(f"{part.name}: {LIMIT_S:.0f} seconds are up; call again")
            return AGAIN
        record = _record(machine, part, found, clock() - begin, figures)
        (place / f"{part.name}.json").write_text(json.dumps(record, indent=2) + "\n", "utf-8")
        print(f"{part.name}: {'done' if not found.code else f'FAILED ({found.code})'}")
        code = FAILED if found.code else code
    print(f"results: {place}")
    return code


def _record(
    machine: Machine, part: Part, found: Outcome, seconds: float, figures: Path
) -> Mapping[str, object]:
    measured = None
    if figures.exists():
        measured = json.loads(figures.read_text(encoding="utf-8"))
        figures.unlink()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **asdict(machine),
        "command": " ".join(part.command),
        "code": found.code,
        "seconds": round(seconds, 1),
        "figures": measured,
        "output": found.output[-TAIL_CHARS:],
    }


def _ask(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def run_command(command: Sequence[str], limit_s: float) -> Outcome:
    """In a group of its own, which is killed whole when time is up."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Outcome(None, _killed(process))
    except BaseException:
        _killed(process)
        raise
    sys.stdout.write(output)
    return Outcome(process.returncode, output)


def _killed(process: subprocess.Popen[str]) -> str:
    """What it has printed, as far as that is known."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=KILLED_S)[0]
    except subprocess.TimeoutExpired:
        assert process.stdout is not None
        process.stdout.close()
        return ""


def main() -> int:
    machine = machine_of(_ask)
    if machine is None:
        print("make gpu: no GPU here: nvidia-smi finds none, and nothing was run or measured")
        return NO_GPU
    print(f"{machine.gpu}, driver {machine.driver}, {machine.memory}, commit {machine.commit}")
    return run_parts(machine, RESULTS, run_command)


if __name__ == "__main__":
    sys.exit(main())
