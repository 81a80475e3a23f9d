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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from stratakv.bench.connect_figures import (
    DEEDS,
    PROMPT_TOKENS,
    PROMPTS,
    TIERS,
    CallFigures,
    Measured,
    QuotaFigures,
    call_figures,
    life_line,
    table,
)
from stratakv.bench.connect_lives import BenchTier, Calls, Life, Lived
from stratakv.connect.engines import ENGINES
from stratakv.core.errors import ConfigError

TARGETS: Final = {"ttft_ratio": 1.05, "store_ratio": {"vllm": 0.95, "sglang": 1.3}, "hits_lost": 0}
"""vLLM's own tier writes in batches, SGLang's page by page."""
BUILT_IN: Final[Mapping[str, Sequence[str]]] = {
    "vllm": ("llama", "gemma3"),
    "sglang": ("llama", "laguna"),
}
ROUNDS: Final = 2
LIFE_S: Final = 900.0
"""A life that takes longer hangs."""
_ENGINE_PATHS: Final = {"vllm": (".",), "sglang": (".", "sglang_cpu")}


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
    alone, with the built-in models or ``model``; print each life, and a table of each model. What
    they say, also where it was interrupted (Ctrl-C): of a model its whole rounds. Ten minutes a
    model."""
    cases: list[Measured] = []
    interrupted = False
    with tempfile.TemporaryDirectory(dir=directory, prefix="stratakv-bench-") as name:
        there = EnginePython(
            python=Path(python or sys.executable).absolute(),
            stand_ins=None if stand_ins is None else stand_ins.absolute(),
            root=Path(name),
        )
        engines = _engines(there, engine)
        try:
            for one in engines:
                for built_in in BUILT_IN[one] if model is None else [None]:
                    _measure(there, one, built_in, model, cases)
        except KeyboardInterrupt:
            interrupted = True
            if cases and not cases[-1].finished:
                _print(cases[-1])
    found = [case for one in cases if (case := one.case()) is not None]
    return {
        "targets": TARGETS,
        "engines": engines,
        "cases": [asdict(case) for case in found],
        "interrupted": interrupted,
    }


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
    there: EnginePython, engine: str, built_in: str | None, model: str | None, cases: list[Measured]
) -> None:
    """Each life is among ``cases`` as soon as it has ended: all of them take minutes."""
    name = model or str(there.root / f"{engine}-{built_in}")
    if built_in is not None:
        there.call(engine, {"family": built_in, "directory": name})
    lives, one = _Lives(there, engine, name), Measured(engine, built_in or Path(name).name)
    cases.append(one)
    print(f"{engine}, {one.model}: {ROUNDS} rounds", flush=True)
    for turn in range(ROUNDS):
        order = TIERS[:: 1 if turn % 2 else -1]
        for deed in DEEDS:
            for tier in order:
                lived = lives.live(tier, fresh=deed == "store")
                one.add_life(deed, tier, lived)
                print(life_line(deed, tier, lived), flush=True)
    for tier in TIERS:
        lives.live(tier, fresh=True, quota_bytes=one.quota_bytes)
        again = lives.live(tier, quota_bytes=one.quota_bytes, prompts=PROMPTS[::-1])
        one.full[tier] = QuotaFigures(disk_bytes=again.disk_bytes, cached=again.cached)
    one.end(lives.alone() if engine == "sglang" else None)
    _print(one)


def _print(one: Measured) -> None:
    if (case := one.case()) is not None:
        print("\n".join(table(case)), flush=True)


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
        return call_figures({tier: Calls(**found[tier]) for tier in TIERS})

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
