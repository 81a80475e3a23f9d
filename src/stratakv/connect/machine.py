"""Whether this machine suits a server: versions, memory, limits, threads, and a disk's speed.

Owns what is looked at, what of it is too little, and what helps. Loads no torch. Writes one file of
at most ``DISK_BYTES`` below a directory that it is given, and removes it.
"""

import os
import resource
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Final

from stratakv.connect.checks import Check
from stratakv.core.free_memory import free_host_bytes, kernel_bytes
from stratakv.core.units import format_bytes

PACKAGES: Final = ("numpy", "xxhash", "torch", "transformers", "tokenizers", "starlette", "uvicorn")
"""Named with their releases; those behind the first two are of the extra ``serve``."""
LIBRARY: Final = PACKAGES[:2]
FEW_BYTES: Final = 4 << 30
"""A server takes 2 GiB for the device tier by default, weights and a host tier beside it."""
FEW_FILES: Final = 4096
"""A connection and a segment of a store take one each."""
DISK_BYTES: Final = 32 << 20
DISK_S: Final = 2.0
"""Of writing, and of reading."""
SLOW_DISK: Final = 100e6
"""Bytes a second: prompts are often computed as fast as their pages come from there."""
THP: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CPU_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """``packages``: releases, None where one is not installed. ``huge_pages``: the kernel's choice,
    None where it has none. ``locked_bytes``, ``files``: limits of this process, -1 for none, the
    latter soft and hard. ``quota``: cores that the cgroup gives. ``threads``: OMP_NUM_THREADS."""

    python: str
    packages: Mapping[str, str | None]
    compiled: bool
    total_bytes: int
    free_bytes: int
    huge_pages: str | None
    locked_bytes: int
    files: tuple[int, int]
    cores: int
    quota: float | None
    threads: int | None


def look() -> MachineFacts:
    """At this machine, as this process sees it."""
    omp = os.environ.get("OMP_NUM_THREADS", "")
    return MachineFacts(
        python=sys.version.split()[0],
        packages={name: _release(name) for name in ("stratakv", *PACKAGES)},
        compiled=find_spec("stratakv.transfer._gather") is not None,
        total_bytes=kernel_bytes("MemTotal"),
        free_bytes=free_host_bytes(),
        huge_pages=_chosen(THP),
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        files=resource.getrlimit(resource.RLIMIT_NOFILE),
        cores=len(os.sched_getaffinity(0)),
        quota=_quota(CPU_QUOTA),
        threads=int(omp) if omp.isdecimal() else None,
    )


def machine_checks(facts: MachineFacts) -> Sequence[Check]:
    """What suits a server, and what does not."""
    return (
        _versions(facts),
        _copies(facts),
        _memory(facts),
        _huge_pages(facts),
        _locked(facts),
        _files(facts),
        _threads(facts),
    )


def _versions(facts: MachineFacts) -> Check:
    there = [f"{name} {number}" for name, number in facts.packages.items() if number]
    text = ", ".join([f"Python {facts.python}", *there])
    lacking = [name for name, number in facts.packages.items() if number is None]
    if not lacking:
        return Check("versions", "fine", text)
    bad = any(name in LIBRARY for name in lacking)
    advice = "pip install 'stratakv[serve]', to serve; the library does without"
    if bad:
        advice = "pip install stratakv"
    return Check(
        "versions", "bad" if bad else "poor", f"{text}; not installed: {', '.join(lacking)}", advice
    )


def _copies(facts: MachineFacts) -> Check:
    if facts.compiled:
        return Check("copies", "fine", "by the helper in C")
    return Check(
        "copies", "poor", "by NumPy, which is slower", "a C compiler, and install stratakv again"
    )


def _memory(facts: MachineFacts) -> Check:
    text = f"{format_bytes(facts.free_bytes)} of {format_bytes(facts.total_bytes)} could be taken"
    if facts.free_bytes >= FEW_BYTES:
        return Check("memory", "fine", text)
    return Check(
        "memory",
        "poor",
        text,
        "--device-memory and --host-memory below it, with room for the weights; or fewer programs",
    )


