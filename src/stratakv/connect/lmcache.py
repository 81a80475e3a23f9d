# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""An L2 adapter of LMCache: checksummed, bound by a quota, shared, and repairable.

Owns the words between LMCache's keys and objects and ``BlockingPages``, and what is done on the two
threads that wait for the store: one writes, one looks up and reads. LMCache loads the class by the
L2 adapter type ``plugin`` (docs/lmcache.md). LMCache's own threads never wait for a store here.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from threading import Lock
from typing import Any, Final, TypeAlias

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.distributed.api import ObjectKey as ChunkKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj

from stratakv.connect.blocking_pages import COPIED_BYTES, BlockingPages, Bytes
from stratakv.connect.lmcache_tasks import (
    Answers,
    LentBuffers,
    Loaded,
    QueuedCopies,
    Results,
    TaskThread,
)
from stratakv.connect.namespace import EngineNamespace, identify_weights
from stratakv.connect.page_counts import PageCounts, PageEvent
from stratakv.connect.settings import TierSettings, seconds
from stratakv.connect.stores import format_of, store_on_use
from stratakv.connect.vllm_fields import weights_directory
from stratakv.core.clock import MonotonicClock
from stratakv.core.errors import ConfigError
from stratakv.core.identity.digests import framed
from stratakv.core.ids import GroupId
from stratakv.storage.backend import ObjectKey
from stratakv.storage.registry import plugin_schemes
from stratakv.storage.store_key import read_key
from stratakv.storage.urls import parse_storage_url

log = logging.getLogger(__name__)
FLAG: Final = "--l2-adapter adapter_params"
OWN: Final = ("model", "engine", "task_timeout_s")
"""Settings of this adapter alone."""
TASK_TIMEOUT_S: Final = 60.0
LEAST_HASH_BYTES: Final = 16
"""Of a chunk: two chunks may well have one hash of 64 bits."""
ChunkLayout: TypeAlias = tuple[str, int]
"""Shapes and dtypes as text, and bytes."""


