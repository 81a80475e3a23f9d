"""Stores over one directory and one clock, and hands on their files behind their backs. Owns no
assertion.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from stratakv.core.clock import ManualClock
from stratakv.storage.backend import ObjectKey, StoreFormat
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.segment import BLOCK_BYTES, Segment
from stratakv.storage.file.store import FileStore
from stratakv.storage.header import HEADER_BYTES
from stratakv.testing.storage_conformance import FORM

START_S = 1_000_000.0


class Place:
    """A directory, a clock, and stores over them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock(START_S)
        self.limits = StoreLimits(quota_bytes=64 << 20)
        self.form = FORM

    def open(self, form: StoreFormat = FORM, **changes: object) -> FileStore:
        limits = replace(self.limits, **changes)
        return FileStore(self.path, form, limits, self.clock)

    def physical_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.path.glob("*.seg"))


def segments(directory: Path) -> Iterator[tuple[Path, Segment]]:
    for path in sorted(directory.glob("*.seg")):
        segment = Segment.open(path)
        if segment is not None:
            try:
                yield path, segment
            finally:
                segment.close()


def place_of(directory: Path, key: ObjectKey) -> tuple[Path, int, int]:
    """(file, where its header is, where its payload is)."""
    for path, segment in segments(directory):
        for slot, header in enumerate(segment.headers()):
            same = header["page"].tobytes() == key.page and header["shard"] == key.shard
            if same and header["group"] == key.group:
                geometry = segment.geometry
                at = geometry.data_at + slot * geometry.stride_bytes
                return path, BLOCK_BYTES + slot * HEADER_BYTES, at
    raise AssertionError(f"{key} is not in {directory}")


def flip(path: Path, at: int, bit: int = 0) -> None:
    fd = os.open(path, os.O_RDWR)
    (byte,) = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([byte ^ (1 << bit)]), at)
    os.close(fd)


def flip_payload(directory: Path, key: ObjectKey, at: int) -> None:
    path, _, payload = place_of(directory, key)
    flip(path, payload + at)


def flip_header(directory: Path, key: ObjectKey, at: int, bit: int = 0) -> None:
    path, header, _ = place_of(directory, key)
    flip(path, header + at, bit)
