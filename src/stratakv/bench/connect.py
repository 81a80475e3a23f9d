"""``stratakv bench connect``: our tier inside vLLM and SGLang, beside the engine's own over files.

Owns the comparison. Both tiers get the same prompts in lives of the engine that take turns, each a
process of its own in the engine's environment (``connect_lives``). Before a life its directory
leaves the page cache. Must not import an engine.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from stratakv.bench.connect_lives import BenchTier, Calls, Life, Lived
from stratakv.connect.engines import ENGINES
from stratakv.core.errors import ConfigError

TARGETS: Final = {"ttft_ratio": 1.05, "store_ratio": {"vllm": 0.95, "sglang": 1.3}, "hits_lost": 0}
"""vLLM's own tier writes in batches, SGLang's page by page."""
BUILT_IN: Final[Mapping[str, Sequence[str]]] = {
    "vllm": ("llama", "gemma3"),
    "sglang": ("llama", "laguna"),
}
PROMPTS: Final = tuple(range(8))
PROMPT_TOKENS: Final = 1026
ROUNDS: Final = 2
LIFE_S: Final = 900.0
"""A life that takes longer hangs."""
_TIERS: Final[Sequence[BenchTier]] = ("strata", "own")
_ENGINE_PATHS: Final = {"vllm": (".",), "sglang": (".", "sglang_cpu")}


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFigures:
    """Medians over rounds. ``hit_cpu_s``: of processors, for a restart hit. ``store_cpu_s``: from
    the first prompt to the last page. ``cached``: tokens of each prompt after a restart."""

    ttft_s: float
    hit_cpu_s: float
    store_tokens_s: float
    store_cpu_s: float
    bytes_per_token: float
    cached: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaFigures:
    """A directory that may have half of what the prompts take; then, after a restart, the prompts
    again, the last first. ``disk_bytes``: at the end."""

    disk_bytes: int
    cached: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFigures:
    """The back ends alone, without an engine around them: a prompt's pages are stored, and read
    from the disk. Medians of ratios of seconds, and of seconds of processors: how many times as
    fast ours stores, and how much of the time of theirs it reads in."""

    store_ratio: float
    store_cpu_ratio: float
    read_ratio: float
    read_cpu_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectCase:
    """A ratio is ours to theirs: of the seconds to the first token of a restart hit (the median of
    all prompts of all rounds, ours and theirs of one prompt together), of the seconds of processors
    that it takes, of the tokens that are computed and stored in a second, of the seconds of
    processors that this takes, of the bytes that are written. ``hits_lost``: tokens that theirs has
    served after a restart, and ours has not. ``alone``: None where an engine's tier has threads of
    its own, and does not work without one."""

    engine: str
    model: str
    ttft_ratio: float
    hit_cpu_ratio: float
    store_ratio: float
    store_cpu_ratio: float
    bytes_ratio: float
    hits_lost: int
    ours: TierFigures
    theirs: TierFigures
    quota_bytes: int
    ours_full: QuotaFigures
    theirs_full: QuotaFigures
    alone: CallFigures | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePython:
    """``stand_ins``: what stands in for a GPU, or None where there is one."""

    python: Path
    stand_ins: Path | None
    root: Path

    def release(self, engine: str) -> str | None:
        """Of what is installed there; None where it is not."""
        code = (
            "import sys, importlib.metadata as m\n"
            "for name in sys.argv[1:]:\n"
            " try: print(m.version(name)); break\n"
            " except m.PackageNotFoundError: pass"
        )
        command = [str(self.python), "-c", code, *ENGINES[engine].packages]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    def call(self, engine: str, given: Mapping[str, object]) -> dict[str, Any]:
        """One process of ``connect_lives``; ConfigError with its last words where it fails."""
        life, lived = self.root / "life.json", self.root / "lived.json"
        life.write_text(json.dumps(given))
        lived.write_text("{}")
        stand_ins = [] if self.stand_ins is None else [
            str(self.stand_ins / part) for part in _ENGINE_PATHS[engine]
        ]  # fmt: skip
        paths = [str(Path(__file__).parents[2]), *stand_ins]
        around = {
            **os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1",
            **({"TORCHDYNAMO_DISABLE": "1"} if stand_ins else {}),
        }  # fmt: skip
        command = [str(self.python), "-m", "stratakv.bench.connect_lives", str(life), str(lived)]
        done = subprocess.run(
            command, env=around, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=LIFE_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise ConfigError(
                f"--python {self.python}: a life of {engine} failed, its last words are\n"
                f"{done.stdout[-4000:]}"
            )
        return json.loads(lived.read_text())


def run(
    python: str | None = None,
    stand_ins: Path | None = None,
    engine: str | None = None,
    model: str | None = None,
    directory: Path | None = None,
) -> dict[str, object]:
    """Measure the engines that are installed for ``python`` (default: this one), or ``engine``
    alone, with the built-in models or ``model``; print a table. Ten minutes a model."""
    cases: list[ConnectCase] = []
    with tempfile.TemporaryDirectory(dir=directory, prefix="stratakv-bench-") as name:
        there = EnginePython(
            python=Path(python or sys.executable).absolute(),
            stand_ins=None if stand_ins is None else stand_ins.absolute(),
            root=Path(name),
        )
        engines = _engines(there, engine)
        for one in engines:
            for built_in in BUILT_IN[one] if model is None else [None]:
                case = _measure(there, one, built_in, model)
                _print(case)
                cases.append(case)
    return {"targets": TARGETS, "engines": engines, "cases": [asdict(case) for case in cases]}


def _engines(there: EnginePython, only: str | None) -> dict[str, str]:
    if only is not None and only not in ENGINES:
        raise ConfigError(f"--engine {only}: allowed are {', '.join(ENGINES)}")
    if not there.python.exists():
        raise ConfigError(f"--python {there.python}: allowed is a Python that has an engine")
    found = {name: there.release(name) for name in ([only] if only else ENGINES)}
    installed = {name: release for name, release in found.items() if release}
    if not installed:
        raise ConfigError(
            f"--python {there.python}: {', '.join(found)} not installed; allowed is a Python that "
            "has an engine, as .venv-connect/bin/python after make test-connect"
        )
    return installed


def _measure(
    there: EnginePython, engine: str, built_in: str | None, model: str | None
) -> ConnectCase:
    name = model or str(there.root / f"{engine}-{built_in}")
    if built_in is not None:
        there.call(engine, {"family": built_in, "directory": name})
    lives = _Lives(there, engine, name)
    stored: dict[BenchTier, list[Lived]] = {tier: [] for tier in _TIERS}
    restarted: dict[BenchTier, list[Lived]] = {tier: [] for tier in _TIERS}
    for turn in range(ROUNDS):
        order = _TIERS[:: 1 if turn % 2 else -1]
        for tier in order:
            stored[tier].append(lives.live(tier, fresh=True))
        for tier in order:
            restarted[tier].append(lives.live(tier))
    quota_bytes = stored["own"][0].written_bytes // 2
    full: dict[BenchTier, QuotaFigures] = {}
    for tier in _TIERS:
        lives.live(tier, fresh=True, quota_bytes=quota_bytes)
        again = lives.live(tier, quota_bytes=quota_bytes, prompts=PROMPTS[::-1])
        full[tier] = QuotaFigures(disk_bytes=again.disk_bytes, cached=again.cached)
    ours, theirs = restarted["strata"], restarted["own"]
    return ConnectCase(
        engine=engine,
        model=built_in or Path(name).name,
        ttft_ratio=median(_ratios(_first_tokens(ours), _first_tokens(theirs))),
        hit_cpu_ratio=median(_ratios(map(_hit_cpu_s, ours), map(_hit_cpu_s, theirs))),
        store_ratio=median(_ratios(_written(stored["own"]), _written(stored["strata"]))),
        store_cpu_ratio=median(_ratios(map(_cpu_s, stored["strata"]), map(_cpu_s, stored["own"]))),
        bytes_ratio=stored["strata"][0].written_bytes / stored["own"][0].written_bytes,
        hits_lost=sum(
            max(0, other - one)
            for mine, other_life in zip(ours, theirs, strict=True)
            for one, other in zip(mine.cached, other_life.cached, strict=True)
        ),
        ours=_figures(stored["strata"], ours),
        theirs=_figures(stored["own"], theirs),
        quota_bytes=quota_bytes,
        ours_full=full["strata"],
        theirs_full=full["own"],
        alone=lives.alone() if engine == "sglang" else None,
    )


class _Lives:
    """Of one engine and model; each tier has a directory, which lives share until a fresh one."""

    def __init__(self, there: EnginePython, engine: str, model: str) -> None:
        self._there = there
        self._engine = engine
        self._model = model

    def live(
        self, tier: BenchTier, *, fresh: bool = False, quota_bytes: int = 0,
        prompts: Sequence[int] = PROMPTS,
    ) -> Lived:  # fmt: skip
        found = self._call(tier, fresh=fresh, quota_bytes=quota_bytes, prompts=tuple(prompts))
        for name in ("first_token_s", "cached"):
            found[name] = tuple(found[name])
        return Lived(**found)

    def alone(self) -> CallFigures:
        found = self._call("strata", fresh=True, alone=True)
        ours, theirs = (Calls(**found[tier]) for tier in _TIERS)

        def ratio(
            one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]], at: int
        ) -> float:
            return median(a[at] / b[at] for a, b in zip(one, other, strict=True))

        return CallFigures(
            store_ratio=ratio(theirs.store, ours.store, 0),
            store_cpu_ratio=ratio(theirs.store, ours.store, 1),
            read_ratio=ratio(ours.read, theirs.read, 0),
            read_cpu_ratio=ratio(ours.read, theirs.read, 1),
        )

    def _call(
        self, tier: BenchTier, *, fresh: bool, quota_bytes: int = 0, prompts: tuple[int, ...] = (),
        alone: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        directory = self._there.root / tier
        if fresh:
            shutil.rmtree(directory, ignore_errors=True)
        life = Life(
            engine=self._engine,
            model=self._model,
            tier=tier,
            directory=str(directory),
            quota_bytes=quota_bytes,
            prompts=prompts,
            prompt_tokens=PROMPT_TOKENS,
            stand_ins=self._there.stand_ins is not None,
        )
        return self._there.call(self._engine, {**asdict(life), "alone": alone})


def _first_tokens(lives: Sequence[Lived]) -> Iterator[float]:
    return (taken_s for life in lives for taken_s in life.first_token_s)


def _hit_cpu_s(life: Lived) -> float:
    return life.answer_cpu_s / len(life.cached)


def _cpu_s(life: Lived) -> float:
    return life.cpu_s


def _written(lives: Sequence[Lived]) -> Iterator[float]:
    return (life.written_s for life in lives)


def _ratios(ours: Iterator[float], theirs: Iterator[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def _figures(stored: Sequence[Lived], restarted: Sequence[Lived]) -> TierFigures:
    tokens = len(PROMPTS) * PROMPT_TOKENS
    return TierFigures(
        ttft_s=median(_first_tokens(restarted)),
        hit_cpu_s=median(map(_hit_cpu_s, restarted)),
        store_tokens_s=tokens / median(_written(stored)),
        store_cpu_s=median(map(_cpu_s, stored)),
        bytes_per_token=stored[0].written_bytes / tokens,
        cached=tuple(restarted[0].cached),
    )


def _print(case: ConnectCase) -> None:
    ours, theirs = case.ours, case.theirs
    mib = case.quota_bytes >> 20
    rows = [
        ("ms to the first token of a restart hit", ours.ttft_s * 1e3, theirs.ttft_s * 1e3,
         case.ttft_ratio),
        ("ms of processors for that", ours.hit_cpu_s * 1e3, theirs.hit_cpu_s * 1e3,
         case.hit_cpu_ratio),
        ("tokens a second while storing", ours.store_tokens_s, theirs.store_tokens_s,
         case.store_ratio),
        ("seconds of processors for that", ours.store_cpu_s, theirs.store_cpu_s,
         case.store_cpu_ratio),
        ("bytes written per prompt token", ours.bytes_per_token, theirs.bytes_per_token,
         case.bytes_ratio),
        ("cached tokens after a restart", sum(ours.cached), sum(theirs.cached), None),
        (f"MiB on disk where {mib} are allowed", case.ours_full.disk_bytes / 2**20,
         case.theirs_full.disk_bytes / 2**20, None),
        ("cached tokens after a restart then", sum(case.ours_full.cached),
         sum(case.theirs_full.cached), None),
    ]  # fmt: skip
    print(f"{case.engine}, {case.model} {'ours':>39s} {'theirs':>11s} {'ratio':>7s}")
    for text, one, other, ratio in rows:
        shown = "" if ratio is None else f"{ratio:7.2f}"
        print(f"  {text:40s} {one:11,.1f} {other:11,.1f} {shown}")
    print(f"  tokens that theirs serves and ours does not: {case.hits_lost}", flush=True)
    if (alone := case.alone) is not None:
        print(
            f"  back ends alone: ours stores {alone.store_ratio:.2f} times as fast (by processors "
            f"{alone.store_cpu_ratio:.2f}), reads in {alone.read_ratio:.2f} of the time (by "
            f"processors {alone.read_cpu_ratio:.2f})",
            flush=True,
        )
