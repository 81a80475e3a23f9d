"""One digest over many tensors: how they are framed, wherever they came from.

Owns the framing. Whoever digests tensors begins with a format of its own, so that no two kinds of
digest ever agree. Must not read anything.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """What a digest says of one tensor. ``digest``: xxh3-128 of all its bytes, contiguous and row
    by row."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes

    @classmethod
    def of(
        cls, name: str, dtype: str, shape: Iterable[int], data: npt.NDArray[np.uint8]
    ) -> "TensorDigest":
        return cls(name, dtype, tuple(shape), xxh3_128_digest(data.data))


def framed(parts: Iterable[bytes]) -> bytes:
    """SHA-256 over ``parts``, each with its length before it: ("ab", "c") is not ("a", "bc")."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def digest_of(head: Iterable[bytes], lines: Iterable[TensorDigest]) -> bytes:
    """32 bytes over ``head``, whose first part names the format, and ``lines`` as they come."""
    return framed(_parts(list(head), lines))


def _parts(head: list[bytes], lines: Iterable[TensorDigest]) -> Iterable[bytes]:
    yield b"%d" % len(head)
    yield from head
    for line in lines:
        yield line.name.encode("utf-8", "surrogatepass")
        yield f"{line.dtype} {line.shape}".encode()
        yield line.digest
