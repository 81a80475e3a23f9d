"""``stratakv bench imports``: what the library adds to the start of a program that has NumPy.

Fresh interpreters in turns: NumPy alone, then NumPy and some of the library. Owns the list of what
is imported; must not judge the figures.
"""

import os
import resource
import subprocess
import sys
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
    "all of it": (
        "stratakv.spec.derive",
        "stratakv.transfer.cpu",
        "stratakv.storage.registry",
        "stratakv.storage.io_worker",
        "stratakv.storage.file.fsck",
        "stratakv.cache.kv_cache",
    ),
}
"""What a program imports that embeds it; ``testing`` is for tests alone, and needs pytest."""


def run() -> dict[str, object]:
    """Measure every part, and print a table; ~20 s."""
    _cpu_s(*PARTS["all of it"])  # compiled once, as an installed package is
    alone_s, added_s = list[float](), {name: list[float]() for name in PARTS}
    for _ in range(REPEATS):
        alone_s.append(_cpu_s(BASELINE))
        for name, modules in PARTS.items():  # beside NumPy alone in the same turn: times drift
            added_s[name].append(_cpu_s(BASELINE, *modules) - alone_s[-1])
    numpy_ms = round(1000 * median(alone_s), 1)
    added_ms = {name: round(1000 * median(of), 1) for name, of in added_s.items()}
    print(f"NumPy alone, with the interpreter: {numpy_ms:.0f} ms of CPU; what is added, median:")
    for name, milliseconds in added_ms.items():
        print(f"{name:10} {milliseconds:6.1f} ms")
    return {"numpy_ms": numpy_ms, "added_ms": added_ms}


def _cpu_s(*modules: str) -> float:
    """CPU seconds of a fresh interpreter that imports ``modules``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", f"import {', '.join(modules)}"]
    subprocess.run(command, check=True, env=dict(os.environ) | {"PYTHONDONTWRITEBYTECODE": ""})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
