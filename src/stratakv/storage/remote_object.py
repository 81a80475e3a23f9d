"""An object of a remote store: its name, its header, and whether what came back is what went in.

Owns the value that all remote back ends store: header, then payload. Must not do I/O.
"""

import struct
import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.core.errors import ConfigError
from stratakv.storage.backend import ObjectKey, StoreFormat
from stratakv.storage.header import (
    HEADER,
    MAGIC,
    Headers,
    headers_of,
    is_sound,
    payload_hash,
)

_WORD: Final = struct.Struct("<Q")
_PAYLOAD_HASH_AT: Final = HEADER.fields["payload_hash"][1] if HEADER.fields else 0
_CHECKSUM_AT: Final = HEADER.itemsize - _WORD.size

Mask = npt.NDArray[np.bool_]


def name_of(key: ObjectKey, form: StoreFormat, separator: str = "/") -> str:
    """``<spec digest>/<group>/<page key>.<shard>``, both in hex."""
    parts = (form.spec_digest.hex(), str(key.group), f"{key.page.hex()}.{key.shard}")
    return separator.join(parts)


def unsealed_heads(keys: Sequence[ObjectKey], form: StoreFormat) -> Headers:
    """The headers of objects whose pages are not hashed yet; see ``seal_head``."""
    table = headers_of(list(keys), form.spec_digest)
    table["payload_bytes"] = [form.page_bytes[key.group] for key in keys]
    table["stored_ns"] = time.time_ns()
    return table


def seal_head(head: memoryview, page: memoryview) -> None:
    """Complete one header with its page's hash. Right before the page is sent: its bytes are then
    hashed and copied in one visit to memory, and the other end works meanwhile."""
    _WORD.pack_into(head, _PAYLOAD_HASH_AT, payload_hash(page))
    _WORD.pack_into(head, _CHECKSUM_AT, payload_hash(head[:_CHECKSUM_AT]))


def are_genuine(
    keys: Sequence[ObjectKey], form: StoreFormat, heads: Headers, hashes: Sequence[int]
) -> Mask:
    """Which headers came back unharmed, belong to their keys and describe a payload of ``hashes``
    and of this store's size; bool [n]."""
    wanted = headers_of(list(keys), form.spec_digest)
    sizes = [form.page_bytes[key.group] for key in keys]
    genuine = is_sound(heads) & (heads["magic"] == MAGIC)
    genuine &= (heads["spec"] == wanted["spec"]).all(axis=1)
    genuine &= (heads["page"] == wanted["page"]).all(axis=1)
    genuine &= (heads["group"] == wanted["group"]) & (heads["shard"] == wanted["shard"])
    genuine &= heads["payload_bytes"] == np.array(sizes, np.uint64)
    return genuine & (heads["payload_hash"] == np.array(hashes, np.uint64))


def blank_heads(count: int) -> Headers:
    """Room for ``count`` headers that are to be read."""
    return np.zeros(count, HEADER)


def head_views(heads: Headers) -> list[memoryview]:
    """A writable view of each header's bytes."""
    rows = heads.view(np.uint8).reshape(len(heads), HEADER.itemsize)
    return [row.data for row in rows]


def first_places(keys: Sequence[ObjectKey]) -> dict[ObjectKey, int]:
    """Where each key comes first, in order: a batch may name one twice, which clients that work on
    many at once do not expect."""
    places: dict[ObjectKey, int] = {}
    for i, key in enumerate(keys):
        places.setdefault(key, i)
    return places


def batches(sizes: Sequence[int], limit_bytes: int) -> Iterator[slice]:
    """Consecutive slices of at most ``limit_bytes`` together, and of one object at least."""
    begin = total = 0
    for at, size in enumerate(sizes):
        if total and total + size > limit_bytes:
            yield slice(begin, at)
            begin, total = at, 0
        total += size
    if begin < len(sizes):
        yield slice(begin, len(sizes))


def library_missing(extra: str, error: ImportError, packages: str = "") -> ConfigError:
    """What to say to an operator whose installation lacks the client of ``extra``, or what Debian's
    ``packages`` have for it."""
    also = f" and apt-get install {packages}" if packages else ""
    return ConfigError(
        f"--storage {extra}://: its client cannot be imported ({error}); "
        f"allowed after: pip install 'stratakv[{extra}]'{also}"
    )
