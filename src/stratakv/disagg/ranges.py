"""Ranges of bytes as arrays: addresses of what was posted, neighbours joined, cut into slices.

Owns nothing that lasts. Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stratakv.core.errors import TransportError
from stratakv.disagg.transport import Writes
from stratakv.disagg.wire import Addresses, Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Where the regions of one side lie; uint64 [regions] each, in bytes."""

    addresses: Addresses
    sizes: Addresses

    @staticmethod
    def of(places: Sequence[tuple[int, int]]) -> "Regions":
        """Of (address, bytes)."""
        table = np.array(places, np.uint64).reshape(-1, 2)
        return Regions(table[:, 0].copy(), table[:, 1].copy())

    def places(self) -> list[list[int]]:
        return np.stack([self.addresses, self.sizes], 1).tolist()

    def locate(self, regions: Addresses, offsets: Addresses, sizes: Addresses) -> Addresses | None:
        """Addresses of the ranges; None where one is not within its region."""
        if len(regions) and regions.max() >= len(self.sizes):
            return None
        at = regions.view(np.int64)  # NumPy's own index: it converts no other
        room = self.sizes[at]
        # Where an offset is beyond, the difference wraps around.
        if not ((offsets <= room) & (sizes <= room - offsets)).all():
            return None
        return self.addresses[at] + offsets


def located(writes: Writes, here: Regions, there: Regions) -> Ranges:
    """What ``writes`` means for the regions of both sides; ranges without bytes are left out.
    AssertionError for one beyond ours. TransportError for one beyond theirs: they have named it."""
    columns = (writes.regions, writes.offsets, writes.peer_regions, writes.peer_offsets)
    every = [*columns, writes.sizes]
    count = len(writes.sizes)
    assert all(len(each) == count for each in every), "arrays of several lengths"
    least = writes.sizes.min() if count else 1
    assert least >= 0, "a negative size"
    if not least:
        kept = writes.sizes > 0
        every = [each[kept] for each in every]
    # What is negative is beyond every region then.
    region, offset, peer_region, peer_offset, sizes = (each.view(np.uint64) for each in every)
    sources, targets = (
        here.locate(region, offset, sizes),
        there.locate(peer_region, peer_offset, sizes),
    )
    assert sources is not None, "a range leaves its region"
    if targets is None:
        raise TransportError("a range leaves the peer's region")
    return Ranges(sources, targets, sizes)


def joined(ranges: Ranges) -> Ranges:
    """The same bytes in as few ranges as their order gives: neighbours at both ends are one."""
    sources, targets, sizes = ranges.sources, ranges.targets, ranges.sizes
    if len(sizes) < 2:
        return ranges
    follows = (sources[1:] == sources[:-1] + sizes[:-1]) & (
        targets[1:] == targets[:-1] + sizes[:-1]
    )
    starts = np.flatnonzero(np.concatenate([[True], ~follows]))
    return Ranges(sources[starts], targets[starts], np.add.reduceat(sizes, starts))


def slices(ranges: Ranges, most_bytes: int, most_ranges: int) -> Iterator[Ranges]:
    """``ranges`` in order, in parts of at most so many bytes and ranges."""
    if len(ranges.sizes) <= most_ranges and ranges.sizes.sum() <= most_bytes:
        if len(ranges.sizes):
            yield ranges  # most are small: no arithmetic then
        return
    most = np.uint64(most_bytes)
    parts = (ranges.sizes + (most - np.uint64(1))) // most  # of each range
    owner = np.repeat(np.arange(len(parts)), parts.astype(np.int64))
    first = np.cumsum(parts) - parts
    skipped = (np.arange(len(owner), dtype=np.uint64) - first[owner]) * most
    sizes = np.minimum(ranges.sizes[owner] - skipped, most)
    sources, targets = ranges.sources[owner] + skipped, ranges.targets[owner] + skipped
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = ends[start] - sizes[start]
        stop = int(np.searchsorted(ends, before + most, side="right"))
        part = slice(start, min(stop, start + most_ranges))
        yield Ranges(sources[part], targets[part], sizes[part])
        start = part.stop
