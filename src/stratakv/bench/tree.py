"""``stratakv bench tree``: what the tree costs per operation, beside the sketch in the same run.

200 conversations share a 1,024-token prompt and take 8 turns of 256 tokens; then one-page evictions
among many leaves, and one prompt of 131,072 tokens. Medians, microseconds, one thread. The
sketch is the least that a page index could do: one group, one tier, no residency, no leases, no
runs; nodes are rows of arrays found through a dict. Owns the workload, the sketch and the timing;
must not judge the figures.
"""

import gc
import hashlib
import heapq
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from stratakv.core.ids import NONE, GroupId, LayerId, PageIds, PageKey, RowIds, TokenIds
from stratakv.core.page_keys import Namespace, page_keys
from stratakv.spec.groups import ANCHOR, BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll, KeepWindow, Retention
from stratakv.tree.nodes import Tier
from stratakv.tree.prefix_tree import PrefixTree


def sketch_keys(tokens: TokenIds, page_tokens: int) -> list[PageKey]:
    """A bare SHA-256 chain over the full pages of ``tokens``."""
    data, size, sha = tokens.tobytes(), 4 * page_tokens, hashlib.sha256
    previous, out = bytes(32), list[PageKey]()
    append = out.append
    for at in range(0, len(data) - size + 1, size):
        previous = sha(previous + data[at : at + size]).digest()
        append(PageKey(previous))
    return out


class SketchIndex:
    def __init__(self, capacity: int) -> None:
        self._rows: dict[PageKey, int] = {}
        self._keys: list[PageKey | None] = [None] * capacity
        self._parent = np.full(capacity + 1, NONE, np.int32)
        self._kids = np.zeros(capacity + 1, np.int32)
        self._used = np.zeros(capacity + 1, np.int64)
        self._pins = np.zeros(capacity + 1, np.int32)
        self._page = np.full(capacity + 1, NONE, np.int32)
        self._free = list(range(capacity - 1, -1, -1))
        self._heap: list[tuple[int, int]] = []
        self._clock = 0

    def match(self, keys: Sequence[PageKey]) -> tuple[RowIds, PageIds]:
        """Rows and pages of the longest known prefix."""
        rows = self._rows
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) >> 1
            if keys[middle - 1] in rows:
                low = middle
            else:
                high = middle - 1
        found = np.fromiter(map(rows.__getitem__, keys[:low]), np.int32, low)
        if low:
            self._clock += 1
            self._used[found[-1]] = self._clock
        return found, self._page[found]

    def pin(self, rows: RowIds, by: int) -> None:
        self._pins[rows] += by

    def insert(self, keys: Sequence[PageKey], have: int, tip: int, pages: PageIds) -> None:
        count = len(keys) - have
        fresh = self._free[-count:]
        del self._free[-count:]
        fresh.reverse()
        rows = np.array(fresh, np.int32)
        self._rows.update(zip(keys[have:], fresh, strict=True))
        self._parent[rows[0]] = tip
        self._parent[rows[1:]] = rows[:-1]
        self._kids[rows[:-1]] = 1
        self._kids[rows[-1]] = 0
        self._kids[tip] += 1
        self._clock += 1
        self._used[rows] = self._clock
        self._page[rows] = pages
        for row, key in zip(fresh, keys[have:], strict=True):
            self._keys[row] = key
        heapq.heappush(self._heap, (self._clock, fresh[-1]))

    def evict(self, count: int) -> list[int]:
        """Pages of the coldest leaves, leaf first."""
        out: list[int] = []
        while len(out) < count and self._heap:
            stamp, row = heapq.heappop(self._heap)
            if self._keys[row] is None or self._kids[row]:
                continue
            used = self._used.item(row)
            if used != stamp:
                heapq.heappush(self._heap, (used, row))
                continue
            self._climb(row, stamp, count, out)
        return out

    def _climb(self, row: int, stamp: int, count: int, out: list[int]) -> None:
        while True:
            out.append(self._page.item(row))
            key = self._keys[row]
            assert key is not None
            del self._rows[key]
            self._keys[row] = None
            self._free.append(row)
            parent = self._parent.item(row)
            if parent < 0:
                return
            self._kids[parent] -= 1
            if self._kids.item(parent):
                return
            if len(out) >= count or self._used.item(parent) > stamp:
                heapq.heappush(self._heap, (self._used.item(parent), parent))
                return
            row = parent


