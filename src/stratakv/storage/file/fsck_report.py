"""What ``stratakv fsck`` says to people. Owns the words; must not look at a store."""

from pathlib import Path

from stratakv.core.units import format_bytes
from stratakv.storage.file.fsck import Findings


def lines_of(directory: Path, found: Findings, *, repair: bool) -> list[str]:
    """The findings in ``directory``, line by line; the last line says how it stands. ``repair``:
    whether it was asked for."""
    damage = {
        "damaged headers": found.bad_headers,
        "damaged payloads": found.bad_payloads,
        "objects in quarantine": found.quarantined,
        "segments that were never finished": found.unfinished,
        "segments that are broken": found.broken,
    }
    total = sum(damage.values())
    size = format_bytes(found.physical_bytes)
    lines = [f"{directory}: {found.pages} sound pages in {found.segments} segments, {size}"]
    if found.in_use:
        lines.append(f"segments that a running process writes: {found.in_use}")
    lines += [f"{what}: {count}" for what, count in damage.items() if count]
    lines += [f"  {problem}" for problem in found.problems]
    if total > len(found.problems):
        lines.append(f"  and {total - len(found.problems)} more")
    return [*lines, _verdict(found, total, repair=repair)]


def _verdict(found: Findings, total: int, *, repair: bool) -> str:
    if not total:
        return "clean"
    if found.clean:
        return f"mended: {found.mended} removed"
    if not repair:
        return "damaged; --repair removes what is"
    return f"{found.mended} removed, {total - found.mended} left, which a running process writes"