def _huge_pages(facts: MachineFacts) -> Check:
    match facts.huge_pages:
        case "always" | "madvise":
            return Check("huge pages", "fine", f"{facts.huge_pages}: pools are asked to have them")
        case None:
            return Check(
                "huge pages",
                "poor",
                "this kernel has none that are transparent",
                "a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
            )
        case other:
            return Check("huge pages", "poor", other, f"as root: echo madvise > {THP}")


def _locked(facts: MachineFacts) -> Check:
    if facts.locked_bytes == resource.RLIM_INFINITY:
        return Check("pinned memory", "fine", "no limit")
    return Check(
        "pinned memory",
        "poor",
        f"{format_bytes(facts.locked_bytes)} may be locked; transports over RDMA lock the pages "
        "that they send",
        "ulimit -l unlimited, for --role prefill and decode over RDMA (a unit of systemd: "
        "LimitMEMLOCK=infinity); else leave it",
    )


def _files(facts: MachineFacts) -> Check:
    soft, hard = facts.files
    text = f"{soft}, which a server raises to {'any number' if hard < 0 else hard}"
    if hard < 0 or hard >= FEW_FILES:
        return Check("open files", "fine", text)
    return Check(
        "open files",
        "poor",
        text,
        f"as root: ulimit -Hn {FEW_FILES} or more (a unit of systemd: LimitNOFILE={FEW_FILES}): "
        "connections are bounded by it",
    )


def _threads(facts: MachineFacts) -> Check:
    cores = facts.cores if facts.quota is None else min(facts.cores, facts.quota)
    text = f"{facts.cores} cores"
    if facts.quota is not None and facts.quota < facts.cores:
        text += f", of which the cgroup gives {facts.quota:g}"
    used = facts.cores if facts.threads is None else facts.threads
    text += f"; a forward uses {used}"
    if used <= cores:
        return Check("threads", "fine", text)
    least = max(1, int(cores))
    return Check("threads", "poor", text, f"--threads {least}, or OMP_NUM_THREADS={least}")


def disk_check(directory: Path, now_s: Callable[[], float] = perf_counter) -> Check:
    """How fast pages would be written to ``directory``, which need not be there, and read."""
    there = directory
    try:
        there = next(one for one in (directory, *directory.parents) if os.path.isdir(one))
        with tempfile.TemporaryFile(dir=there) as file:
            number = file.fileno()
            block = secrets.token_bytes(1 << 20)
            written, write_s = _timed(lambda: os.write(number, block), now_s, number)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(number, 0, os.SEEK_SET)
            read, read_s = _timed(lambda: len(os.read(number, 1 << 20)), now_s, None)
    except OSError as error:
        return Check(
            "disk", "bad", f"{there}: {error.strerror}", "a directory that this user may write to"
        )
    free = os.statvfs(there)
    speeds = written / write_s, read / read_s
    text = (
        f"{there}: {speeds[0] / 1e6:.0f} MB/s written and synced, {speeds[1] / 1e6:.0f} MB/s read, "
        f"{format_bytes(free.f_bavail * free.f_frsize)} free"
    )
    if min(speeds) >= SLOW_DISK:
        return Check("disk", "fine", text)
    return Check(
        "disk", "poor", text, "a local disk; or a larger --prefetch-threshold, so that few wait"
    )


def _timed(
    move: Callable[[], int], now_s: Callable[[], float], synced: int | None
) -> tuple[int, float]:
    """Bytes that were moved, all or as many as ``DISK_S`` allows, and how long it took."""
    begun_s, moved = now_s(), 0
    while moved < DISK_BYTES and now_s() - begun_s < DISK_S:
        count = move()
        if not count:
            break
        moved += count
    if synced is not None:
        os.fsync(synced)
    return moved, max(now_s() - begun_s, 1e-9)


def _release(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _chosen(path: Path) -> str | None:
    """The word in brackets."""
    if not path.is_file():
        return None
    return path.read_text(encoding="ascii").partition("[")[2].partition("]")[0] or None


def _quota(path: Path) -> float | None:
    """Cores; None where as many as there are."""
    if not path.is_file():
        return None
    quota, _, period = path.read_text(encoding="ascii").strip().partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None
