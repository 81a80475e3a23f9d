"""Our adapters for vLLM and SGLang as storage backends again: whatever comes from above goes
through the engine's verbs, and what a store answers comes back as the engine sees it.

Owns the way there and back. Neither engine has a verb that removes a page, so that goes to the
store, as an operator's would; nor does one say why a page has not come: that is counted.
"""

from collections import Counter
from threading import RLock

import numpy as np
import torch

from stratakv.connect.namespace import EngineNamespace
from stratakv.connect.namespace_records import load_records
from stratakv.core.ids import GroupId
from stratakv.storage import registry
from stratakv.storage.backend import Everything, ObjectKey, ReadStatus, WriteStatus
from tests.fixtures.fake_sglang import PoolName, PoolTransfer, storage_config
from tests.fixtures.fake_vllm import ReqContext, make_offload_key

AT_ONCE = 128
"""Pages of one call; SGLang's own number."""
READS = {
    "missing": ReadStatus.MISS, "damaged": ReadStatus.CORRUPT, "unread": ReadStatus.FAILED,
}  # fmt: skip
WRITES = {"refused": WriteStatus.REFUSED, "unwritten": WriteStatus.FAILED}


class OpenedStores:
    """Every store that an adapter opens, the reading end of each pair first. ``turn``: of a thread
    that makes an adapter."""

    def __init__(self, monkeypatch):
        self.ends = []
        self.turn = RLock()
        monkeypatch.setattr("stratakv.storage.ends.open_storage", self._open)

    def _open(self, url, form):
        self.ends.append(registry.open_storage(url, form))
        return self.ends[-1]

    def take(self):
        """Those since the last call."""
        taken, self.ends = self.ends, []
        return taken


def why(reasons, counts, otherwise):
    """The one reason for which pages of a call did not come or go."""
    found = [status for event, status in reasons.items() if counts[event]]
    assert len(found) <= 1, f"several reasons in one call: {counts}"
    return found[0] if found else otherwise


class Below:
    """Above an adapter. A subclass has ``there``, ``load``, ``save``, ``clear`` and ``place``: the
    two ends of the store that has a key, and its name there."""

    def contains(self, keys):
        found = np.zeros(len(keys), np.bool_)
        for at in range(0, len(keys), AT_ONCE):
            found[at : at + AT_ONCE] = self.there(keys[at : at + AT_ONCE])
        return found

    def read(self, keys, into):
        statuses = []
        for at in range(0, len(keys), AT_ONCE):
            some = keys[at : at + AT_ONCE]
            pages, counts = self.load(some)
            missed = why(READS, counts, ReadStatus.MISS)
            for page, buffer in zip(pages, into[at:], strict=False):
                if page is not None:
                    buffer[:] = page
            statuses += [missed if page is None else ReadStatus.HIT for page in pages]
        return statuses

    def write(self, keys, pages):
        statuses = []
        for at in range(0, len(keys), AT_ONCE):
            some = keys[at : at + AT_ONCE]
            known = self.there(some)
            served, counts = self.save(some, pages[at : at + AT_ONCE])
            refused = why(WRITES, counts, WriteStatus.REFUSED)
            there = {True: WriteStatus.PRESENT, False: WriteStatus.STORED}
            statuses += [
                there[bool(before)] if done else refused
                for before, done in zip(known, served, strict=True)
            ]
        return statuses

    def remove(self, keys):
        """From both ends of each pair: what a writing end removes, a reading end knows later."""
        if isinstance(keys, Everything):
            return self.clear()
        removed = 0
        for (reading, writing), name in {self.place(key) for key in keys}:
            reading.remove([name])
            removed += writing.remove([name])
        return removed


