"""What transfer engines are tested on: both tiers of a spec filled with patterns, specs to draw,
hooks that hold a copy or break it, and what both halves of the suite stand on.

Owns no assertion about an engine (``transfer_conformance``). Needs the ``testing`` extra.
"""

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from hypothesis import strategies as st

from stratakv.core.ids import GroupId, LayerId, PageIds, PageKey
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll, KeepWindow
from stratakv.testing.fake_engine import PatternWriter
from stratakv.testing.patience import PATIENCE_S, wait_until
from stratakv.testing.specs import MAX_GROUPS, MAX_PAGE_TOKENS, retentions
from stratakv.transfer.copier import Copier, CopyRoute
from stratakv.transfer.copy_plan import CopyPlan, Direction, GroupCopy, PageRows
from stratakv.transfer.engine import Completion, TransferEngine

BeforeCopy: TypeAlias = Callable[[Direction, GroupId, Collection[LayerId]], None]
"""Called by the engine, on whichever thread copies, right before it moves these layers of a group.
It may block (nothing may land meanwhile) or raise (that copy has failed)."""


class HookedCopier:
    """A copier that calls ``before_copy`` first: how a ``CpuTransferEngine`` is held or broken."""

    def __init__(self, inner: Copier, before_copy: BeforeCopy) -> None:
        self._inner = inner
        self._before_copy = before_copy

    def gather(self, route: CopyRoute, device: PageIds, host: PageIds) -> None:
        self._before_copy(Direction.BACKUP, route.group.id, _layers_of(route))
        self._inner.gather(route, device, host)

    def scatter(self, route: CopyRoute, device: PageIds, host: PageIds) -> None:
        self._before_copy(Direction.LOAD, route.group.id, _layers_of(route))
        self._inner.scatter(route, device, host)

    def gather_rows(self, route: CopyRoute, device: PageRows, host: PageRows) -> None:
        self._before_copy(Direction.BACKUP, route.group.id, _layers_of(route))
        self._inner.gather_rows(route, device, host)

    def scatter_rows(self, route: CopyRoute, device: PageRows, host: PageRows) -> None:
        self._before_copy(Direction.LOAD, route.group.id, _layers_of(route))
        self._inner.scatter_rows(route, device, host)


class CopyHold:
    """A ``before_copy`` that stops every copy of a layer that is not allowed yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._through = -1

    def __call__(self, direction: Direction, group: GroupId, layers: Collection[LayerId]) -> None:
        with self._changed:
            passed = self._changed.wait_for(lambda: max(layers) <= self._through, PATIENCE_S)
        assert passed, f"nobody allowed {direction.value} of layers {layers} of group {group}"

    def allow(self, through: int) -> None:
        """Let layers up to and with ``through`` pass."""
        with self._changed:
            self._through = through
            self._changed.notify_all()


def run_free(direction: Direction, group: GroupId, layers: Collection[LayerId]) -> None:
    """A ``before_copy`` that does nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class TransferEnds:
    """Both tiers of a spec, ``pages`` pages of each group on each, and the pattern of its bytes."""

    spec: CacheSpec
    pages: int
    pools: DevicePools
    arenas: tuple[HostArena, ...]
    pattern: PatternWriter

    @classmethod
    def of(cls, spec: CacheSpec, pages: int) -> "TransferEnds":
        pools = DevicePools(spec, [pages] * len(spec.groups))
        arenas = tuple(HostArena(group, pages) for group in spec.groups)
        return cls(spec, pages, pools, arenas, PatternWriter(spec))

    def layers(self) -> list[LayerId]:
        """Every layer of every group, ascending."""
        groups = self.spec.groups
        return sorted({i for group in groups for buffer in group.buffers for i in buffer.layers})

    def poison_device(self, but: Sequence[PageIds] | None = None) -> None:
        for group in self.spec.groups:
            kept = () if but is None else but[group.id]
            self.pools.poison(group.id, np.setdiff1d(np.arange(self.pages, dtype=np.int32), kept))

    def poison_host(self) -> None:
        for arena in self.arenas:
            arena.poison(np.arange(self.pages, dtype=np.int32))

    def fill_device(self, pages: Sequence[PageIds], keys: Sequence[PageKey]) -> None:
        for group, ids in zip(self.spec.groups, pages, strict=True):
            self.pattern.write(self.pools, group.id, ids, keys)

    def fill_host(self, pages: Sequence[PageIds], keys: Sequence[PageKey]) -> None:
        for arena, ids in zip(self.arenas, pages, strict=True):
            expected = self.pattern.host_pages(arena.group.id, keys)
            arena.bytes[ids, : arena.layout.page_bytes] = expected

    def verify_device(
        self,
        pages: Sequence[PageIds],
        keys: Sequence[PageKey],
        layers: Collection[LayerId] | None = None,
    ) -> None:
        for group, ids in zip(self.spec.groups, pages, strict=True):
            self.pattern.verify_device(self.pools, group.id, ids, keys, layers)

    def verify_host(self, pages: Sequence[PageIds], keys: Sequence[PageKey]) -> None:
        for arena, ids in zip(self.arenas, pages, strict=True):
            self.pattern.verify_host(arena, arena.group.id, ids, keys)

    def verify_others_poisoned(self, device: Sequence[PageIds], host: Sequence[PageIds]) -> None:
        """AssertionError if a copy wrote a page that no plan named."""
        every = np.arange(self.pages, dtype=np.int32)
        for group, arena in zip(self.spec.groups, self.arenas, strict=True):
            others = np.setdiff1d(every, host[group.id])
            page_bytes = arena.layout.page_bytes
            changed = arena.bytes[others, :page_bytes] != 0xFF
            assert not changed.any(), (
                f"group {group.name}: a host page outside the plan was written"
            )
            others = np.setdiff1d(every, device[group.id])
            for buffer in group.buffers:
                changed = self.pools.raw(group.id, buffer.name)[:, others] != 0xFF
                assert not changed.any(), f"group {group.name}: a stray write to {buffer.name}"


