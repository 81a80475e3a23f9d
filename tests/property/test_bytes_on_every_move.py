"""Bytes without a model: what any mixture of groups and sidecars needs at any end, checked row by
row after every move, from the device over host and storage and back to other pages of each."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stratakv.core.clock import MonotonicClock
from stratakv.core.ids import GroupId, PageKey
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.spec.retention import needed
from stratakv.storage.backend import ObjectKey, ReadStatus, StoreFormat, WriteStatus
from stratakv.storage.io_jobs import Fetch, Kind, Store
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.fake_engine import PatternWriter
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.transfer_ends import cache_specs
from stratakv.transfer.copy_plan import CopyPlan, Direction, GroupCopy
from stratakv.transfer.cpu import DEFAULT_COPIER, CpuTransferEngine
from stratakv.transfer.numpy_copy import NumpyCopier

PAGES = 6


class Bench:
    def __init__(self, spec, copier):
        self.spec = spec
        counts = [PAGES] * len(spec.groups)
        self.pools = DevicePools(spec, counts)
        self.arenas = [HostArena(group, PAGES) for group in spec.groups]
        self.transfer = CpuTransferEngine(spec, self.pools, self.arenas, copier)
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
        assert self.worker.close(PATIENCE_S)

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


def there_and_back(spec, data, copier):
    """A move takes what some of the groups need at one end: of each group other pages, or none."""
    with closing(Bench(spec, copier)) as bench:  # an example may be given up at any draw
        end = data.draw(st.integers(0, PAGES * spec.page_tokens))
        moved = data.draw(st.sets(st.sampled_from(spec.groups), min_size=1))
        keys = {
            group.id: [
                PageKey(bytes([group.id, n]) * 16)
                for n in needed(group.retention, end, spec.page_tokens)
                if group in moved
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


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cache_specs(), st.data())
def test_every_row_of_every_sidecar_arrives(spec, data):
    there_and_back(spec, data, DEFAULT_COPIER)


# -- the test has teeth --------------------------------------------------------------------------


class OneRowTooFew(NumpyCopier):
    """The last row of a page's last sidecar stays what it was."""

    def scatter(self, route, device, host):
        buffer = route.group.buffers[route.segments[-1].buffer]
        row = route.device[-1][int(device[-1]), -buffer.row_bytes :]
        before = row.copy()
        super().scatter(route, device, host)
        row[:] = before


class SwapsTwoOffsets(NumpyCopier):
    """Two sidecars of one size lie in each other's place on the host."""

    def gather(self, route, device, host):
        for at, other in enumerate(route.segments):
            first = route.segments[0]
            if at and other.bytes == first.bytes:
                swapped = list(route.segments)
                swapped[0] = replace(first, offset_bytes=other.offset_bytes)
                swapped[at] = replace(other, offset_bytes=first.offset_bytes)
                route = replace(route, segments=tuple(swapped))
                break
        super().gather(route, device, host)


class OneGroupStaysBehind(NumpyCopier):
    """Of a plan over several groups the last one is forgotten."""

    def gather(self, route, device, host):
        if route.group.id == 0:
            super().gather(route, device, host)


@pytest.mark.parametrize("bug", [OneRowTooFew, SwapsTwoOffsets, OneGroupStaysBehind])
def test_a_seeded_bug_is_seen(bug):
    @settings(
        max_examples=100,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(cache_specs(), st.data())
    def broken(spec, data):
        there_and_back(spec, data, bug())

    with pytest.raises(AssertionError, match="does not hold its prefix"):
        broken()
