"""The composition root's storage corner: from ``--storage`` and a URL to an open third tier.

Owns how many backends a store is opened with, how much may be queued for it, and the check of its
flags. Takes no memory of its own; must not know HTTP or requests. Opening blocks.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Final

from stratakv.core.clock import MonotonicClock
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError, StorageError
from stratakv.policy.prefetch_pace import (
    BestEffort,
    PrefetchPolicy,
    StopPolicy,
    Timeout,
    WaitComplete,
    prefetch_policy,
)
from stratakv.serve.admin import OpenStore
from stratakv.serve.wiring_ranks import Sharing
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.storage.backend import StorageBackend, StoreFormat
from stratakv.storage.file.store import FileStore
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.storage.registry import open_storage, plugin_schemes
from stratakv.storage.urls import (
    FileUrl,
    MemoryUrl,
    RedisUrl,
    S3Url,
    StorageUrl,
    hidden,
    parse_storage_url,
)

log = logging.getLogger(__name__)

MOST_QUEUED_PAGES: Final = 8192
LEAST_QUEUED_PAGES: Final = 64
LONGEST_WAIT_S: Final = 30.0


def check_storage(config: EngineConfig, host_pages: Sequence[int]) -> None:
    """ConfigError for a ``--storage`` that cannot be had with these pages by group; opens
    nothing."""
    if config.storage is None:
        return
    parsed = _checked(config.storage, host_pages)
    if config.tp > 1 and isinstance(parsed, MemoryUrl):
        raise ConfigError(
            f"--storage {hidden(config.storage)}: it is one process's own, and --tp {config.tp} "
            "has several; allowed are stores that all of them reach"
        )


def open_store(
    url: str, spec: CacheSpec, host_pages: Sequence[int], sharing: Sharing | None = None
) -> OpenStore:
    """An open store for pages of ``spec``, and the worker in front of it. ``sharing``: what of a
    page a rank has, and how it is cut; None: all of it, and not at all.

    ConfigError for a URL that is not allowed, StorageError where the store cannot be reached;
    nothing is left open then.
    """
    parsed = _checked(url, host_pages)
    form = _form(spec if sharing is None else sharing.sharding.stored(sharing.cut))
    reading = _opened(parsed, form, url)
    writing = reading
    # These are made for several clients; a second one of another store may be another store.
    if isinstance(parsed, FileUrl | RedisUrl | S3Url):
        try:
            writing = _opened(parsed, form, url)
        except BaseException:
            reading.close()
            raise
    backends = Backends(reading, writing)
    if sharing is not None:
        backends = Backends(sharing.between(reading), sharing.between(writing))
    # What waits to be written is pinned on the host; half of it must stay free to come and go.
    queued = min(max(sum(host_pages) // 2, LEAST_QUEUED_PAGES), MOST_QUEUED_PAGES)
    worker = IoWorker(backends, _form(spec), IoLimits(queue_pages=queued), MonotonicClock())

    def figures() -> Mapping[str, object]:
        return _figures(reading, writing)

    return OpenStore(worker=worker, shown=hidden(url), figures=figures)


def _form(spec: CacheSpec) -> StoreFormat:
    page_bytes = tuple(group.page_bytes for group in spec.groups)
    return StoreFormat(spec_digest=spec.digest, page_bytes=page_bytes)


def open_at_start(
    config: EngineConfig,
    spec: CacheSpec,
    host_pages: Sequence[int],
    sharing: Sharing | None = None,
) -> OpenStore | None:
    """The store that ``--storage`` names; one that cannot be reached is the operator's business."""
    if config.storage is None:
        return None
    try:
        return open_store(config.storage, spec, host_pages, sharing)
    except StorageError as error:
        raise ConfigError(f"--storage {hidden(config.storage)}: {error}") from error


def prefetch_policy_of(
    config: EngineConfig, spec: CacheSpec, host_pages: Sequence[int]
) -> PrefetchPolicy:
    """What the ``--prefetch-*`` flags say; ``host_pages`` by group."""
    usual = prefetch_policy(
        spec.page_tokens, host_pages[ANCHOR], _stop_policy(config), config.prefetch_share
    )
    if config.prefetch_threshold is None:
        return usual
    return replace(usual, threshold_tokens=config.prefetch_threshold)


def _stop_policy(config: EngineConfig) -> StopPolicy:
    match config.prefetch_policy:
        case "best-effort":
            return BestEffort()
        case "wait-complete":
            return WaitComplete()
        case _:
            return Timeout(
                base_s=config.prefetch_timeout,
                per_1k_tokens_s=config.prefetch_timeout_per_1k,
                most_s=max(LONGEST_WAIT_S, config.prefetch_timeout),
            )


def _checked(url: str, host_pages: Sequence[int]) -> StorageUrl:
    parsed = parse_storage_url(url, plugin_schemes())
    if not host_pages[ANCHOR]:
        raise ConfigError(
            f"--storage {hidden(url)}: there is no host page for what it would give; allowed with "
            "a host tier"
        )
    return parsed


def _opened(url: StorageUrl, form: StoreFormat, text: str) -> StorageBackend:
    """A backend. A store may be a stranger's: whatever it raises, it only could not be opened."""
    try:
        return open_storage(url, form)
    except (ConfigError, StorageError):
        raise
    except Exception as error:
        log.exception("%s could not be opened", hidden(text))
        raise StorageError(f"{type(error).__name__} while it was opened") from error


def _figures(reading: StorageBackend, writing: StorageBackend) -> Mapping[str, object]:
    """What a store says of itself, counters of both ends together; nothing of one that does not."""
    if not isinstance(reading, FileStore) or not isinstance(writing, FileStore):
        return {}
    found = asdict(writing.stats())
    if reading is not writing:
        for name, count in asdict(reading.stats().counters).items():
            found["counters"][name] += count
    return found
