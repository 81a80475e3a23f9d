"""Pages of one rank, stored as slices that do not depend on how many ranks there are.

Owns the step between a rank's page and the objects that hold it: their names, and the gathering of
slices that lie in pieces within a page. What every rank has alike is written once, by one of them.
Runs on the I/O worker's thread. Must not cut (``spec.sharding``), nor know how objects are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.spec.sharding import ObjectShard, Sharding, Strip
from stratakv.storage.backend import (
    Everything,
    ObjectKey,
    ReadStatus,
    StorageBackend,
    WriteStatus,
)

Bytes: TypeAlias = npt.NDArray[np.uint8]
_READ: Final = (ReadStatus.HIT, ReadStatus.MISS, ReadStatus.CORRUPT, ReadStatus.FAILED)
_WRITTEN: Final = (
    WriteStatus.PRESENT,
    WriteStatus.STORED,
    WriteStatus.REFUSED,
    WriteStatus.FAILED,
)
"""From the best to the worst: a page is as well as the worst of its slices."""


@dataclass(frozen=True, slots=True)
class GroupShards:
    """``shards``: the objects of a rank's page; ``writes``: whether this rank is the one to store
    them."""

    shards: tuple[ObjectShard, ...]
    writes: bool


class ShardedBackend:
    """``groups``: of the rank whose pages come and go here; ``inner`` has the form of a slice."""

    def __init__(self, inner: StorageBackend, groups: Sequence[GroupShards]) -> None:
        self._inner = inner
        self._groups = groups

    @classmethod
    def of(cls, inner: StorageBackend, sharding: Sharding, rank: int, cut: int) -> "ShardedBackend":
        """Of a rank's pages, in slices of ``cut``."""
        groups = [
            GroupShards(sharding.objects(group.id, rank, cut), sharding.writes(group.id, rank))
            for group in sharding.whole.groups
        ]
        return cls(inner, groups)

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        if not keys:
            return np.empty(0, np.bool_)
        present = self._inner.contains(self._names(keys))
        counts = [len(self._groups[key.group].shards) for key in keys]
        return np.logical_and.reduceat(present, np.cumsum([0, *counts[:-1]]))

    def read(self, keys: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[ReadStatus]:
        slices = [self._room(key, page) for key, page in zip(keys, into, strict=True)]
        names = self._names(keys)
        came = iter(self._inner.read(names, [part for parts in slices for part in parts]))
        statuses: list[ReadStatus] = []
        for key, page, parts in zip(keys, into, slices, strict=True):
            shards = self._groups[key.group].shards
            status = max((next(came) for _ in shards), key=_READ.index)
            if status is ReadStatus.HIT:
                for shard, part in zip(shards, parts, strict=True):
                    _scatter(shard, part, page)
            statuses.append(status)
        return statuses

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[WriteStatus]:
        mine = [self._groups[key.group].writes for key in keys]
        names = self._names(list(compress(keys, mine)))
        slices = [
            _gathered(shard, page)
            for key, page in compress(zip(keys, pages, strict=True), mine)
            for shard in self._groups[key.group].shards
        ]
        wrote = iter(self._inner.write(names, slices) if names else ())
        return [
            max((next(wrote) for _ in self._groups[key.group].shards), key=_WRITTEN.index)
            if here
            else WriteStatus.PRESENT  # as far as this rank knows: the writer's vote decides
            for key, here in zip(keys, mine, strict=True)
        ]

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        names = self._names([key for key in keys if self._groups[key.group].writes])
        if names:
            self._inner.touch(names)

    def remove(self, keys: Sequence[ObjectKey] | Everything) -> int:
        if isinstance(keys, Everything):
            return self._inner.remove(keys)
        return self._inner.remove(self._names(keys))

    def close(self) -> None:
        self._inner.close()

    def _names(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        return [
            ObjectKey(key.page, key.group, shard.number)
            for key in keys
            for shard in self._groups[key.group].shards
        ]

    def _room(self, key: ObjectKey, page: memoryview) -> list[memoryview]:
        """Where the slices of a page are read to: the page itself, or beside it."""
        return [
            page[_start(shard) : _start(shard) + shard.payload_bytes]
            if shard.contiguous
            else memoryview(bytearray(shard.payload_bytes))
            for shard in self._groups[key.group].shards
        ]


def _start(shard: ObjectShard) -> int:
    return shard.strips[0].offset_bytes


def _gathered(shard: ObjectShard, page: memoryview) -> memoryview:
    """A slice's payload; no copy where it lies in one piece."""
    if shard.contiguous:
        return page[_start(shard) : _start(shard) + shard.payload_bytes]
    payload = np.empty(shard.payload_bytes, np.uint8)
    whole = np.frombuffer(page, np.uint8)
    at = 0
    for strip in shard.strips:
        size = strip.count * strip.bytes
        payload[at : at + size].reshape(strip.count, strip.bytes)[:] = _pieces(whole, strip)
        at += size
    return payload.data


def _scatter(shard: ObjectShard, payload: memoryview, page: memoryview) -> None:
    """Put a slice's pieces in their places; nothing to do where it was read there."""
    if shard.contiguous:
        return
    whole, found = np.frombuffer(page, np.uint8), np.frombuffer(payload, np.uint8)
    at = 0
    for strip in shard.strips:
        size = strip.count * strip.bytes
        _pieces(whole, strip)[:] = found[at : at + size].reshape(strip.count, strip.bytes)
        at += size


def _pieces(page: Bytes, strip: Strip) -> Bytes:
    """uint8 [count, bytes], a view of ``page``."""
    last = strip.offset_bytes + (strip.count - 1) * strip.stride_bytes + strip.bytes
    assert last <= len(page), "a strip ends outside its page"
    return np.lib.stride_tricks.as_strided(
        page[strip.offset_bytes :], (strip.count, strip.bytes), (strip.stride_bytes, 1)
    )
