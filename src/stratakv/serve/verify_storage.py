"""Which stores ``stratakv verify`` writes into: such as outlive an engine, have room for its pages,
and lose none of somebody's own. Owns these refusals. Must not open or make anything."""

import os
from pathlib import Path
from typing import Final

from stratakv.core.choices import given
from stratakv.core.errors import ConfigError
from stratakv.core.units import format_bytes
from stratakv.storage.registry import plugin_schemes
from stratakv.storage.urls import FLAG, FileUrl, MemoryUrl, hidden, parse_storage_url

PAGE_BYTES: Final = 8 << 10
"""Of files, beside a page's own: the rest of its last block, and its header."""
TABLES_BYTES: Final = 2 << 20
"""Of all segments that a quota has: what their tables take of blocks that they do not fill."""


def check_store(url: str) -> None:
    """ConfigError for a URL that is none, for memory, and for files beside others: to make room for
    a verification's pages, a store deletes the ones that it has."""
    match parse_storage_url(url, plugin_schemes()):
        case MemoryUrl():
            raise ConfigError(
                f"{given(FLAG, hidden(url))}: it ends with the engine that has it, and another one "
                "is to find its pages; allowed is a store that outlives an engine, as "
                "file:///DIRECTORY"
            )
        case FileUrl(directory=directory) if not _free(directory):
            raise ConfigError(
                f"{given(FLAG, hidden(url))}: a verification could cost the pages that are there; "
                "allowed is a directory that is not there yet, or an empty one"
            )
        case _:
            pass


def check_quota(url: str, pages: int, pages_bytes: int) -> None:
    """``pages``: that a verification keeps at most, of all groups; ``pages_bytes``: of all of them.
    ConfigError for files that are given less: what it is to find there would have left."""
    parsed = parse_storage_url(url, plugin_schemes())
    least = pages_bytes + pages * PAGE_BYTES + TABLES_BYTES
    if isinstance(parsed, FileUrl) and parsed.quota_bytes < least:
        raise ConfigError(
            f"{given(FLAG, hidden(url))}: a quota of {format_bytes(parsed.quota_bytes)} is too "
            f"little for this verification's pages; allowed for quota is {least} bytes "
            f"({format_bytes(least)}) and more"
        )


def _free(directory: Path) -> bool:
    """False too for what cannot be read, or is no directory."""
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True
    except OSError:
        return False
