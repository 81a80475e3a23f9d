"""Bytes as people write them. Owns the two directions; must not know which flag means what."""

import re
from typing import Final

from stratakv.core.choices import given
from stratakv.core.errors import ConfigError

UNIT_BYTES: Final[dict[str, int]] = {
    "": 1, "B": 1,
    "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
ALLOWED: Final = "a number of bytes, or one with K, M, G, T, KiB, MiB, GiB, TiB (powers of 1024) \
or KB, MB, GB, TB (powers of 1000)"

_QUANTITY: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_SCALE: Final = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def parse_bytes(text: str, flag: str) -> int:
    """As ``bytes_of``; ConfigError names ``flag`` and the allowed units."""
    found = bytes_of(text)
    if found is None:
        raise ConfigError(f"{given(flag, text)}: allowed is {ALLOWED}")
    return found


def bytes_of(text: str) -> int | None:
    """``text`` in bytes, fractions of a byte dropped: "64GiB", "1.5G", "1073741824". None: it is
    none of these."""
    found = _QUANTITY.fullmatch(text.strip())
    unit_bytes = UNIT_BYTES.get(found[2].upper()) if found else None
    if found is None or unit_bytes is None:
        return None
    whole, _, part = found[1].partition(".")
    # A float would lose bytes above 2**53.
    return int(whole + part) * unit_bytes // 10 ** len(part)


def format_bytes(size_bytes: int) -> str:
    """To two decimals in the largest binary unit: "64 GiB", "1.50 GiB", "512 B"."""
    for unit, unit_bytes in _SCALE:
        if abs(size_bytes) >= unit_bytes:
            whole, rest = divmod(size_bytes, unit_bytes)
            return f"{size_bytes / unit_bytes:.2f} {unit}" if rest else f"{whole} {unit}"
    return f"{size_bytes} B"
