"""Pages as they lie on the disk now: payloads with their hashes, and headers beside the index's.

Owns nothing but the count of pages that could not be read. Must not say what is a hit.
"""

import logging
from collections.abc import Sequence
from typing import Final

from stratakv.storage.file.catalog import Catalog, Placed
from stratakv.storage.file.counters import FileStoreCounters
from stratakv.storage.file.index import RowIds
from stratakv.storage.header import HEADER_BYTES

_logger = logging.getLogger(__name__)

_SPARSE: Final = 32


class PageReader:
    def __init__(self, catalog: Catalog, counters: FileStoreCounters) -> None:
        self._catalog, self._index, self._counters = catalog, catalog.index, counters

    def read(self, rows: RowIds, into: Sequence[memoryview]) -> list[int | None]:
        """The hash of each page after it was read; None where it could not be read."""
        hashes: list[int | None] = []
        for placed, slots in self._catalog.by_segment(rows.tolist()):
            buffers = into[len(hashes) : len(hashes) + len(slots)]
            try:
                hashes += placed.segment.read_pages(slots, buffers)
            except OSError:  # one of them at least: see which
                pairs = zip(slots, buffers, strict=True)
                hashes += [self._read_alone(placed, slot, page) for slot, page in pairs]
        return hashes

    def _read_alone(self, placed: Placed, slot: int, into: memoryview) -> int | None:
        try:
            return placed.segment.read_page(slot, into)
        except OSError as error:
            _logger.warning("%s: slot %d: %s", placed.segment.name, slot, error)
            self._counters.add(read_errors=1)
            return None

    def unchanged(self, rows: RowIds) -> list[bool]:
        """Whether the headers on the disk are still those of the index. By bytes and lists: right
        after megabytes were copied, a NumPy call costs as much as 50 comparisons."""
        expected = self._index.headers[rows].tobytes()
        seen = self.headers_on_disk(rows)
        size = HEADER_BYTES
        if b"".join(seen) == expected:
            return [True] * len(seen)
        return [
            header == expected[at : at + size]
            for header, at in zip(seen, range(0, len(expected), size), strict=True)
        ]

    def headers_on_disk(self, rows: RowIds) -> list[bytes]:
        """One read for each segment, unless its slots lie far apart."""
        found = [b""] * len(rows)
        by_number: dict[int, list[tuple[int, int]]] = {}
        numbers: list[int] = self._index.segment[rows].tolist()
        for at, (row, number) in enumerate(zip(rows.tolist(), numbers, strict=True)):
            slot = row - self._catalog.placed[number].base
            by_number.setdefault(number, []).append((slot, at))
        for number, wanted in by_number.items():
            segment = self._catalog.placed[number].segment
            first, last = min(wanted)[0], max(wanted)[0]
            if last - first < _SPARSE * len(wanted):
                table = segment.header_bytes(first, last - first + 1)
                for slot, at in wanted:
                    begin = (slot - first) * HEADER_BYTES
                    found[at] = table[begin : begin + HEADER_BYTES]
            else:
                for slot, at in wanted:
                    found[at] = segment.header_bytes(slot, 1)
        return found
