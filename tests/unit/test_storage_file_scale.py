"""A million pages: opening and asking must not grow with Python objects per page."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from stratakv.core.clock import WallClock
from stratakv.core.ids import GroupId, PageKey
from stratakv.storage.backend import ObjectKey, ReadStatus, StoreFormat
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.segment import Geometry, Segment
from stratakv.storage.file.store import FileStore
from stratakv.storage.header import HEADER, MAGIC, VERSION, payload_hash, seal
from tests.counting import counted

FORM = StoreFormat(spec_digest=b"a million pages.", page_bytes=(64,))
PAGE = bytes(64)


def make(directory: Path, pages: int, segments: int) -> np.ndarray:
    """Segments as a store leaves them, their payloads holes; returns the page keys."""
    directory.mkdir()
    (directory / "ledger").write_bytes(b"")
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**64, (pages, 4), np.uint64)
    slots = pages // segments
    for at in range(segments):
        geometry = Geometry(spec_digest=FORM.spec_digest, group=0, slots=slots, page_bytes=64)
        table = np.zeros(slots, HEADER)
        table["magic"], table["version"], table["payload_bytes"] = MAGIC, VERSION, 64
        table["spec"] = np.frombuffer(FORM.spec_digest, "<u8")
        table["page"] = keys[at * slots : (at + 1) * slots]
        table["payload_hash"] = payload_hash(PAGE)
        table["stored_ns"] = 1 + np.arange(slots)
        path = directory / f"{at + 1:012x}.seg"
        with path.open("wb") as file:
            file.truncate(geometry.data_at + geometry.data_bytes)
            file.write(geometry.pack())
        segment = Segment.open(path)
        assert segment is not None
        assert segment.own()
        segment.put_headers(0, seal(table))
        segment.close()
    return keys


@pytest.mark.parametrize("pages", [100_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_many_pages_open_fast_and_are_found_fast(tmp_path: Path, pages: int) -> None:
    """With few calls for a page; `stratakv bench storage` has the seconds."""
    keys = make(tmp_path / "store", pages, segments=50)
    limits = StoreLimits(quota_bytes=64 << 30)
    store, calls = counted(lambda: FileStore(tmp_path / "store", FORM, limits, WallClock()))
    with closing(store):
        assert calls < pages / 5
        assert store.stats().pages == pages
        sample = [ObjectKey(PageKey(key.tobytes()), GroupId(0)) for key in keys[:: pages // 10_000]]
        there, calls = counted(lambda: store.contains(sample))
        assert there.all()
        assert calls < len(sample) / 10
        into = memoryview(bytearray(64))
        assert store.read(sample[:1], [into]) == [ReadStatus.HIT]
