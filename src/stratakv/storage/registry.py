"""From a storage URL's record to an open backend, and the schemes that installed packages add.

Owns the table of backends. Must not read URLs, and imports neither a remote store, which brings
sockets and event loops, before one is opened, nor ever a client library: a backend does when it is
made.

A package adds a scheme with an entry point:

    [project.entry-points."stratakv.storage"]
    mystore = "mypackage.store:open_store"     # (PluginUrl, StoreFormat) -> StorageBackend
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, assert_never

from stratakv.core.clock import WallClock
from stratakv.core.errors import ConfigError
from stratakv.core.units import format_bytes
from stratakv.storage.backend import StorageBackend, StoreFormat
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.recognise import NotOursError
from stratakv.storage.file.segment import Geometry
from stratakv.storage.file.store import FileStore
from stratakv.storage.memory import MemoryBackend
from stratakv.storage.urls import (
    FLAG,
    FileUrl,
    MemoryUrl,
    MooncakeOptions,
    PluginUrl,
    RedisOptions,
    S3Options,
    StorageUrl,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "stratakv.storage"
BUILT_IN: Final = frozenset({"memory", "file", "redis", "rediss", "redis+unix", "s3", "mooncake"})

MARK_SLOTS: Final = 8
"""Of a segment of marks, which a directory has one of, beside large ones of pages."""

Factory = Callable[[PluginUrl, StoreFormat], StorageBackend]


def plugin_schemes() -> tuple[str, ...]:
    """The schemes that installed packages add, sorted; nothing of theirs is imported. They do not
    take over a built-in one."""
    return tuple(sorted({point.name for point in _points()} - BUILT_IN))


def open_storage(url: StorageUrl, form: StoreFormat) -> StorageBackend:
    """An open backend for objects of ``form``.

    ConfigError where its client library is missing, a setting is not allowed, a quota can never
    hold anything or a directory is not ours; StorageError where its server does not answer or does
    not let us in.
    """
    match url:
        case MemoryUrl():
            _check_quota(url.quota_bytes, sum(form.page_bytes))
            return MemoryBackend(form, url.quota_bytes)
        case FileUrl():
            _check_quota(url.quota_bytes, _least_file_bytes(form))
            return _file_store(url, form, _keeping(url))
        case RedisOptions():
            from stratakv.storage.redis import RedisBackend  # noqa: PLC0415

            return RedisBackend(form, url)
        case S3Options():
            from stratakv.storage.s3 import S3Backend  # noqa: PLC0415

            return S3Backend(form, url)
        case MooncakeOptions():
            from stratakv.storage.mooncake import MooncakeBackend  # noqa: PLC0415

            return MooncakeBackend(form, url)
        case PluginUrl():
            return _factory(url.scheme)(url, form)
        case _:
            assert_never(url)


def open_marks(url: StorageUrl, form: StoreFormat) -> StorageBackend:
    """The same for a few small objects, in the same place: takes no room for more, and lends
    none."""
    match url:
        case FileUrl():
            return _file_store(url, form, replace(_keeping(url), slots=MARK_SLOTS))
        case MooncakeOptions():
            return open_storage(replace(url, segment_bytes=0), form)
        case MemoryUrl() | RedisOptions() | S3Options() | PluginUrl():
            return open_storage(url, form)
        case _:
            assert_never(url)


def _file_store(url: FileUrl, form: StoreFormat, limits: StoreLimits) -> FileStore:
    try:
        return FileStore(url.directory, form, limits, WallClock())
    except NotOursError as error:
        raise ConfigError(f"{FLAG} file://{error}") from error


def _keeping(url: FileUrl) -> StoreLimits:
    return StoreLimits(quota_bytes=url.quota_bytes, ttl_s=url.ttl_s, power_safe=url.power_safe)


def _check_quota(quota_bytes: int, least_bytes: int) -> None:
    """With less than ``least_bytes`` some group never stores anything, and no prefix is whole."""
    if quota_bytes < least_bytes:
        raise ConfigError(
            f"{FLAG} with quota={quota_bytes}: this model needs room for a page of each cache "
            f"group; allowed for quota is {least_bytes} ({format_bytes(least_bytes)}) and more"
        )


def _least_file_bytes(form: StoreFormat) -> int:
    """Of one segment of one slot for each group."""
    digest, sizes = form.spec_digest, form.page_bytes
    return sum(
        Geometry(spec_digest=digest, group=group, slots=1, page_bytes=size).physical_bytes
        for group, size in enumerate(sizes)
    )


def _factory(scheme: str) -> Factory:
    points = [point for point in _points() if point.name == scheme]
    owners = ", ".join(sorted(_owner(point) for point in points))
    if len(points) != 1:
        raise ConfigError(
            f"{FLAG} {scheme}://: registered by {owners or 'no package'}; allowed is one"
        )
    try:
        return points[0].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{FLAG} {scheme}://: {points[0].value} of {owners} cannot be imported ({error}); "
            "allowed is a package that is installed whole"
        ) from error


def _points() -> "Iterable[EntryPoint]":
    """What installed packages add. The library that looks is loaded here: it brings more modules
    than all that a store needs, and most stores are built in."""
    from importlib.metadata import entry_points  # noqa: PLC0415

    return entry_points(group=GROUP)


def _owner(point: "EntryPoint") -> str:
    return point.dist.name if point.dist else point.value
