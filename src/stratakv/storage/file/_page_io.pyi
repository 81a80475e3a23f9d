from collections.abc import Sequence
from typing import TypeAlias

Library: TypeAlias = tuple[int, int, int, int, int, int]

def read_pages(
    library: Library,
    fd: int,
    stride_bytes: int,
    piece_bytes: int,
    places: Sequence[int],
    pages: Sequence[memoryview],
    /,
) -> tuple[list[int], int]: ...
def write_pages(
    library: Library,
    fd: int,
    stride_bytes: int,
    piece_bytes: int,
    places: Sequence[int],
    pages: Sequence[memoryview],
    /,
) -> tuple[list[int], int]: ...
def hash_pages(
    library: Library,
    fd: int,
    stride_bytes: int,
    piece_bytes: int,
    places: Sequence[int],
    pages: Sequence[memoryview],
    /,
) -> tuple[list[int], int]: ...
