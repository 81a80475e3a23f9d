"""Whether a store can be used from here, and what to do where it cannot.

Owns the check of a store and its words. Writes nothing to a store but one page of its own, which it
removes, and nothing at all to a file store that is there: it would make room for that page.
"""

import os
import secrets
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Final, assert_never

from stratakv.connect.checks import Check
from stratakv.connect.stores import open_engine_store
from stratakv.core.errors import ConfigError, StorageError
from stratakv.core.ids import GroupId, PageKey
from stratakv.core.units import format_bytes
from stratakv.storage.backend import (
    ObjectKey,
    ReadStatus,
    StorageBackend,
    StoreFormat,
    WriteStatus,
)
from stratakv.storage.ends import close_ends
from stratakv.storage.registry import plugin_schemes
from stratakv.storage.store_key import read_key
from stratakv.storage.urls import (
    FileUrl,
    MemoryUrl,
    MooncakeOptions,
    PluginUrl,
    RedisOptions,
    S3Options,
    StorageUrl,
    hidden,
    parse_storage_url,
)

PROBE_BYTES: Final = 4096
_URLS: Final = (
    "file:///var/lib/stratakv?quota=200GiB, or another that stands in `stratakv serve --help` "
    "under --storage"
)
_DIRECTORY: Final = "a directory that this user may write to, on a disk with room"


def store_check(url: str, key_file: str | None) -> Check:
    """Whether a page can be written there, read and removed; of a file store that is there, whether
    this user may write to it."""
    try:
        parsed = parse_storage_url(url, plugin_schemes())
    except ConfigError as error:
        return Check("store", "bad", str(error), _URLS)
    if key_file is not None:
        try:
            read_key(key_file)
        except ConfigError as error:
            return Check("store", "bad", str(error), _key_advice(key_file))
    try:
        if isinstance(parsed, FileUrl) and _is_used(parsed.directory):
            return _used_store(parsed)
        problem = _problem(url, key_file)
    except OSError as error:
        problem = f"{hidden(url)}: {error.strerror}"
    if problem:
        return Check("store", "bad", problem, _advice(parsed))
    text = f"{hidden(url)}: a page was written, read and removed"
    return _room(parsed, text) if isinstance(parsed, FileUrl) else Check("store", "fine", text)


def _problem(url: str, key_file: str | None) -> str:
    """Of a store that opens, or does not; empty where there is none."""
    form = StoreFormat(spec_digest=secrets.token_bytes(16), page_bytes=(PROBE_BYTES,))
    try:
        ends = open_engine_store(url, key_file, form)
    except ConfigError as error:
        return str(error)
    try:
        problem = _probe(ends.writing, ends.reading)
    except StorageError as error:
        problem = str(error)
    finally:
        close_ends(ends)
    return f"{hidden(url)}: {problem}" if problem else ""


def _advice(url: StorageUrl) -> str:
    """For a store that does not open, or does not keep a page."""
    match url:
        case MemoryUrl():
            return "a larger quota"
        case FileUrl():
            return _DIRECTORY
        case RedisOptions():
            return (
                "redis-cli -u URL ping, from here: a server that runs, the right port and "
                "password, and memory for pages (maxmemory)"
            )
        case S3Options():
            return (
                "a bucket that is there, its endpoint and region in the URL, and AWS_ACCESS_KEY_ID "
                "and AWS_SECRET_ACCESS_KEY of a user who may read, write, list and delete"
            )
        case MooncakeOptions():
            return "a mooncake_master that runs at that port, and metadata= of that master"
        case PluginUrl():
            return f"what the package asks for that brings {url.scheme}://"
        case _:
            assert_never(url)


def _key_advice(path: str) -> str:
    name = shlex.quote(path)
    return f"(umask 077; openssl rand -hex 32 > {name}), or the file of those who share the store"


def _room(url: FileUrl, text: str) -> Check:
    """Whether the disk has what the quota allows."""
    used = _used_bytes(url.directory)
    disk = os.statvfs(url.directory)
    free = disk.f_bavail * disk.f_frsize
    quota = f"quota {format_bytes(url.quota_bytes)}"
    if url.quota_bytes <= used + free:
        return Check("store", "fine", f"{text}; {quota}, of which {format_bytes(used)} are used")
    return Check(
        "store",
        "poor",
        f"{text}; {quota}, but the disk has no more than {format_bytes(free)} free",
        "a quota that the disk can hold: a full disk refuses pages, and evicts none",
    )


def _used_bytes(directory: Path) -> int:
    """On disk; a server may run on it, and remove segments meanwhile."""
    used = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            used += path.lstat().st_blocks * 512
    return used


def file_directory(url: str) -> Path | None:
    """Of a file store; None for another, and for what is no store's URL."""
    try:
        parsed = parse_storage_url(url, plugin_schemes())
    except ConfigError:
        return None
    return parsed.directory if isinstance(parsed, FileUrl) else None


def _is_used(directory: Path) -> bool:
    """OSError where this user may not look."""
    try:
        return any(directory.iterdir())
    except FileNotFoundError:
        return False


def _used_store(url: FileUrl) -> Check:
    directory = url.directory
    if os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return _room(url, f"{directory}: is there; nothing was written to it")
    return Check("store", "bad", f"{directory}: is there, for others", _DIRECTORY)


def _probe(writing: StorageBackend, reading: StorageBackend) -> str:
    """What does not work; empty where all does."""
    keys = [ObjectKey(PageKey(secrets.token_bytes(32)), GroupId(0))]
    page, back = secrets.token_bytes(PROBE_BYTES), bytearray(PROBE_BYTES)
    if writing.write(keys, [memoryview(page)]) != [WriteStatus.STORED]:
        return "a page was not stored"
    if reading.read(keys, [memoryview(back)]) != [ReadStatus.HIT] or bytes(back) != page:
        return "a page did not come back"
    writing.remove(keys)
    return ""
