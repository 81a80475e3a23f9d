"""Bytes without a model: pages of any mixture of groups and sidecars, checked row by row after
every move, from the device over host and storage and back to other pages of each."""

from contextlib import closing

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratakv.core.clock import MonotonicClock
from stratakv.core.ids import GroupId, PageKey
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.storage.backend import ObjectKey, ReadStatus, StoreFormat, WriteStatus
from stratakv.storage.io_jobs import Fetch, Kind, Store
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.fake_engine import PatternWriter
from stratakv.testing.transfer_ends import cache_specs
from stratakv.transfer.cpu import CpuTransferEngine
from stratakv.transfer.plan import CopyPlan, Direction, GroupCopy

PAGES = 6


class Bench:
    def __init__(self, spec):
        self.spec = spec
        counts = [PAGES] * len(spec.groups)
        self.pools = DevicePools(spec, counts, torch.device("cpu"))
        self.arenas = [HostArena(group, PAGES) for group in spec.groups]
        self.transfer = CpuTransferEngine(spec, self.pools, self.arenas)
        self.pattern = PatternWriter(spec)
        form = StoreFormat(
            spec_digest=spec.digest, page_bytes=tuple(group.page_bytes for group in spec.groups)
        )
        backend = MemoryBackend(form)
        self.worker = IoWorker(
            Backends(backend, backend), form, IoLimits(batch_pages=3), MonotonicClock()
        )
        everything = np.arange(PAGES, dtype=np.int32)
        for group in spec.groups:
            self.pools.poison(group.id, everything)
            self.arenas[group.id].poison(everything)

    def close(self):
        self.transfer.close()
        assert self.worker.close(5.0)

    def copy(self, direction, device, host):
        """Pages by group, all in one plan, as the cache merges a step's copies."""
        copies = [GroupCopy(GroupId(g), device[g], host[g]) for g in device if len(device[g])]
        if not copies:
            return
        self.transfer.submit(CopyPlan(direction, tuple(copies)))
        while not self.transfer.ready(direction):
            pass
        (done,) = self.transfer.take(direction, 1)
        assert done.ok

    def io(self, kind, job):
        self.worker.submit(job)
        while not self.worker.ready(kind):
            pass
        (answer,) = self.worker.take(kind, 1)
        return list(answer.statuses)


def places(data, keys):
    """Distinct pages in any order."""
    return np.array(data.draw(st.permutations(range(PAGES)))[: len(keys)], np.int32)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(cache_specs(), st.data())
def test_every_row_of_every_sidecar_arrives(spec, data):
    with closing(Bench(spec)) as bench:  # an example may be given up at any draw
        keys = {
            group.id: [
                PageKey(bytes([group.id, n]) * 16) for n in range(data.draw(st.integers(0, PAGES)))
            ]
            for group in spec.groups
        }
        device, host, back, other = (
            {group: places(data, named) for group, named in keys.items()} for _ in range(4)
        )
        for group, named in keys.items():
            bench.pattern.write(bench.pools, group, device[group], named)
        bench.copy(Direction.BACKUP, device, host)
        for group, named in keys.items():
            bench.pattern.verify_host(bench.arenas[group], group, host[group], named)
        stored = [g for g in keys if spec.groups[g].page_bytes]
        names = [ObjectKey(key, GroupId(g)) for g in stored for key in keys[g]]
        views = [view for g in stored for view in bench.arenas[g].views(host[g])]
        assert bench.io(Kind.STORE, Store(names, views)) == [WriteStatus.STORED] * len(names)
        for group in keys:
            bench.arenas[group].poison(np.arange(PAGES, dtype=np.int32))
            bench.pools.poison(group, np.arange(PAGES, dtype=np.int32))
        into = [view for g in stored for view in bench.arenas[g].views(back[g])]
        assert bench.io(Kind.FETCH, Fetch(names, into)) == [ReadStatus.HIT] * len(names)
        for group, named in keys.items():
            bench.pattern.verify_host(bench.arenas[group], group, back[group], named)
        bench.copy(Direction.LOAD, other, back)
        for group, named in keys.items():
            bench.pattern.verify_device(bench.pools, group, other[group], named)
