# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""An L2 adapter of LMCache: checksummed, bound by a quota, shared, and repairable.

Owns the words between LMCache's keys and objects and ``BlockingPages``, and the two threads that
wait for the store: one writes, one looks up and reads. LMCache loads the class by the L2 adapter
type ``plugin`` (docs/lmcache.md).
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from threading import Lock
from typing import Any, Final, TypeAlias

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.distributed.api import ObjectKey as ChunkKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from stratakv.connect.blocking_pages import BlockingPages, Bytes
from stratakv.connect.namespace import EngineNamespace, identify_weights
from stratakv.connect.settings import TierSettings
from stratakv.connect.stores import format_of, open_engine_store
from stratakv.connect.vllm_fields import weights_directory
from stratakv.core.clock import MonotonicClock
from stratakv.core.errors import ConfigError
from stratakv.core.identity.digests import framed
from stratakv.core.ids import GroupId
from stratakv.storage.backend import ObjectKey
from stratakv.storage.registry import plugin_schemes
from stratakv.storage.urls import parse_storage_url

log = logging.getLogger(__name__)
FLAG: Final = "--l2-adapter adapter_params"
OWN: Final = ("model", "engine")
"""Settings of this adapter alone."""
ChunkLayout: TypeAlias = tuple[str, int]
"""Shapes and dtypes as text, and bytes."""


class Results:
    """What has ended, by task, and the notifier that says so to a poll."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ended: dict[int, Any] = {}
        self.notifier: Final = create_event_notifier()

    def put(self, task: int, result: object) -> None:
        with self._lock:
            self._ended[task] = result
        self.notifier.notify()

    def take(self, task: int) -> Any:  # noqa: ANN401 - LMCache's own results
        with self._lock:
            return self._ended.pop(task, None)

    def take_all(self) -> dict[int, Any]:
        with self._lock:
            ended, self._ended = self._ended, {}
        return ended


class StrataL2(L2AdapterInterface):
    """``adapter_params``: ``storage`` and ``storage_key_file`` as elsewhere. What LMCache's keys
    lack: ``model``, the directory of the checkpoint, and ``engine``, which engine computes the
    bytes with which settings, in the operator's words."""

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
        parse_storage_url(self._settings.storage, plugin_schemes())  # ConfigError now, not later
        self._models = [identify_weights(weights_directory(model))]
        self._lock = Lock()
        self._shelves: dict[ChunkLayout, _Shelf] = {}
        self._met: set[ChunkLayout] = set()
        self._tasks = 0
        self._stores, self._lookups, self._loads = Results(), Results(), Results()
        self._writing = ThreadPoolExecutor(1, "stratakv-lmcache-write")
        self._reading = ThreadPoolExecutor(1, "stratakv-lmcache-read")

    def get_store_event_fd(self) -> int:
        return int(self._stores.notifier.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookups.notifier.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loads.notifier.fileno())

    def submit_store_task(self, keys: list[ChunkKey], objects: list[MemoryObj]) -> int:
        failed = L2StoreResult(success=False, bytes_transferred=0)
        return self._submit(
            self._writing, self._stores, partial(self._store, keys, objects), failed
        )

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ChunkKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        work = partial(self._look_up, keys, group_layout_descs or {})
        return self._submit(self._reading, self._lookups, work, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ChunkKey]) -> None:
        """Nothing is locked: an object that leaves between is a miss of its load."""

    def submit_load_task(self, keys: list[ChunkKey], objects: list[MemoryObj]) -> int:
        work = partial(self._load, keys, objects)
        return self._submit(self._reading, self._loads, work, Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def close(self) -> None:
        for hand in (self._writing, self._reading):
            hand.shutdown(wait=True)
        for shelf in self._shelves.values():
            shelf.pages.close()
            log.info("pages, since the start: %s", dict(shelf.pages.totals))
        for results in (self._stores, self._lookups, self._loads):
            results.notifier.close()

    # -- on the two threads ----------------------------------------------------------------------

    def _submit(
        self, hand: ThreadPoolExecutor, into: Results, work: Callable[[], object], failed: object
    ) -> int:
        with self._lock:
            self._tasks += 1
            task = self._tasks

        def run() -> None:
            try:
                into.put(task, work())
            except Exception:  # whoever waits for the task must hear of its end
                log.exception("a task of LMCache's failed")
                into.put(task, failed)

        hand.submit(run)
        return task

    def _store(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        done: list[ChunkKey] = []
        sizes: list[int] = []
        for layout, places in _by_layout(map(_layout_of, objects)).items():
            self._met.add(layout)
            shelf = self._shelf(layout)
            names = [shelf.name(keys[at]) for at in places]
            copies = [np.array(_bytes_of(objects[at]), np.uint8) for at in places]
            stored = shelf.pages.write(names, [copy.data for copy in copies])
            there = [keys[at] for at, served in zip(places, stored, strict=True) if served]
            done += there
            sizes += [layout[1]] * len(there)
        self._notify_keys_stored(done, sizes)
        return L2StoreResult(len(done) == len(keys), sum(sizes))

    def _look_up(self, keys: Sequence[ChunkKey], descs: Mapping[int, MemoryLayoutDesc]) -> Bitmap:
        """A description is a hint, says LMCache: of one that no object has had here, every layout
        that some have had counts too. At worst a load then misses."""
        bits = Bitmap(len(keys))
        hints = {group: _layout_of_desc(desc) for group, desc in descs.items()}
        met = frozenset(self._met)
        wanted: list[frozenset[ChunkLayout]] = []
        for key in keys:
            hint = hints.get(key.object_group_id)
            hinted = frozenset[ChunkLayout]() if hint is None else frozenset({hint})
            wanted.append(hinted if hinted & met else hinted | met)
        for layout in frozenset[ChunkLayout]().union(*wanted):
            shelf = self._shelf(layout)
            places = [at for at, layouts in enumerate(wanted) if layout in layouts]
            present = shelf.pages.contains([shelf.name(keys[at]) for at in places])
            _set(bits, (at for at, there in zip(places, present, strict=True) if there))
        return bits

    def _load(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObj]) -> Bitmap:
        bits = Bitmap(len(keys))
        for layout, places in _by_layout(map(_layout_of, objects)).items():
            self._met.add(layout)
            shelf = self._shelf(layout)
            names = [shelf.name(keys[at]) for at in places]

            def put(one: int, page: Bytes, chunks: Sequence[int] = tuple(places)) -> None:
                np.copyto(np.frombuffer(_bytes_of(objects[chunks[one]]), np.uint8), page)

            hit = shelf.pages.read(names, layout[1], put)
            shelf.pages.touch(names, hit)
            _set(bits, (at for at, there in zip(places, hit, strict=True) if there))
        return bits

    def _shelf(self, layout: ChunkLayout) -> "_Shelf":
        with self._lock:
            if layout not in self._shelves:
                release = f"lmcache {version('lmcache')}"
                fields = {"engine": release, "below": self._engine, "layout": layout[0]}
                namespace = EngineNamespace.of(self._models, fields)
                ends = open_engine_store(
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


def _by_layout(layouts: Iterable[ChunkLayout]) -> dict[ChunkLayout, list[int]]:
    found: dict[ChunkLayout, list[int]] = {}
    for at, layout in enumerate(layouts):
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


def _bytes_of(chunk: MemoryObj) -> memoryview:
    return memoryview(chunk.byte_array).cast("B")[: chunk.get_size()]


def _set(bits: Bitmap, places: Iterable[int]) -> None:
    for at in places:
        bits.set(at)
