"""Payloads of slots of a file, read or written and hashed.

Owns the calls of the system and their short answers. Must not know what a slot is for.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from xxhash import xxh3_64, xxh3_64_intdigest

from stratakv.storage.file.segment_notes import BLOCK_BYTES
from stratakv.storage.header import PIECE_BYTES

SHORT: Final = -1
"""In place of a hash: the file ends inside the page."""
_ZEROS: Final = memoryview(bytes(BLOCK_BYTES))


@dataclass(frozen=True, slots=True)
class PayloadPlaces:
    """Of the file ``fd``: where each begins, in bytes. What pads a page to ``stride_bytes`` is less
    than a block."""

    fd: int
    stride_bytes: int
    places: Sequence[int]


class PageIo(Protocol):
    """Pages of a batch have one size. Where a file ends, and that a signal cut a call short, is
    seen by ``SHORT`` or not at all."""

    def read(self, slots: PayloadPlaces, pages: Sequence[memoryview]) -> list[int]:
        """Fill a page from each slot: xxh3-64 of each as it is there now. OSError where any of them
        cannot be read."""
        ...

    def write(
        self, slots: PayloadPlaces, pages: Sequence[memoryview]
    ) -> tuple[list[int], OSError | None]:
        """Write a page into each slot: xxh3-64 of each that is written, which are all before an
        error."""
        ...


class PythonPageIo:
    """A ``PageIo`` that needs no compiler."""

    def read(self, slots: PayloadPlaces, pages: Sequence[memoryview]) -> list[int]:
        hashes: list[int] = []
        for at, some in _together(slots, pages):
            if len(some) > 1:
                padding = slots.stride_bytes - len(some[0])
                sink = memoryview(bytearray(padding))
                size = len(some) * slots.stride_bytes
                if os.preadv(slots.fd, _padded(some, sink), at[0]) == size:
                    hashes += map(xxh3_64_intdigest, some)
                    continue
            # The file ends here, or a signal came: see which of them are whole.
            hashes += [_read(slots.fd, begin, page) for begin, page in zip(at, some, strict=True)]
        return hashes

    def write(
        self, slots: PayloadPlaces, pages: Sequence[memoryview]
    ) -> tuple[list[int], OSError | None]:
        hashes: list[int] = []
        try:
            for at, some in _together(slots, pages):
                padding = _ZEROS[: slots.stride_bytes - len(some[0])]
                if slots.stride_bytes > PIECE_BYTES:
                    hashes.append(_write_large(slots.fd, at[0], some[0], padding))
                else:
                    write_all(slots.fd, _padded(some, padding), at[0])
                    # Only now: the copy into the kernel has brought the pages into the cache.
                    hashes += map(xxh3_64_intdigest, some)
        except OSError as error:
            return hashes, error
        return hashes, None


def _together(
    slots: PayloadPlaces, pages: Sequence[memoryview]
) -> Iterator[tuple[Sequence[int], Sequence[memoryview]]]:
    """What one call of the system moves: slots that follow one another."""
    places, stride = slots.places, slots.stride_bytes
    most = max(1, PIECE_BYTES // stride)
    first = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or at - first == most or places[at] != places[at - 1] + stride:
            yield places[first:at], pages[first:at]
            first = at


def _padded(pages: Sequence[memoryview], padding: memoryview) -> Sequence[memoryview]:
    """What lies in their slots."""
    return [part for page in pages for part in (page, padding)] if len(padding) else pages


def _read(fd: int, at: int, into: memoryview) -> int:
    size = len(into)
    if size <= PIECE_BYTES:
        return xxh3_64_intdigest(into) if _fill(fd, into, at) else SHORT
    state = xxh3_64()
    for start in range(0, size, PIECE_BYTES):
        piece = into[start : start + PIECE_BYTES]
        if not _fill(fd, piece, at + start):
            return SHORT
        state.update(piece)
    return state.intdigest()


def _fill(fd: int, into: memoryview, at: int) -> bool:
    """Read until ``into`` is full; False where the file ends before."""
    done = os.preadv(fd, [into], at)
    while done < len(into):
        more = os.preadv(fd, [into[done:]], at + done)
        if not more:
            return False
        done += more
    return True


def _write_large(fd: int, at: int, page: memoryview, padding: memoryview) -> int:
    state = xxh3_64()
    for start in range(0, len(page), PIECE_BYTES):
        piece = page[start : start + PIECE_BYTES]
        last = start + PIECE_BYTES >= len(page)
        write_all(fd, [piece, padding] if last else [piece], at + start)
        state.update(piece)
    return state.intdigest()


def write_all(fd: int, parts: Sequence[memoryview], at: int) -> None:
    """pwritev until everything is there; a disk that is full stops it with an OSError. Padding too:
    a block of which only a part is written has to be read first."""
    size = sum(map(len, parts))
    done = os.pwritev(fd, parts, at)
    while done < size:
        rest = memoryview(b"".join(parts))[done:]
        written = os.pwrite(fd, rest, at + done)
        if written == 0:
            raise OSError(5, "nothing was written")
        done += written
