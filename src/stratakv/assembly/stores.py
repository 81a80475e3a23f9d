"""The assembly's storage corner: from ``--storage`` and a URL to an open third tier.

Owns how much may be queued for a store, and the check of its flags. Takes no memory of its own;
must not know HTTP or requests. Opening blocks.
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from stratakv.assembly.rank_context import ObjectSharding
from stratakv.core.clock import MonotonicClock
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError, StorageError
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.storage.backend import StoreFormat
from stratakv.storage.cut_marks import CutMarks, MarkedBackend, marks_form
from stratakv.storage.ends import close_ends, figures_of, open_ends, opened, sealed_store
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.storage.opening import OpenStore
from stratakv.storage.registry import open_marks, plugin_schemes
from stratakv.storage.store_key import StoreKey, read_key
from stratakv.storage.urls import (
    FileUrl,
    MemoryUrl,
    Roots,
    StorageUrl,
    check_roots,
    hidden,
    parse_storage_url,
)

log = logging.getLogger(__name__)

MOST_QUEUED_PAGES: Final = 8192
LEAST_QUEUED_PAGES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """What an operator demands of a store. ``roots``: where its directory must lie; None: the
    operator has named it. ``key``: with which its pages are sealed; None: they are not."""

    roots: Roots | None = None
    key: StoreKey | None = None


def trust_at_start(config: EngineConfig) -> Trust:
    """Of the store that ``--storage`` names; ConfigError for a key that is none."""
    return Trust(key=store_key(config))


def store_key(config: EngineConfig) -> StoreKey | None:
    """What ``--storage-key-file`` holds."""
    return None if config.storage_key_file is None else read_key(config.storage_key_file)


def trust_while_it_runs(config: EngineConfig) -> Trust:
    """Of a store that is attached while the server runs."""
    home = None
    if config.storage is not None:
        parsed = parse_storage_url(config.storage, plugin_schemes())
        home = parsed.directory if isinstance(parsed, FileUrl) else None
    roots = Roots([Path(root) for root in config.storage_root], home)
    return replace(trust_at_start(config), roots=roots)


def check_storage(config: EngineConfig, host_pages: Sequence[int]) -> None:
    """ConfigError for a ``--storage`` that cannot be had with these pages by group, and for a
    ``--storage-root`` or a ``--storage-key-file`` that is none; opens nothing."""
    check_roots(config.storage_root)
    trust = trust_at_start(config)
    if config.storage is not None:
        check_url(config.storage, config.tp, host_pages, trust)


def check_url(url: str, ranks: int, host_pages: Sequence[int], trust: Trust = Trust()) -> None:
    """The same for a URL and a number of ranks."""
    parsed = _checked(url, host_pages, trust)
    if ranks > 1 and isinstance(parsed, MemoryUrl):
        raise ConfigError(
            f"--storage {hidden(url)}: it is one process's own, and --tp {ranks} has several; "
            "allowed are stores that all of them reach"
        )


def open_store(
    url: str,
    spec: CacheSpec,
    host_pages: Sequence[int],
    sharing: ObjectSharding | None = None,
    trust: Trust = Trust(),
) -> OpenStore:
    """An open store for pages of ``spec``, and the worker in front of it. ``sharing``: what of a
    page a rank has, and how it is cut; None: all of it, and not at all.

    ConfigError for a URL that is not allowed, or a store that has the model's pages cut otherwise;
    StorageError where it cannot be reached. Nothing is left open then.
    """
    return reach_store(url, spec, host_pages, sharing, trust).open(sharing)


def opener_while_it_runs(
    config: EngineConfig, spec: CacheSpec, host_pages: Sequence[int], sharing: ObjectSharding
) -> Callable[[str], OpenStore]:
    """``open_store`` for URLs that come over the network."""
    trust = trust_while_it_runs(config)
    return partial(open_store, spec=spec, host_pages=host_pages, sharing=sharing, trust=trust)


@dataclass(frozen=True, slots=True, eq=False)
class ReachedStore:
    """A store that answers, of which nothing was asked yet: whose pages would be looked for there,
    a model reports once it is loaded."""

    url: str
    parsed: StorageUrl
    spec: CacheSpec
    host_pages: Sequence[int]
    backends: Backends
    trust: Trust

    def open(self, sharing: ObjectSharding | None = None) -> OpenStore:
        """For the model of ``sharing``, as ``open_store``; whatever is raised, all is closed."""
        ends = self.backends
        with ExitStack() as undo:
            undo.callback(self.close)
            backends = self.backends
            if sharing is not None:
                marks = _marks(self.parsed, sharing, self.url, self.trust)
                backends = _shared(backends, sharing, marks)
            undo.pop_all()
        # What waits to be written is pinned on the host; half of it must stay free to come and go.
        queued = min(max(sum(self.host_pages) // 2, LEAST_QUEUED_PAGES), MOST_QUEUED_PAGES)
        limits = IoLimits(queue_pages=queued)
        worker = IoWorker(backends, StoreFormat.of(self.spec), limits, MonotonicClock())

        def figures() -> Mapping[str, object]:
            return figures_of(ends)

        return OpenStore(worker=worker, shown=hidden(self.url), figures=figures)

    def close(self) -> None:
        close_ends(self.backends)


def reach_store(
    url: str,
    spec: CacheSpec,
    host_pages: Sequence[int],
    sharing: ObjectSharding | None = None,
    trust: Trust = Trust(),
) -> ReachedStore:
    """The same, as far as it goes without the model. ``sharing``: of any model."""
    parsed = _checked(url, host_pages, trust)
    form = StoreFormat.of(spec if sharing is None else sharing.sharding.stored(sharing.cut))
    ends = open_ends(parsed, form, trust.key, url)
    return ReachedStore(url, parsed, spec, host_pages, ends, trust)


def _shared(backends: Backends, sharing: ObjectSharding, marks: CutMarks | None) -> Backends:
    """What a rank sees of open backends. One for both stays one: only one thread may call it."""
    writing = backends.writing
    if marks is not None:
        writing = MarkedBackend(writing, marks, MonotonicClock())
    ours = sharing.between(writing)
    if backends.reading is backends.writing:
        return Backends(ours, ours)
    return Backends(sharing.between(backends.reading), ours)


def _marks(parsed: StorageUrl, sharing: ObjectSharding, url: str, trust: Trust) -> CutMarks | None:
    """The marks of a store, for the rank that keeps them; ConfigError where they say that pages are
    cut otherwise. None too where nobody else could ever cut them otherwise."""
    others = sharing.other_cuts
    if not others or isinstance(parsed, MemoryUrl):
        return None
    form, keeps = marks_form(sharing.sharding.whole.digest), sharing.rank == 0
    store = opened(lambda: sealed_store(open_marks, parsed, form, trust.key), url)
    with ExitStack() as undo:
        undo.callback(store.close)
        marks = CutMarks(store, sharing.model, sharing.sharding.alike(sharing.cut), others)
        if theirs := opened(lambda: marks.claim(writes=keeps), url):
            raise ConfigError(f"--storage {hidden(url)}: {sharing.refusal(theirs[0])}")
        if not keeps:
            return None
        undo.pop_all()
    return marks


@contextmanager
def operators_store(url: str) -> Generator[None]:
    """At a start, a store that cannot be reached is the operator's business: a ConfigError."""
    try:
        yield
    except StorageError as error:
        raise ConfigError(
            f"--storage {hidden(url)}: {error}; allowed is a store that can be reached and written"
        ) from error


def reach_at_start(
    config: EngineConfig,
    spec: CacheSpec,
    host_pages: Sequence[int],
    sharing: ObjectSharding | None = None,
) -> ReachedStore | None:
    """The store that ``--storage`` names."""
    if config.storage is None:
        return None
    log.info("reaching --storage %s", hidden(config.storage))
    with operators_store(config.storage):
        return reach_store(config.storage, spec, host_pages, sharing, trust_at_start(config))


def _checked(url: str, host_pages: Sequence[int], trust: Trust) -> StorageUrl:
    parsed = parse_storage_url(url, plugin_schemes())
    if not host_pages[ANCHOR]:
        raise ConfigError(
            f"--storage {hidden(url)}: there is no host page for what it would give; allowed with "
            "a host tier"
        )
    return parsed if trust.roots is None else trust.roots.checked(parsed)
