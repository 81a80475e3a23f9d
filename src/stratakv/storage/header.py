"""What stands before (or beside) the bytes of every stored object: who it is, and what was stored.

Owns the 128 bytes and their checks, in tables. Must not do I/O or know segments.

    magic u32 | version u32 | spec digest 16 | page key 32 | group u32 | shard u32 |
    payload bytes u64 | xxh3-64 of the payload u64 | stored at, ns u64 | zeros 32 |
    xxh3-64 of the 120 bytes before u64                              all little endian
"""

from collections.abc import Sequence
from itertools import chain
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from stratakv.storage.backend import ObjectKey

HEADER_BYTES: Final = 128
MAGIC: Final = int.from_bytes(b"SKVO", "little")
QUARANTINED: Final = int.from_bytes(b"SKVQ", "little")
"""In place of ``MAGIC``: this object was found corrupt; never served, kept for ``fsck``."""
VERSION: Final = 1
PIECE_BYTES: Final = 1 << 20
"""What is hashed while the core's cache still has it: second-level caches hold 1 to 2 MiB. Pieces
of 128 KiB cost more in calls than they save: 7% of the read of a 4 MiB page."""

HEADER: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u4"),
        ("spec", "<u8", (2,)),
        ("page", "<u8", (4,)),
        ("group", "<u4"),
        ("shard", "<u4"),
        ("payload_bytes", "<u8"),
        ("payload_hash", "<u8"),
        ("stored_ns", "<u8"),
        ("zeros", "<u8", (4,)),
        ("checksum", "<u8"),
    ]
)
assert HEADER.itemsize == HEADER_BYTES
KEY_WORDS: Final = slice(3, 8)
"""Page, group and shard, in ``words_of``."""
_COVERED: Final = HEADER_BYTES - 8

Headers: TypeAlias = npt.NDArray[np.void]
"""A table of headers, dtype ``HEADER``, shape [n]."""
KeyWords: TypeAlias = npt.NDArray[np.uint64]
"""Page, group and shard of each object, uint64 [n, 5]."""


def payload_hash(payload: memoryview | bytes) -> int:
    """xxh3-64 of a payload that is in memory."""
    return xxh3_64_intdigest(payload)


def headers_of(keys: Sequence[ObjectKey], spec_digest: bytes) -> Headers:
    """A table with who each object is; payload, time and checksum are still to be set."""
    assert len(spec_digest) == 16, f"a spec digest of {len(spec_digest)} bytes"
    table = np.zeros(len(keys), HEADER)
    table["magic"], table["version"] = MAGIC, VERSION
    table["spec"] = np.frombuffer(spec_digest, "<u8")
    words_of(table)[:, KEY_WORDS] = key_words(keys)
    return table


def key_words(keys: Sequence[ObjectKey]) -> KeyWords:
    """``KEY_WORDS`` of each object: what tells objects of one format apart. The loops are in C:
    a question has thousands of keys."""
    words = np.empty((len(keys), KEY_WORDS.stop - KEY_WORDS.start), "<u8")
    if keys:
        pages, groups, shards = zip(*keys, strict=True)
        joined = b"".join(pages)
        assert len(joined) == 32 * len(keys), "a page key is not 32 bytes long"
        words[:, :4] = np.frombuffer(joined, "<u8").reshape(-1, 4)
        places = np.fromiter(chain(groups, shards), "<u4", 2 * len(keys)).reshape(2, -1)
        words[:, 4] = places[0]
        words[:, 4] |= places[1].astype("<u8") << np.uint64(32)
    return words


def words_of(table: Headers) -> npt.NDArray[np.uint64]:
    """The table as it lies in memory, uint64 [n, 16]; a view where it lies in one piece. One look
    at words costs less than one at each field, most of all in a cache that was just flushed."""
    return np.ascontiguousarray(table).view("<u8").reshape(len(table), HEADER_BYTES // 8)


def seal(table: Headers) -> Headers:
    """Set the checksums, in place; returns the table."""
    table["checksum"] = _checksums(table)
    return table


def is_sound(table: Headers) -> npt.NDArray[np.bool_]:
    """Which are sealed headers of this version, quarantined ones too; bool [n]."""
    sound = (table["magic"] == MAGIC) | (table["magic"] == QUARANTINED)
    sound &= table["version"] == VERSION
    at = np.flatnonzero(sound)
    sound[at] = table["checksum"][at] == _checksums(table[at])
    return sound


def is_blank(table: Headers) -> npt.NDArray[np.bool_]:
    """Which are all zeros: nothing was stored there; bool [n]."""
    return np.equal(words_of(table).any(axis=1), False)  # noqa: FBT003


def _checksums(table: Headers) -> npt.NDArray[np.uint64]:
    """xxh3-64 of the covered bytes of each header, uint64 [n]; the loop is in C."""
    rows = table.tobytes()
    view = memoryview(rows)
    starts = range(0, len(rows), HEADER_BYTES)
    covered = map(
        view.__getitem__, map(slice, starts, range(_COVERED, len(rows) + 1, HEADER_BYTES))
    )
    return np.fromiter(map(xxh3_64_intdigest, covered), np.uint64, len(table))