class StrataL2(L2AdapterInterface):
    """``adapter_params``: ``storage`` and ``storage_key_file`` as elsewhere. What LMCache's keys
    lack: ``model``, the directory of the checkpoint, and ``engine``, which engine computes the
    bytes with which settings, in the operator's words. ``task_timeout_s``: how long a load may
    take altogether, its wait for others included: less than LMCache's ``--l1-write-ttl-seconds``,
    after which it gives the buffers to other chunks. A lookup that has not begun by then is a miss.
    """

    def __init__(self, adapter_params: Mapping[str, object], l1_memory_desc: object = None) -> None:
        super().__init__()
        del l1_memory_desc
        given = dict(adapter_params)
        model = given.get("model")
        if not isinstance(model, str):
            raise ConfigError(
                f"{FLAG} model {model}: allowed is the directory of the checkpoint, whose weights "
                "LMCache's keys do not name"
            )
        engine = given.get("engine")
        if not isinstance(engine, str) or not engine.strip():
            raise ConfigError(
                f"{FLAG} engine {engine}: allowed is a text with the engine, its release and every "
                "setting that decides what it computes, such as quantisation and overrides"
            )
        self._engine = engine
        self._settings = TierSettings.of(FLAG, given, OWN)
        # ConfigError now, not later
        parse_storage_url(self._settings.storage, plugin_schemes())
        if self._settings.storage_key_file is not None:
            read_key(self._settings.storage_key_file)
        self._models = [identify_weights(weights_directory(model))]
        self._task_timeout_s = seconds(FLAG, "task_timeout_s", given, TASK_TIMEOUT_S)
        self._clock = MonotonicClock()
        self._lock = Lock()
        """Of what follows; never held while something waits."""
        self._shelves: dict[ChunkLayout, _Shelf] = {}
        self._met: set[ChunkLayout] = set()
        self._tasks = 0
        self._copies = QueuedCopies()
        self._lent: dict[int, LentBuffers] = {}
        self._answered: Sequence[ChunkKey] = ()
        self._counts = PageCounts()
        self._warned = False
        self._stores, self._lookups, self._loads = Results(), Answers(), Answers()
        self._writing = TaskThread("stratakv-lmcache-write")
        self._reading = TaskThread("stratakv-lmcache-read")

    def get_store_event_fd(self) -> int:
        return int(self._stores.notifier.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookups.notifier.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loads.notifier.fileno())

    def submit_store_task(self, keys: list[ChunkKey], objects: list[MemoryObj]) -> int:
        """Copies before it returns: LMCache's hold on the objects may run out before their turn."""
        task, none = self._next(), L2StoreResult(success=False, bytes_transferred=0)
        layouts: Sequence[ChunkLayout] = ()
        copies = None
        try:
            layouts = [_layout_of(one) for one in objects]
            copies = self._copies.take(objects)
            self._count("dropped", len(keys) if copies is None else 0)
        except Exception:  # whoever waits for the task must hear of its end
            log.exception("objects of LMCache's could not be copied")
        if copies is None:
            self._stores.put(task, none)
            return task
        work, done = partial(self._store, keys, layouts, copies), partial(self._copies.drop, copies)
        self._submit(self._writing, self._stores, task, work, none, done)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ChunkKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        task, latest_s = self._next(), self._latest_s()
        work = partial(self._look_up, keys, group_layout_descs or {}, latest_s)
        self._submit(self._reading, self._lookups, task, work, Bitmap(len(keys)))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ChunkKey]) -> None:
        """Nothing is locked: an object that leaves between is a miss of its load. But LMCache says
        this before it frees the buffers of a load which it has given up on, as after each load that
        has been answered; so whatever is being loaded of these keys ends, except in the latter."""
        with self._lock:
            answered, self._answered = self._answered, ()
            if list(answered) == keys:
                return
            ended = [one for one in self._lent.values() if not one.keys.isdisjoint(keys)]
        for one in ended:
            one.take_back()

    def submit_load_task(self, keys: list[ChunkKey], objects: list[MemoryObj]) -> int:
        task = self._next()
        lent = LentBuffers(keys, objects, self._clock, self._latest_s())
        with self._lock:
            self._lent[task] = lent
        nothing = Loaded(tuple(keys), Bitmap(len(keys)))
        work, done = partial(self._load, keys, objects, lent), partial(self._give_back, task)
        self._submit(self._reading, self._loads, task, work, nothing, done)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        found: Loaded | None = self._loads.take(task_id)
        if found is None:
            return None
        with self._lock:
            self._answered = found.keys
        return found.bits

    def report_status(self) -> dict[str, Any]:
        with self._lock:
            shelves = [*self._shelves.values()]
        return {
            "is_healthy": not any(shelf.pages.off for shelf in shelves),
            "queued_bytes": self._copies.size_bytes,
            "pages": dict(self.totals),
        }

    @property
    def totals(self) -> Mapping[PageEvent, int]:
        """What became of pages since the start (``EVENTS``)."""
        with self._lock:
            total, shelves = Counter(self._counts.total), [*self._shelves.values()]
        for shelf in shelves:
            total.update(shelf.pages.totals)
        return dict(total)

    def close(self) -> None:
        for thread in (self._writing, self._reading):
            thread.close()
        for shelf in self._shelves.values():
            shelf.pages.close()
        log.info("pages, since the start: %s", dict(self.totals))
        for results in (self._stores, self._lookups, self._loads):
            results.notifier.close()

    # -- of tasks --------------------------------------------------------------------------------

    def _next(self) -> int:
        with self._lock:
            self._tasks += 1
            self._answered = ()
            return self._tasks

    def _latest_s(self) -> float:
        return self._clock.now_s() + self._task_timeout_s

    def _submit(
        self,
        thread: TaskThread,
        into: Results,
        task: int,
        work: Callable[[], object],
        failed: object,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """``done``: before the end is known."""

        def end(result: object) -> None:
            done()
            into.put(task, result)

        def run() -> None:
            try:
                result = work()
            except Exception:  # whoever waits for the task must hear of its end
                log.exception("a task of LMCache's failed")
                result = failed
            end(result)

        thread.submit(run, lambda: end(failed))

    def _give_back(self, task: int) -> None:
        with self._lock:
            lent = self._lent.pop(task)
        lent.take_back()

    def _count(self, event: PageEvent, pages: int) -> None:
        with self._lock:
            self._counts.add(event, pages)

    def _nameable(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which keys name one chunk and no other."""
        found = [len(key.chunk_hash) >= LEAST_HASH_BYTES for key in keys]
        if not all(found) and not self._warned:
            self._warned = True
            log.error(
                "LMCache's chunk hashes have %d bytes, of which two chunks may have the same: none "
                "is stored or found; start LMCache with --hash-algorithm blake3",
                min(len(key.chunk_hash) for key in keys),
            )
        return found

    # -- on the two threads ----------------------------------------------------------------------

    def _store(
        self, keys: Sequence[ChunkKey], layouts: Sequence[ChunkLayout], copies: Sequence[Bytes]
    ) -> L2StoreResult:
        done: list[ChunkKey] = []
        sizes: list[int] = []
        good = self._nameable(keys)
        self._count("refused", good.count(False))
        for layout, places in _by_layout(layouts, good).items():
            self._met.add(layout)
            shelf = self._shelf(layout)
            names = [shelf.name(keys[at]) for at in places]
            stored = shelf.pages.write(names, [copies[at].data for at in places])
            there = [keys[at] for at, served in zip(places, stored, strict=True) if served]
            done += there
            sizes += [layout[1]] * len(there)
        self._notify_keys_stored(done, sizes)
        return L2StoreResult(len(done) == len(keys), sum(sizes))

    def _look_up(
        self, keys: Sequence[ChunkKey], descs: Mapping[int, MemoryLayoutDesc], latest_s: float
    ) -> Bitmap:
        """A description is a hint, says LMCache: of one that no object has had here, every layout
        that some have had counts too. At worst a load then misses."""
        bits = Bitmap(len(keys))
        hints = {group: _layout_of_desc(desc) for group, desc in descs.items()}
        met = frozenset(self._met)
        wanted: list[frozenset[ChunkLayout]] = []
        for key, good in zip(keys, self._nameable(keys), strict=True):
            hint = hints.get(key.object_group_id)
            hinted = frozenset[ChunkLayout]() if hint is None else frozenset({hint})
            of_key = hinted if hinted & met else hinted | met
            wanted.append(of_key if good else frozenset())
        for layout in frozenset[ChunkLayout]().union(*wanted):
            places = [at for at, layouts in enumerate(wanted) if layout in layouts]
            if self._clock.now_s() >= latest_s:
                self._count("late", len(places))
                continue
            shelf = self._shelf(layout)
            present = shelf.pages.contains([shelf.name(keys[at]) for at in places])
            _set(bits, (at for at, there in zip(places, present, strict=True) if there))
        return bits

    def _load(
        self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObj], lent: LentBuffers
    ) -> Loaded:
        layouts = map(_layout_of, objects)
        for layout, places in _by_layout(layouts, self._nameable(keys)).items():
            self._met.add(layout)
            shelf = self._shelf(layout)
            some = max(1, COPIED_BYTES // layout[1])
            for start in range(0, len(places), some):
                if not lent.open:
                    self._count("late", len(places) - start)
                    break
                self._load_some(keys, places[start : start + some], layout, shelf, lent)
        lent.take_back()
        bits = Bitmap(len(keys))
        _set(bits, lent.filled)
        return Loaded(tuple(keys), bits)

    def _load_some(
        self,
        keys: Sequence[ChunkKey],
        places: Sequence[int],
        layout: ChunkLayout,
        shelf: "_Shelf",
        lent: LentBuffers,
    ) -> None:
        names = [shelf.name(keys[at]) for at in places]
        before = len(lent.filled)
        hit = shelf.pages.read(names, layout[1], lambda one, page: lent.fill(places[one], page))
        self._count("late", sum(hit) - (len(lent.filled) - before))
        shelf.pages.touch(names, hit)

    def _shelf(self, layout: ChunkLayout) -> "_Shelf":
        with self._lock:
            if layout not in self._shelves:
                release = f"lmcache {version('lmcache')}"
                fields = {"engine": release, "below": self._engine, "layout": layout[0]}
                namespace = EngineNamespace.of(self._models, fields)
                ends = store_on_use(
                    self._settings.storage,
                    self._settings.storage_key_file,
                    format_of(namespace, [layout[1]]),
                )
                pages = BlockingPages(ends, MonotonicClock(), self._settings.timeout_s)
                self._shelves[layout] = _Shelf(namespace, pages)
            return self._shelves[layout]


class _Shelf:
    """Objects of one layout."""

    def __init__(self, namespace: EngineNamespace, pages: BlockingPages) -> None:
        self._namespace = namespace
        self.pages = pages

    def name(self, key: ChunkKey) -> ObjectKey:
        parts = [
            key.chunk_hash, key.model_name.encode(), b"%d" % key.kv_rank,
            b"%d" % key.object_group_id, key.cache_salt.encode(),
        ]  # fmt: skip
        return ObjectKey(self._namespace.page_key(framed(parts)), GroupId(0))


def _by_layout(
    layouts: Iterable[ChunkLayout], good: Sequence[bool]
) -> dict[ChunkLayout, list[int]]:
    """Places of those that are ``good``."""
    found: dict[ChunkLayout, list[int]] = {}
    for at, (layout, counts) in enumerate(zip(layouts, good, strict=True)):
        if counts:
            found.setdefault(layout, []).append(at)
    return found


def _layout_of(chunk: MemoryObj) -> ChunkLayout:
    meta = chunk.metadata
    shapes = [meta.shape] if meta.shapes is None else meta.shapes
    dtypes = [meta.dtype] if meta.dtypes is None else meta.dtypes
    return _text(shapes, dtypes), int(chunk.get_size())


def _layout_of_desc(desc: MemoryLayoutDesc) -> ChunkLayout:
    sizes = (
        shape.numel() * dtype.itemsize
        for shape, dtype in zip(desc.shapes, desc.dtypes, strict=True)
    )
    return _text(desc.shapes, desc.dtypes), sum(sizes)


def _text(shapes: Iterable[Sequence[int]], dtypes: Iterable[object]) -> str:
    return f"{[tuple(shape) for shape in shapes]} {[str(dtype) for dtype in dtypes]}"


def _set(bits: Bitmap, places: Iterable[int]) -> None:
    for at in places:
        bits.set(at)
