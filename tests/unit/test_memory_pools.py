import mmap

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from stratakv.core.ids import GroupId, LayerId
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.memory.layout import HostPageLayout
from stratakv.memory.mapped import mapped_bytes
from stratakv.spec.groups import (
    DTYPE_BYTES,
    HOST_ALIGNMENT_BYTES,
    BufferSpec,
    CacheGroup,
    CacheSpec,
)
from stratakv.spec.retention import KeepAll
from stratakv.testing.transfer_ends import cache_specs, hybrid_spec


def one_buffer(dtype):
    buffer = BufferSpec(
        name="k", layers=(LayerId(3), LayerId(1)), rows_per_page=4, row_shape=(2, 8), dtype=dtype
    )
    group = CacheGroup(id=GroupId(0), name="full", retention=KeepAll(), buffers=(buffer,))
    return CacheSpec(page_tokens=4, groups=(group,))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cache_specs())
def test_a_host_page_holds_every_layer_of_every_sidecar_without_holes(spec):
    for group in spec.groups:
        layout = HostPageLayout.of(group)
        end = 0
        for segment in layout.segments:
            assert segment.offset_bytes == end
            assert segment.layer_id == group.buffers[segment.buffer].layers[segment.layer]
            end += segment.bytes
        assert end == layout.page_bytes == group.page_bytes
        named = [(segment.buffer, segment.layer) for segment in layout.segments]
        assert len(set(named)) == len(named) == sum(len(b.layers) for b in group.buffers)
        assert layout.stride_bytes % HOST_ALIGNMENT_BYTES == 0
        assert 0 <= layout.stride_bytes - layout.page_bytes < HOST_ALIGNMENT_BYTES


@settings(max_examples=50, deadline=None)
@given(cache_specs())
def test_pools_and_arenas_take_exactly_what_the_spec_says(spec):
    pages = [5 + group.id for group in spec.groups]
    pools = DevicePools(spec, pages)
    expected = sum(n * group.page_bytes for n, group in zip(pages, spec.groups, strict=True))
    assert pools.size_bytes == expected
    for n, group in zip(pages, spec.groups, strict=True):
        arena = HostArena(group, n)
        assert arena.size_bytes == n * arena.layout.stride_bytes
        assert not arena.size_bytes or arena.bytes.ctypes.data % HOST_ALIGNMENT_BYTES == 0


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_layers_pages_are_views_of_the_raw_bytes(dtype):
    pools = DevicePools(one_buffer(dtype), [6])
    raw = pools.raw(GroupId(0), "k")
    assert raw.shape == (2, 6, 4, 16 * DTYPE_BYTES[dtype])
    assert raw.ctypes.data % HOST_ALIGNMENT_BYTES == 0
    raw.fill(0)
    layer = pools.layer_pages(GroupId(0), "k", 1)
    assert layer.shape == (6, 64 * DTYPE_BYTES[dtype])
    layer[2, -1] = 1
    assert np.argwhere(raw.any(axis=3)).tolist() == [[1, 2, 3]]


def test_device_poison_touches_only_its_pages():
    pools = DevicePools(one_buffer("int8"), [6])
    raw = pools.raw(GroupId(0), "k")
    raw.fill(0)
    pools.poison(GroupId(0), np.array([1, 4], np.int32))
    assert (raw[:, [1, 4]] == 0xFF).all()
    assert not raw[:, [0, 2, 3, 5]].any()


@pytest.mark.parametrize("page", [-1, 6])
def test_no_page_id_wraps_to_another_page(page):
    """NumPy's own -1 is the last page, somebody else's."""
    pools, arena = DevicePools(one_buffer("int8"), [6]), HostArena(one_buffer("int8").groups[0], 6)
    for poison in (lambda ids: pools.poison(GroupId(0), ids), arena.poison):
        with pytest.raises(IndexError):
            poison(np.array([page], np.int32))


def test_memory_that_the_machine_does_not_have_is_a_memory_error():
    with pytest.raises(MemoryError, match="bytes"):
        mapped_bytes(1 << 62)


def test_an_arena_takes_no_memory_until_it_is_written():
    one_gib = 1 << 30
    arena = HostArena(one_buffer("int8").groups[0], one_gib // 128)
    before = _resident_bytes()
    arena.bytes[7] = 1
    assert arena.size_bytes == one_gib
    assert _resident_bytes() - before < one_gib // 4


def _resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_arena_poison_touches_only_its_pages():
    arena = HostArena(hybrid_spec().groups[0], 4)
    arena.bytes.fill(0)
    arena.poison(np.array([2], np.int32))
    assert (arena.bytes[2] == 0xFF).all()
    assert not arena.bytes[[0, 1, 3]].any()


def test_a_group_without_buffers_has_pages_and_no_bytes():
    group = CacheGroup(id=GroupId(0), name="anchor", retention=KeepAll(), buffers=())
    pools = DevicePools(CacheSpec(page_tokens=4, groups=(group,)), [7])
    arena = HostArena(group, 7)
    assert (pools.pages, pools.size_bytes) == ((7,), 0)
    assert (arena.pages, arena.size_bytes, arena.layout.stride_bytes) == (7, 0, 0)
    pools.poison(GroupId(0), np.array([1], np.int32))
    arena.poison(np.array([1], np.int32))
