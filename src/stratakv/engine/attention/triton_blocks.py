"""Tiles of a launch over heads and keys. Owns the arithmetic that chooses them, by dims and bytes
of a number alone: what is compiled ahead of time is what is launched. Must not import torch.
"""

from dataclasses import dataclass
from typing import Final

QUERY_ROWS: Final = 64
"""Rows of a chunk's tile, queries times their heads."""
LEAST: Final = 16
"""Of each side of a product of tiles."""
NARROW: Final = 128
"""Dims of key and value together, up to which four warps hold a tile of a chunk in registers."""
FLOAT32_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Blocks:
    """Tiles of one launch. heads, queries: of a tile's rows; keys: its columns. main, rest: how a
    key's dim is cut in two; value: a value's, rounded up; warps: of a program; stages: tiles of
    keys under way at once."""

    heads: int
    queries: int
    keys: int
    main: int
    rest: int
    value: int
    warps: int
    stages: int

    @classmethod
    def paged(
        cls, per_head: int, key_dim: int, value_dim: int, item_bytes: int, *, one_token: bool
    ) -> "Blocks":
        """Of keys and values apart. Float32 has no tensor cores: its tiles live in registers."""
        rows = LEAST if one_token else QUERY_ROWS if item_bytes < FLOAT32_BYTES else QUERY_ROWS // 2
        heads = min(power_of_two(per_head), QUERY_ROWS)
        main = max(LEAST, 1 << (key_dim.bit_length() - 1))
        wide = main + _padded(key_dim - main) + _padded(value_dim)
        return cls(
            heads=max(heads, rows) if one_token else min(heads, rows),
            queries=1 if one_token else max(1, rows // heads),
            keys=_columns(wide, item_bytes),
            main=main,
            rest=_padded(key_dim - main),
            value=_padded(value_dim),
            warps=4 if one_token or wide <= NARROW else 8,
            stages=3 if item_bytes < FLOAT32_BYTES else 2,
        )

    @classmethod
    def selected(cls, heads: int, dim: int, value_dim: int, item_bytes: int) -> "Blocks":
        """Of rows that are keys and values: all of a value is in the main part."""
        main = _padded(value_dim)
        large = main > 2 * NARROW
        return cls(
            heads=LEAST if large else min(max(LEAST, power_of_two(heads)), QUERY_ROWS),
            queries=1,
            keys=_columns(main + _padded(dim - main), item_bytes),
            main=main,
            rest=_padded(dim - main),
            value=main,
            warps=8 if large else 4,
            stages=3 if item_bytes < FLOAT32_BYTES else 2,
        )


def ceil(whole: int, part: int) -> int:
    return -(-whole // part)


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _padded(dim: int) -> int:
    """A side of a tile; 0 where nothing is left."""
    return max(LEAST, power_of_two(dim)) if dim > 0 else 0


def _columns(wide: int, item_bytes: int) -> int:
    """Keys of a tile: as many as 32 KiB hold, a power of two."""
    fits = (32 << 10) // (wide * item_bytes)
    return max(LEAST, min(64, 1 << (fits.bit_length() - 1))) if fits else LEAST
