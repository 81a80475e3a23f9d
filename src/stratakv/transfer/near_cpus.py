"""Which processors are near a GPU: host memory that one of them touches first is near it too.

Owns what of /sys is read for it. Must not pin a thread.
"""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

PCI: Final = Path("/sys/bus/pci/devices")


def cpus_in(text: str) -> frozenset[int]:
    """Of a list as Linux writes it: "0-15,64-79", or nothing."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def near_cpus(pci: str, allowed: Collection[int], devices: Path = PCI) -> frozenset[int]:
    """Of those that this process may use (``allowed``) the ones near a device; empty where nothing
    is known, or none of them is. ``pci``: as Linux names it, "0000:3b:00.0"."""
    try:
        text = (devices / pci / "local_cpulist").read_text(encoding="ascii")
    except OSError:
        return frozenset()
    return cpus_in(text).intersection(allowed)


def own_cpus() -> Collection[int]:
    return os.sched_getaffinity(0)
