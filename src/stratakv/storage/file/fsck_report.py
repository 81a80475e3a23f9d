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
        "damaged ledger": found.bad_ledger,
    }
    total = found.damage + found.foreign
    size = format_bytes(found.physical_bytes)
    lines = [f"{directory}: {found.pages} sound pages in {found.segments} segments, {size}"]
    if found.in_use:
        lines.append(f"segments that a running process writes: {found.in_use}")
    if found.foreign:
        lines.append(f"files named like segments that are not ours: {found.foreign}")
    lines += [f"{what}: {count}" for what, count in damage.items() if count]
    lines += [f"  {problem}" for problem in found.problems]
    if total > len(found.problems):
        lines.append(f"  and {total - len(found.problems)} more")
    return [*lines, _verdict(found, repair=repair)]


def _verdict(found: Findings, *, repair: bool) -> str:
    """``repair`` always rebuilds a ledger; objects may have a live writer."""
    if not found.damage:
        return "clean"
    objects = found.damage - found.bad_ledger
    if not repair:
        verbs = ["removes what is"] * (objects > 0) + ["rebuilds the ledger"] * found.bad_ledger
        return f"damaged; --repair {' and '.join(verbs)}"
    removed, left = found.mended - found.bad_ledger, found.damage - found.mended
    done = [f"{removed} removed"] * (objects > 0) + ["the ledger rebuilt"] * found.bad_ledger
    if found.clean:
        return f"mended: {', '.join(done)}"
    return f"{', '.join(done)}, {left} left, which a running process writes"
