"""How much memory this machine has. Owns what of /proc and the cgroup is read for it."""

from pathlib import Path


def free_host_bytes() -> int:
    """Memory that could be taken now: what the kernel calls available, within the cgroup."""
    free = kernel_bytes("MemAvailable")
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file():
        text = limit.read_text(encoding="ascii").strip()
        if text != "max":
            free = min(free, int(text) - int(used.read_text(encoding="ascii")))
    return max(0, free)


def kernel_bytes(name: str) -> int:
    """A line of /proc/meminfo; 0 where there is none."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
