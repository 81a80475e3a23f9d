"""Page I/O in C. Owns the way into ``_page_io``, and finds xxhash's own code for it. Importing this
module fails with ImportError where the package was installed without a compiler, or where xxhash
shows no such code; ``page_io`` then does the same work.
"""

import ctypes
import os
from collections.abc import Sequence
from importlib import import_module
from typing import Final, TypeAlias

from xxhash import xxh3_64_intdigest

from stratakv.storage.file import _page_io
from stratakv.storage.file.page_io import PayloadPlaces
from stratakv.storage.header import PIECE_BYTES

Library: TypeAlias = tuple[int, int, int, int, int, int]
"""Addresses of what hashes at once, makes, frees, resets, updates a state, and gives its hash."""
_SIZES: Final = (1, 3, 16, 128, 240, 241, 5000, 1 << 20)
"""Short and long inputs have code of their own."""


def _library() -> Library:
    """Of the extension that the package xxhash brings, by the names that xxhash.h gives for good.
    Some of its builds choose by processor, under names of their own, and are several times as
    fast."""
    module = import_module("xxhash._xxhash")
    try:
        shared = ctypes.CDLL(str(module.__file__))
    except (AttributeError, OSError) as error:  # built into the interpreter, or out of an archive
        raise ImportError(
            f"xxhash's extension is no library that can be opened: {error}"
        ) from error

    def address(*names: str) -> int:
        for name in names:
            try:
                found = ctypes.cast(shared[name], ctypes.c_void_p).value
            except AttributeError:
                continue
            assert found is not None
            return found
        raise ImportError(f"xxhash shows no {names[-1]}")

    return (
        address("XXH3_64bits_dispatch", "XXH3_64bits"),
        address("XXH3_createState"),
        address("XXH3_freeState"),
        address("XXH3_64bits_reset"),
        address("XXH3_64bits_update_dispatch", "XXH3_64bits_update"),
        address("XXH3_64bits_digest"),
    )


LIBRARY: Final = _library()


class CompiledPageIo:
    """As ``PythonPageIo``, with the interpreter let go of once in a batch: who asks for it after
    every page waits each time for whoever computes."""

    def read(self, slots: PayloadPlaces, pages: Sequence[memoryview]) -> list[int]:
        hashes, error = _page_io.read_pages(
            LIBRARY, slots.fd, slots.stride_bytes, PIECE_BYTES, slots.places, pages
        )
        if error:
            raise OSError(error, os.strerror(error))
        return hashes

    def write(
        self, slots: PayloadPlaces, pages: Sequence[memoryview]
    ) -> tuple[list[int], OSError | None]:
        hashes, error = _page_io.write_pages(
            LIBRARY, slots.fd, slots.stride_bytes, PIECE_BYTES, slots.places, pages
        )
        return hashes, OSError(error, os.strerror(error)) if error else None


def _hashes_right(size: int, piece_bytes: int) -> bool:
    page = memoryview(os.urandom(size))
    found, _ = _page_io.hash_pages(LIBRARY, -1, size, piece_bytes, [0], [page])
    return found == [xxh3_64_intdigest(page)]


if not all(_hashes_right(size, piece) for size in _SIZES for piece in (size, size // 3 + 1)):
    raise ImportError("xxhash's code does not hash as xxhash does")
