"""``stratakv bench tree``: what the tree costs per operation, beside a sketch and SGLang's.

Owns the table, and what was recorded of SGLang where it is not installed. The operations are in
``tree_traffic``, who does them in ``tree_subjects``; must not judge the figures.
"""

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from stratakv.bench.tree_subjects import Sketch, Strata, Subject
from stratakv.bench.tree_traffic import (
    CASES,
    FULL_SIZE,
    Times,
    TrafficSize,
    chat_pages,
    chats,
    long,
    measure,
    no_collections,
)
from stratakv.core.errors import ConfigError

ROWS: Final[Mapping[str, str]] = {
    "match": "match, 1.3k to 3k tokens",
    "lock_unlock": "lease and release",
    "lease_release": "the same, and its pages",
    "insert": "insert 256 tokens",
    "hash_match": "hash and match, 3k new ones",
    "evict_4096": "evict 4,096 tokens",
    **{f"evict_one_of_{count}": f"evict one of {count:,} leaves" for count in FULL_SIZE.leaves},
    "long_match": f"match {FULL_SIZE.long:,} tokens",
    "long_lock_unlock": "lease and release them",
    "long_insert": "insert them",
}
RELEASE: Final = "0.5.23"
"""Of SGLang, for what was recorded."""
RECORDED: Final[Mapping[str, Sequence[float]]] = {
    "match": (0.20, 0.53, 0.18, 0.48),
    "lock_unlock": (0.97, 0.90, 0.83, 0.77),
    "lease_release": (0.73, 0.78, 0.63, 0.64),
    "insert": (1.03, 0.89, 0.89, 0.81),
    "hash_match": (6.13, 5.86, 3.22, 3.29),
    "evict_4096": (0.34, 0.18, 0.24, 0.14),
    "evict_one_of_2000": (0.27, 0.20, 0.25, 0.19),
    "evict_one_of_20000": (0.09, 0.10, 0.09, 0.09),
    "evict_one_of_60000": (0.04, 0.04, 0.04, 0.04),
    "long_match": (0.02, 0.04, 0.02, 0.03),
    "long_lock_unlock": (4.58, 3.77, 1.48, 1.33),
    "long_insert": (2.72, 1.88, 1.10, 0.54),
}
"""Our time to that of SGLang's Rust core, by case."""
GROWN: Final = 10
"""How many times as much the last table has."""
SIDE_BY_SIDE_S: Final = 1800.0
"""Four cases that take longer hang."""


def run(
    python: str | None = None, stand_ins: Path | None = None, size: TrafficSize = FULL_SIZE
) -> dict[str, object]:
    """Measure, and print tables. ``python``: of an environment that has SGLang."""
    theirs = None if python is None else _side_by_side(Path(python), stand_ins, size)
    cases: list[dict[str, Any]] = []
    for at, (page, window) in enumerate(CASES):
        with no_collections():
            ours, sketch = measure(lambda n, p=page, w=window: _beside_sketch(p, w, n), page, size)
        ratios = _recorded(at) if theirs is None else _ratios(*theirs[at])
        case = {"page": page, "window": window, "us": ours, "sketch": _ratios(ours, sketch)}
        cases.append({**case, "sglang": ratios, "sglang_recorded": theirs is None})
        _print(cases[-1])
    grown = _growth(16, 4096, size)
    return {"cases": cases, "side_by_side": theirs, "exponents": grown}


def _beside_sketch(page: int, window: int, pages: int) -> Sequence[Subject]:
    return Strata(page, window, pages), Sketch(page, pages)


def _side_by_side(python: Path, stand_ins: Path | None, size: TrafficSize) -> list[list[Times]]:
    """Of each case our times and SGLang's, operation by operation in one process of its own."""
    if not python.exists():
        raise ConfigError(f"--python {python}: allowed is a Python that has SGLang")
    paths = [str(Path(__file__).parents[2])]
    if stand_ins is not None:
        paths.append(str(stand_ins.absolute() / "sglang_cpu"))
    with tempfile.TemporaryDirectory(prefix="stratakv-bench-") as name:
        answer = Path(name) / "answer.json"
        around = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [
                str(python.absolute()), "-m", "stratakv.bench.tree_sglang", str(answer),
                json.dumps(asdict(size)),
            ],
            env=around, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=SIDE_BY_SIDE_S, check=False,
        )  # fmt: skip
        if not answer.exists():  # triton complains at its end, and may fail there
            raise ConfigError(
                f"--python {python}: SGLang failed, its last words are\n{done.stdout[-4000:]}"
            )
        return json.loads(answer.read_text())


def _recorded(at: int) -> Times:
    return {name: by_case[at] for name, by_case in RECORDED.items()}


def _ratios(ours: Times, theirs: Times) -> Times:
    return {name: us / theirs[name] for name, us in ours.items() if name in theirs}


def _print(case: Mapping[str, Any]) -> None:
    core = f"SGLang {RELEASE}, recorded" if case["sglang_recorded"] else "SGLang, in this run"
    print(f"page {case['page']}, window {case['window']}: us, ratio to the sketch, to {core}")
    for name, text in ROWS.items():
        cells = [f"{case[of].get(name, math.nan):8.2f}" for of in ("us", "sketch", "sglang")]
        print(f"  {text:28s} {' '.join(cells).replace('nan', '  -')}", flush=True)


def _growth(page: int, window: int, size: TrafficSize) -> dict[str, float]:
    """Of each operation the exponent by which its time grows with the pages in the tree, or, of
    those of one long prompt, with its tokens."""
    with no_collections():
        parts = [
            chats([Strata(page, window, chat_pages(page, count))], page, count)[0]
            | long([Strata(page, window, tokens // page + 1)], page, tokens)[0]
            for count, tokens in (
                (size.conversations, size.long // GROWN),
                (size.conversations * GROWN, size.long),
            )
        ]
    small, large = parts
    found = {name: math.log(large[name] / us, GROWN) for name, us in small.items() if name in ROWS}
    print(f"page {page}, window {window}: {GROWN} times the size, and the exponent of growth")
    for name, exponent in found.items():
        print(f"  {ROWS[name]:28s} {large[name]:8.2f} {exponent:8.2f}")
    return found