CONVERSATIONS, SHARED, TURNS, TURN = 200, 1024, 8, 256
LONG = 131072
LEAVES = (2000, 20000, 60000)
NAMESPACE = Namespace(model=b"bench", spec_digest=b"bench")
Result = TypeVar("Result")
Figure: TypeAlias = float | dict[str, float]


def _spec(page: int, window: int) -> CacheSpec:
    rules: list[Retention] = [KeepAll()]
    if window:
        rules.append(KeepWindow(window))
    buffer = BufferSpec(
        name="k", layers=(LayerId(0),), rows_per_page=page, row_shape=(8,), dtype="float16"
    )
    return CacheSpec(
        page_tokens=page,
        groups=tuple(
            CacheGroup(id=GroupId(i), name=f"g{i}", retention=rule, buffers=(buffer,))
            for i, rule in enumerate(rules)
        ),
    )


class _Clock:
    """Collects one operation's times."""

    def __init__(self) -> None:
        self.times: list[int] = []

    def run(self, operation: Callable[[], Result]) -> Result:
        begin = time.perf_counter_ns()
        result = operation()
        self.times.append(time.perf_counter_ns() - begin)
        return result

    @property
    def p50(self) -> float:
        return round(float(np.median(self.times)) / 1000, 3)


def _tokens(rng: np.random.Generator, count: int) -> TokenIds:
    return rng.integers(0, 150_000, count, dtype=np.int32)


class _Subject:
    """The production tree, driven as an engine drives it."""

    def __init__(self, page: int, window: int, nodes: int) -> None:
        self.groups = 2 if window else 1
        self.tree = PrefixTree(_spec(page, window), nodes)

    def keys(self, tokens: TokenIds) -> list[PageKey]:
        return page_keys(tokens, NAMESPACE, self.tree.spec.page_tokens)

    def match(self, keys: list[PageKey]) -> int:
        return self.tree.match(keys, len(keys)).device_end

    def lease_release(self, keys: list[PageKey], end: int) -> None:
        tree = self.tree
        lease = tree.leases.take(keys, end)
        tree.leases.pages(lease, ANCHOR)
        tree.leases.release(lease)

    def insert(self, keys: list[PageKey], have: int, pages: PageIds) -> None:
        self.tree.insert(keys, have, [pages] * self.groups)

    def evict(self, count: int) -> None:
        self.tree.eviction.evict(Tier.DEVICE, ANCHOR, count)


class _Sketch:
    def __init__(self, page: int, nodes: int) -> None:
        self.index = SketchIndex(nodes)
        self._page = page

    def keys(self, tokens: TokenIds) -> list[PageKey]:
        return sketch_keys(tokens, self._page)

    def match(self, keys: list[PageKey]) -> int:
        return len(self.index.match(keys)[0])

    def lease_release(self, keys: list[PageKey], end: int) -> None:
        rows, _ = self.index.match(keys[:end])
        self.index.pin(rows, 1)
        self.index.pin(rows, -1)

    def insert(self, keys: list[PageKey], have: int, pages: PageIds) -> None:
        tip = int(self.index.match(keys[have - 1 : have])[0][-1]) if have else -1
        self.index.insert(keys, have, tip, pages)

    def evict(self, count: int) -> None:
        self.index.evict(count)