class BelowVllm(Below):
    """A group is a cache group, and a rank is a part of the block's hash: a row of vLLM's has the
    bytes of all ranks. A row is as wide as the widest page."""

    def __init__(self, manager_of, model, storage, form, opened):
        self.form = form
        wide = max(form.page_bytes)
        specs = tuple(f"Spec({size})" for size in form.page_bytes)
        with opened.turn:
            self.manager = manager_of(
                model, storage, specs=specs, rows=4 * AT_ONCE, row_bytes=wide,
                dtype=form.spec_digest.hex(),
            )  # fmt: skip
            self.pair = tuple(opened.take())
            (record, *_) = load_records("vllm")
        self.namespace = EngineNamespace(bytes.fromhex(record.parts[0].digest))
        self.asked = 0

    def block(self, key):
        return make_offload_key(key.page + bytes([key.shard]), key.group)

    def place(self, key):
        block = key.page + bytes([key.shard])
        return self.pair, ObjectKey(self.namespace.page_key(block), key.group)

    def there(self, keys):
        self.asked += 1
        request = f"asks {self.asked}"
        found = self.manager.lookup([self.block(key) for key in keys], request)
        self.manager.tier.on_request_finished(ReqContext(request))
        return found

    def job(self, keys, work):
        before = Counter(self.manager.tier.totals)
        result = work([self.block(key) for key in keys], range(len(keys)))
        return result, Counter(self.manager.tier.totals) - before

    def load(self, keys):
        self.manager.rows[:] = 0
        result, counts = self.job(keys, self.manager.load)
        done = set(result.successful_keys)
        rows = self.manager.rows.view(np.uint8)
        sizes = [self.form.page_bytes[key.group] for key in keys]
        return [
            rows[at, :size].tobytes() if self.block(key) in done else None
            for at, (key, size) in enumerate(zip(keys, sizes, strict=True))
        ], counts

    def save(self, keys, pages):
        rows = self.manager.rows.view(np.uint8)
        for at, page in enumerate(pages):
            rows[at, : len(page)] = np.frombuffer(page, np.uint8)
        result, counts = self.job(keys, self.manager.store)
        if result.success:
            return [True] * len(keys), counts
        return self.there(keys), counts

    def touch(self, keys):
        self.manager.tier.touch([self.block(key) for key in keys[::-1]], ReqContext("r"))

    def clear(self):
        return self.pair[1].remove(Everything.EVERYTHING)

    def close(self):
        self.manager.end()


