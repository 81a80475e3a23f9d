"""``stratakv fsck DIR [--repair]``: is everything in a store's directory what it should be?

Owns the scan of segments of every format, and the mending: a damaged object leaves, its slot is
free again; a damaged ledger is rebuilt; and what is reported to people. Must not touch a segment
that a live process writes.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from stratakv.core.errors import StorageError
from stratakv.core.units import format_bytes
from stratakv.storage.file.index import servable
from stratakv.storage.file.ledger import Ledger
from stratakv.storage.file.recognise import LEDGER, is_segment, is_segment_name, is_unmade
from stratakv.storage.file.segment import Segment
from stratakv.storage.header import HEADER, QUARANTINED, Headers, is_blank, is_sound

_NAMED: Final = 100
"""Problems that a report lists one by one."""


@dataclass(slots=True)
class FsckReport:
    """``in_use``: segments with a live writer, which were only looked at. ``unfinished``: files
    whose making was cut short; ``broken``: segments that no longer say what they are, or are
    truncated. ``foreign``: files that are named like segments and are not ours, which are left as
    they are and no damage. ``bad_ledger``: 0 or 1. The rest are objects. ``mended``: objects and
    files that ``repair`` removed, and the ledger that it rebuilt. ``problems``: the first 100, for
    people."""

    segments: int
    in_use: int
    unfinished: int
    broken: int
    pages: int
    physical_bytes: int
    bad_headers: int
    bad_payloads: int
    quarantined: int
    mended: int
    problems: list[str]
    bad_ledger: int = 0
    foreign: int = 0

    @property
    def damage(self) -> int:
        """How many things were found wrong, mended or not."""
        objects = self.bad_headers + self.bad_payloads + self.quarantined
        return objects + self.unfinished + self.broken + self.bad_ledger

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong that was not mended."""
        return self.mended == self.damage


def fsck(directory: Path, *, repair: bool = False) -> FsckReport:
    """Read every header and every payload below ``directory``. StorageError if it is no store, or
    the ledger in it is somebody else's.

    A segment that was asked to be forgotten is passed over: who opens the store next deletes it.
    Without ``repair`` nothing is written. With it, a damaged object is removed, unless the process
    that writes its segment is alive.
    """
    if not os.path.lexists(directory / LEDGER):
        raise StorageError(
            f"DIR {directory} is no StrataKV store: it has no ledger; allowed is a directory that "
            "--storage file:// has made"
        )
    ledger = Ledger(directory, quota_bytes=0)
    try:
        found = FsckReport(0, 0, 0, 0, 0, ledger.physical_bytes(), 0, 0, 0, 0, [])
        _look_at(ledger, found, repair=repair)
        for name in sorted(filter(is_segment_name, os.listdir(directory))):
            try:
                segment = Segment.open(directory / name)
            except FileNotFoundError:
                continue
            if segment is None and not is_segment(directory / name):
                found.foreign += 1
                _note(found, f"{name}: is not ours, and is left as it is")
            elif segment is None or not _is_whole(directory / name, segment):
                _broken_file(ledger, name, found, repair=repair)
            if segment is not None:
                if _is_whole(directory / name, segment) and not segment.notes.is_marked_deleted():
                    _scan(segment, found, repair=repair)
                segment.close()
    except OSError as error:
        raise StorageError(f"{directory}: {error}") from error
    finally:
        ledger.close()
    return found


def _look_at(ledger: Ledger, found: FsckReport, *, repair: bool) -> None:
    with ledger.locked():
        if ledger.is_damaged():
            found.bad_ledger = 1
            _note(found, "the ledger is damaged")
            if repair:
                ledger.rebuild()
                found.mended += 1


def _is_whole(path: Path, segment: Segment) -> bool:
    geometry = segment.geometry
    return path.exists() and path.stat().st_size >= geometry.data_at + geometry.data_bytes


def _broken_file(ledger: Ledger, name: str, found: FsckReport, *, repair: bool) -> None:
    unfinished = is_unmade(ledger.directory / name)
    found.unfinished += unfinished
    found.broken += not unfinished
    _note(found, f"{name}: {'was never finished' if unfinished else 'is no whole segment'}")
    if repair:
        with ledger.locked():
            found.mended += ledger.delete_idle(name)


def _scan(segment: Segment, found: FsckReport, *, repair: bool) -> None:
    found.segments += 1
    # Only for the time of the scan; a store that wants to adopt it asks again.
    idle = segment.own()
    found.in_use += not idle
    table = segment.headers()
    good = servable(table, segment.geometry)
    quarantined = is_sound(table) & (table["magic"] == QUARANTINED)
    bad = ~good & ~quarantined & ~is_blank(table)
    torn = _bad_payloads(segment, table, np.flatnonzero(good))
    found.pages += int(good.sum()) - len(torn)
    found.bad_headers += int(bad.sum())
    found.quarantined += int(quarantined.sum())
    found.bad_payloads += len(torn)
    lines = ((bad, "a damaged header"), (quarantined, "an object in quarantine"))
    slots = {slot: what for mask, what in lines for slot in np.flatnonzero(mask).tolist()}
    slots |= dict.fromkeys(torn, "a damaged payload")
    for slot, what in sorted(slots.items()):
        _note(found, f"{segment.name} slot {slot}: {what}")
    if repair and idle and slots:
        for slot in slots:
            segment.put_headers(slot, np.zeros(1, HEADER))
        segment.count_change()
        found.mended += len(slots)


def _bad_payloads(segment: Segment, table: Headers, slots: np.ndarray) -> list[int]:
    """Slots whose payload is not what the header says; a page that its writer replaced meanwhile
    is not one of them."""
    page = memoryview(bytearray(segment.geometry.page_bytes))
    torn: list[int] = []
    for slot in slots.tolist():
        if segment.read_page(slot, page) != table["payload_hash"][slot]:
            same = segment.header_bytes(slot, 1) == table[slot].tobytes()
            if same and segment.read_page(slot, page) != table["payload_hash"][slot]:
                torn.append(slot)
    return torn


def _note(found: FsckReport, problem: str) -> None:
    if len(found.problems) < _NAMED:
        found.problems.append(problem)


def lines_of(directory: Path, found: FsckReport, *, repair: bool) -> list[str]:
    """The report on ``directory``, line by line; the last line says how it stands. ``repair``:
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


def _verdict(found: FsckReport, *, repair: bool) -> str:
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
