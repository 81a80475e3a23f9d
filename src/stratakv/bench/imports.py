"""``stratakv bench imports``: what the library adds to the start of a program that has NumPy.

Fresh interpreters in turns: what is there anyway, then that and some of the library. Owns the list
of what is imported; must not judge the figures.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Final

REPEATS: Final = 9
BASELINE: Final = "numpy"
PARTS: Final[dict[str, tuple[str, ...]]] = {
    "fsck": ("stratakv.storage.file.fsck",),
    "tree": ("stratakv.tree.prefix_tree",),
    "transfer": ("stratakv.transfer.cpu",),
    "storage": ("stratakv.storage.registry", "stratakv.storage.io_worker"),
    "tiers": ("stratakv.tiers.tiered_cache",),
    "cache": ("stratakv.cache.kv_cache",),
    "connect": (
        "stratakv.connect.chunk_tier",
        "stratakv.connect.blocking_pages",
        "stratakv.connect.stores",
    ),
    "all of it": (
        "stratakv.spec.derive",
        "stratakv.transfer.cpu",
        "stratakv.storage.registry",
        "stratakv.storage.io_worker",
        "stratakv.storage.file.fsck",
        "stratakv.cache.kv_cache",
    ),
}
"""What a program imports that embeds it, beside ``BASELINE``."""
TEST_BASELINE: Final = (BASELINE, "pytest", "hypothesis", "hypothesis.stateful")
"""What a project's tests have loaded already where they run suites of ``stratakv.testing``."""
TEST_PARTS: Final[dict[str, tuple[str, ...]]] = {
    "testing: stores": (
        "stratakv.testing.storage_conformance",
        "stratakv.testing.storage_faults",
    ),
    "testing: copies": ("stratakv.testing.transfer_conformance",),
    "testing: transports": (
        "stratakv.testing.transport_conformance",
        "stratakv.testing.transport_faults",
    ),
    "testing: the tree": ("stratakv.testing.tree_machine",),
    "testing: an engine": ("stratakv.testing.hit_equals_recompute",),
}
"""The suites that need no torch to be imported, beside ``TEST_BASELINE``."""


def run() -> dict[str, object]:
    """Measure every part, and print a table; ~40 s. Suites only where ``stratakv[testing]`` is."""
    numpy_ms, added_ms = _added_ms((BASELINE,), PARTS)
    print(f"NumPy alone, with the interpreter: {numpy_ms:.0f} ms of CPU; what is added, median:")
    _print(added_ms)
    figures: dict[str, object] = {"numpy_ms": numpy_ms, "added_ms": added_ms}
    if all(find_spec(name.partition(".")[0]) for name in TEST_BASELINE):
        pytest_ms, suites_ms = _added_ms(TEST_BASELINE, TEST_PARTS)
        print(f"with pytest and Hypothesis {pytest_ms:.0f} ms; what is added to that:")
        _print(suites_ms)
        figures |= {"pytest_ms": pytest_ms, "suites_added_ms": suites_ms}
    return figures


def _added_ms(
    baseline: Sequence[str], parts: Mapping[str, Sequence[str]]
) -> tuple[float, dict[str, float]]:
    """Medians of the baseline alone, and of what each part adds to it."""
    alone_s, added_s = list[float](), {name: list[float]() for name in parts}
    for modules in parts.values():  # compiled once, as an installed package is
        _cpu_s(*baseline, *modules)
    for _ in range(REPEATS):
        alone_s.append(_cpu_s(*baseline))
        for name, modules in parts.items():  # beside the baseline in the same turn: times drift
            added_s[name].append(_cpu_s(*baseline, *modules) - alone_s[-1])
    added_ms = {name: round(1000 * median(of), 1) for name, of in added_s.items()}
    return round(1000 * median(alone_s), 1), added_ms


def _print(added_ms: Mapping[str, float]) -> None:
    for name, milliseconds in added_ms.items():
        print(f"{name:20} {milliseconds:6.1f} ms")


def _cpu_s(*modules: str) -> float:
    """CPU seconds of a fresh interpreter that imports ``modules``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", f"import {', '.join(modules)}"]
    subprocess.run(command, check=True, env=dict(os.environ) | {"PYTHONDONTWRITEBYTECODE": ""})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