def _chats(subject: _Subject | _Sketch, page: int, out: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    shared = _tokens(rng, SHARED)
    hashing, hash_match, match, lease, insert, evict = (_Clock() for _ in range(6))
    chats: list[list[PageKey]] = []
    next_page = 0
    for _ in range(CONVERSATIONS):
        tokens, keys = shared, list[PageKey]()
        for _ in range(TURNS):
            tokens = np.concatenate([tokens, _tokens(rng, TURN)])
            keys = hashing.run(lambda t=tokens: subject.keys(t))
            have = subject.match(keys)
            pages = np.arange(next_page, next_page + len(keys) - have, dtype=np.int32)
            next_page += len(pages)
            insert.run(lambda k=keys, h=have, p=pages: subject.insert(k, h, p))
        chats.append(keys)
    for keys in chats:
        for turn in range(1, TURNS + 1):
            part = keys[: (SHARED + turn * TURN) // page]
            match.run(lambda k=part: subject.match(k))
            lease.run(lambda k=part: subject.lease_release(k, len(k)))
    for _ in range(CONVERSATIONS):
        tokens = np.concatenate([shared, _tokens(rng, TURNS * TURN)])
        hash_match.run(lambda t=tokens: subject.match(subject.keys(t)))
    for _ in range(60):
        evict.run(lambda: subject.evict(4096 // page))
    out["match_us_p50"] = match.p50
    out["lease_release_us_p50"] = lease.p50
    out["insert_us_p50"] = insert.p50
    out["evict_4096_us_p50"] = evict.p50
    out["hash_us_p50"] = hashing.p50
    out["hash_match_us_p50"] = hash_match.p50


def _leaves(subject: _Subject | _Sketch, page: int, leaves: int) -> float:
    rng = np.random.default_rng(1)
    for at in range(leaves):
        keys = subject.keys(_tokens(rng, page))
        subject.insert(keys, 0, np.array([at], np.int32))
    clock = _Clock()
    for _ in range(1000):
        clock.run(lambda: subject.evict(1))
    return clock.p50


def _long(subject: _Subject | _Sketch, page: int, out: dict[str, Any]) -> None:
    tokens = _tokens(np.random.default_rng(2), LONG)
    hashing, match, insert = _Clock(), _Clock(), _Clock()
    keys = subject.keys(tokens)
    for _ in range(9):
        hashing.run(lambda: subject.keys(tokens))
    pages = np.arange(len(keys), dtype=np.int32)
    for _ in range(9):
        insert.run(lambda: subject.insert(keys, 0, pages))
        for _ in range(20):
            match.run(lambda: subject.match(keys))
        subject.evict(len(keys))
    out["long_hash_us"], out["long_match_us"], out["long_insert_us"] = (
        hashing.p50, match.p50, insert.p50,
    )  # fmt: skip


def _measure(make: Callable[[int], _Subject | _Sketch], page: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    _chats(make(CONVERSATIONS * (SHARED + TURNS * TURN) // page), page, out)
    out["evict_one_us_p50"] = {
        str(leaves): _leaves(make(leaves), page, leaves) for leaves in LEAVES
    }
    _long(make(LONG // page + 1), page, out)
    return out


def run() -> dict[str, object]:
    """Measure, and print a table."""
    cases: list[dict[str, Any]] = []
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection's pause belongs to no operation
    try:
        for page in (16, 64):
            sketch = _measure(lambda nodes, p=page: _Sketch(p, nodes), page)
            for window in (0, 4096):
                ours = _measure(lambda nodes, w=window, p=page: _Subject(p, w, nodes), page)
                cases.append({"page": page, "window": window, **ours, "sketch": sketch})
    finally:
        gc.enable()
        gc.unfreeze()
    for case in cases:
        print(f"page {case['page']}, window {case['window']}: us (ratio to the sketch)")
        for key, value in case.items():
            if key.endswith(("_us", "_p50")):
                print(f"  {key:22s} {_cell(value, case['sketch'][key])}")
    return {"cases": cases}


def _cell(ours: Figure, sketch: Figure) -> str:
    if isinstance(ours, dict):
        assert isinstance(sketch, dict)
        return "  ".join(f"{leaves}: {_cell(us, sketch[leaves])}" for leaves, us in ours.items())
    assert not isinstance(sketch, dict)
    return f"{ours:9.2f} ({ours / sketch:.2f})"
