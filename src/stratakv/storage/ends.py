"""The two ends of one open store: where its pages are read, and where they are written.

Owns how many backends a store is opened with, the key in front of each, and what both report of
themselves. Must not read URLs, nor choose which store. Opening blocks.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import TypeVar

from stratakv.core.errors import ConfigError, StorageError
from stratakv.storage.backend import StorageBackend, StoreFormat
from stratakv.storage.file.store import FileStore
from stratakv.storage.io_worker import Backends
from stratakv.storage.opened_on_use import OpenedOnUse
from stratakv.storage.registry import open_storage
from stratakv.storage.sealed import SealedBackend, sealed_form
from stratakv.storage.store_key import StoreKey
from stratakv.storage.urls import FileUrl, RedisOptions, S3Options, StorageUrl, hidden

log = logging.getLogger(__name__)
T = TypeVar("T")


def open_ends(parsed: StorageUrl, form: StoreFormat, key: StoreKey | None, url: str) -> Backends:
    """An open store for objects of ``form``, behind ``key`` where there is one. ``url``: as it was
    given, for the log.

    ConfigError for what is not allowed, StorageError where it cannot be reached; nothing is left
    open then.
    """
    with ExitStack() as undo:
        reading = opened(lambda: sealed_store(open_storage, parsed, form, key), url)
        undo.callback(reading.close)
        writing = reading
        if _for_several(parsed):
            writing = opened(lambda: sealed_store(open_storage, parsed, form, key), url)
        undo.pop_all()
    return Backends(reading, writing)


def ends_on_use(parsed: StorageUrl, form: StoreFormat, key: StoreKey | None, url: str) -> Backends:
    """The same ends, each opened by its first call, which blocks and raises as ``open_ends`` does,
    and by the next one where it could not be."""

    def end() -> StorageBackend:
        return OpenedOnUse(
            lambda: opened(lambda: sealed_store(open_storage, parsed, form, key), url)
        )

    reading = end()
    return Backends(reading, end() if _for_several(parsed) else reading)


def _for_several(parsed: StorageUrl) -> bool:
    """Whether a store is made for several clients: a second one of another may be another store."""
    return isinstance(parsed, FileUrl | RedisOptions | S3Options)


def close_ends(ends: Backends) -> None:
    """Both of them, also where one cannot be closed; its error is raised."""
    with ExitStack() as closing:
        closing.callback(ends.reading.close)
        if ends.writing is not ends.reading:
            closing.callback(ends.writing.close)


def sealed_store(
    opening: Callable[[StorageUrl, StoreFormat], StorageBackend],
    url: StorageUrl,
    form: StoreFormat,
    key: StoreKey | None,
) -> StorageBackend:
    """What ``opening`` gives for objects of ``form``, behind the key where there is one."""
    if key is None:
        return opening(url, form)
    inner = sealed_form(form, key)
    return SealedBackend(opening(url, inner), inner, key)


def opened(opening: Callable[[], T], url: str) -> T:
    """What ``opening`` gives. A store may be a stranger's: whatever it raises, it only could not be
    opened."""
    try:
        return opening()
    except (ConfigError, StorageError):
        raise
    except Exception as error:
        log.exception("%s could not be opened", hidden(url))
        raise StorageError(f"{type(error).__name__} while it was opened") from error


def figures_of(ends: Backends) -> Mapping[str, object]:
    """What a store reports of itself, counters of both ends together; nothing of one that does
    not."""
    return _figures(ends.reading, ends.writing)


def _figures(reading: StorageBackend, writing: StorageBackend) -> Mapping[str, object]:
    if isinstance(reading, SealedBackend) and isinstance(writing, SealedBackend):
        forged = sum(end.forged for end in {reading, writing})
        seal = {"key": writing.key.id.hex(), "forged": forged}
        return {**_figures(reading.inner, writing.inner), "seal": seal}
    if not isinstance(reading, FileStore) or not isinstance(writing, FileStore):
        return {}
    found = asdict(writing.stats())
    if reading is not writing:
        for name, count in asdict(reading.stats().counters).items():
            found["counters"][name] += count
    return found