def page_keys_of(name: str, count: int) -> list[PageKey]:
    """``count`` distinct keys."""
    return [PageKey(hashlib.sha256(f"{name} {i}".encode()).digest()) for i in range(count)]


def plan_of(direction: Direction, device: Sequence[PageIds], host: Sequence[PageIds]) -> CopyPlan:
    """One plan with a copy per group."""
    pairs = zip(device, host, strict=True)
    copies = (GroupCopy(GroupId(i), *pair) for i, pair in enumerate(pairs))
    return CopyPlan(direction, tuple(copies))


@st.composite
def buffer_specs(draw: st.DrawFn, name: str, widest: int) -> BufferSpec:
    """Odd row sizes of at most ``widest`` elements in each of one or two dimensions, layers that
    differ from buffer to buffer, in any order."""
    dtype = draw(st.sampled_from(["float32", "bfloat16", "uint8"]))
    return BufferSpec(
        name=name,
        layers=tuple(
            LayerId(layer)
            for layer in draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
        ),
        rows_per_page=draw(st.integers(1, 5)),
        row_shape=tuple(draw(st.lists(st.integers(1, widest), min_size=1, max_size=2))),
        dtype=dtype,
    )


@st.composite
def cache_specs(draw: st.DrawFn, *, widest: int = 40, fewest: int = 0) -> CacheSpec:
    """One to five groups under any rules, each with ``fewest`` to four sidecars: an anchor, or
    another group, may have no bytes. The same names come back in every group."""
    page_tokens = draw(st.integers(1, MAX_PAGE_TOKENS))
    groups: list[CacheGroup] = []
    for index in range(draw(st.integers(1, MAX_GROUPS))):
        count = draw(st.integers(fewest, 4))
        buffers = tuple(draw(buffer_specs(f"buffer{i}", widest)) for i in range(count))
        rule = draw(retentions(page_tokens)) if index else KeepAll()
        groups.append(
            CacheGroup(id=GroupId(index), name=f"group{index}", retention=rule, buffers=buffers)
        )
    return CacheSpec(page_tokens=page_tokens, groups=tuple(groups))


def hybrid_spec(row_elements: int = 8) -> CacheSpec:
    """Layers 0, 2 full and 1, 3 sliding: keys and values each, and index keys in layer 2 only."""

    def buffer(name: str, *layers: int) -> BufferSpec:
        ids = tuple(LayerId(layer) for layer in layers)
        return BufferSpec(
            name=name, layers=ids, rows_per_page=4, row_shape=(row_elements,), dtype="bfloat16"
        )

    full = (buffer("k", 0, 2), buffer("v", 0, 2), buffer("index_k", 2))
    window = (buffer("k", 1, 3), buffer("v", 1, 3))
    return CacheSpec(
        page_tokens=4,
        groups=(
            CacheGroup(id=GroupId(0), name="full", retention=KeepAll(), buffers=full),
            CacheGroup(id=GroupId(1), name="swa", retention=KeepWindow(8), buffers=window),
        ),
    )


def spread(ends: TransferEnds, count: int, seed: int) -> list[PageIds]:
    """``count`` distinct pages per group, at random."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(ends.pages)[:count].astype(np.int32) for _ in ends.spec.groups]


def _layers_of(route: CopyRoute) -> frozenset[LayerId]:
    return frozenset(segment.layer_id for segment in route.segments)


GLIMPSE_S: Final = 0.02
"""How long a test watches for what must not happen."""


def finish(engine: TransferEngine, direction: Direction, count: int) -> list[Completion]:
    """Wait for the oldest ``count`` plans and take them."""
    wait_until(lambda: engine.ready(direction) >= count, f"the end of {count} plans of {direction}")
    return engine.take(direction, count)


class BackgroundSteps:
    """Steps on a thread of their own, for whatever may have to wait."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = steps
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def done_within(self, patience_s: float) -> bool:
        """Whether the steps have ended; raises what they raised."""
        done = self._done.wait(patience_s)
        if self._error is not None:
            raise self._error
        return done

    def _run(self) -> None:
        try:
            for step in self._steps:
                step()
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            self._error = error
        self._done.set()


class TransferSuite(ABC):
    """``engine`` is what a subclass implements."""

    @abstractmethod
    def engine(
        self,
        spec: CacheSpec,
        pools: DevicePools,
        arenas: Sequence[HostArena],
        before_copy: BeforeCopy,
    ) -> TransferEngine:
        """A fresh engine over these two ends that calls ``before_copy`` before each copy."""

    @contextmanager
    def running(
        self, ends: TransferEnds, before_copy: BeforeCopy = run_free
    ) -> Generator[TransferEngine, None, None]:
        engine = self.engine(ends.spec, ends.pools, ends.arenas, before_copy)
        try:
            yield engine
        finally:
            if isinstance(before_copy, CopyHold):
                before_copy.allow(max(ends.layers(), default=0))
            engine.close()