class BytePool:
    """A host pool of SGLang's, whose pages are bytes."""

    storage_format_tag = None
    page_size = 4
    layout = "page_first"

    def __init__(self, page_bytes):
        self.pages = torch.zeros((AT_ONCE, page_bytes), dtype=torch.uint8)

    def get_data_page(self, index, flat=True):
        del flat
        return self.pages[index // self.page_size]

    def get_dummy_flat_data_page(self):
        return torch.zeros_like(self.pages[0])

    def set_from_flat_data_page(self, index, data_page):
        self.pages[index // self.page_size] = data_page

    def indices(self, count):
        return torch.arange(count * self.page_size)


class BelowSglang(Below):
    """A group is the KV pool of a back end of its own, and so is each rank of it. ``make``: a back
    end, of settings. ``calls``: by which of SGLang's interfaces pages go."""

    def __init__(self, make, storage, form, opened, calls):
        self.make, self.storage, self.form, self.opened = make, storage, form, opened
        self.calls = calls
        self.parts = {}
        self.namespaces = {}
        for group in range(len(form.page_bytes)):
            self.part(ObjectKey(None, GroupId(group)))

    def part(self, key):
        """Of a key: back end, pool and the store's two ends."""
        if key[1:] not in self.parts:
            with self.opened.turn:
                self.add(key)
        return self.parts[key[1:]]

    def add(self, key):
        settings = storage_config(self.storage, tp_rank=key.shard, tp_size=16)
        backend = self.make(settings, dtype=self.form.spec_digest.hex())
        pool = BytePool(self.form.page_bytes[key.group])
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, PoolName.KV)
        self.parts[key[1:]] = backend, pool, tuple(self.opened.take())
        if key.shard == 0:
            (record, *_) = load_records("sglang")
            digest = bytes.fromhex(record.parts[0].digest)
            self.namespaces[key.group] = EngineNamespace(digest)

    def place(self, key):
        name = self.namespaces[key.group].page_key(key.page.hex().encode())
        return self.part(key)[2], ObjectKey(name, GroupId(0), key.shard)

    def split(self, keys):
        """Places in ``keys`` of each part's."""
        places = {}
        for at, key in enumerate(keys):
            places.setdefault(key[1:], []).append(at)
        return places.values()

    def there(self, keys):
        found = np.zeros(len(keys), np.bool_)
        for places in self.split(keys):
            backend, _, _ = self.part(keys[places[0]])
            names = [keys[at].page.hex() for at in places]
            at = 0
            while at < len(names):  # a question ends at the first gap
                leading = self.leading(backend, names[at:])
                found[places[at : at + leading]] = True
                at += leading + 1
        return found

    def leading(self, backend, names):
        if self.calls == "v2":
            return backend.batch_exists_v2(names, []).kv_hit_pages
        return backend.batch_exists(names)

    def load(self, keys):
        found, counts = [None] * len(keys), Counter()
        for places in self.split(keys):
            backend, pool, _ = self.part(keys[places[0]])
            names = [keys[at].page.hex() for at in places]
            pool.pages.zero_()
            before = Counter(backend.totals["kv"])
            hits = self.get(backend, pool, names)
            counts += Counter(backend.totals["kv"]) - before
            for at, hit, page in zip(places, hits, pool.pages, strict=False):
                found[at] = page.numpy().tobytes() if hit else None
        return found, counts

    def get(self, backend, pool, names):
        match self.calls:
            case "v1":
                return backend.batch_get_v1(names, pool.indices(len(names)))
            case "v2":
                asked = PoolTransfer(PoolName.KV, pool.indices(len(names)), names)
                return backend.batch_get_v2([asked])[PoolName.KV]
            case _:
                pages = pool.pages[: len(names)]
                return [page is not None for page in backend.batch_get(names, list(pages))]

    def save(self, keys, pages):
        served, counts = [False] * len(keys), Counter()
        for places in self.split(keys):
            backend, pool, _ = self.part(keys[places[0]])
            names = [keys[at].page.hex() for at in places]
            for row, at in zip(pool.pages, places, strict=False):
                row.copy_(torch.frombuffer(bytearray(pages[at]), dtype=torch.uint8))
            before = Counter(backend.totals["kv"])
            done = self.set(backend, pool, names)
            counts += Counter(backend.totals["kv"]) - before
            for at, one in zip(places, done, strict=True):
                served[at] = one
        return served, counts

    def set(self, backend, pool, names):
        match self.calls:
            case "v1":
                return backend.batch_set_v1(names, pool.indices(len(names)))
            case "v2":
                given = PoolTransfer(PoolName.KV, pool.indices(len(names)), names)
                return backend.batch_set_v2([given])[PoolName.KV]
            case _:
                if backend.batch_set(names, list(pool.pages[: len(names)])):
                    return [True] * len(names)
                return [backend.exists(name) for name in names]

    def touch(self, keys):
        """To read a page is to use it: SGLang has no other word for that."""
        there = [key for key, known in zip(keys, self.there(keys), strict=True) if known]
        self.load(there[::-1])

    def clear(self):
        """How many pages there were: all ranks of a group have one format."""
        stores = {group: pair[1] for (group, _), (_, _, pair) in self.parts.items()}
        for store in stores.values():
            store.contains([])
        pages = sum(store.stats().pages for store in stores.values())
        for backend, _, _ in self.parts.values():
            assert backend.clear()
        return pages

    def close(self):
        for backend, _, _ in self.parts.values():
            backend.close()
