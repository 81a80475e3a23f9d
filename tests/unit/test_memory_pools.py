import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from stratakv.core.ids import GroupId, LayerId
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.memory.layout import ALIGNMENT_BYTES, HostPageLayout
from stratakv.spec.groups import DTYPE_BYTES, BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll
from stratakv.testing.transfer_ends import cache_specs, hybrid_spec

CPU = torch.device("cpu")


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
        assert layout.stride_bytes % ALIGNMENT_BYTES == 0
        assert 0 <= layout.stride_bytes - layout.page_bytes < ALIGNMENT_BYTES


@settings(max_examples=50, deadline=None)
@given(cache_specs())
def test_pools_and_arenas_take_exactly_what_the_spec_says(spec):
    pages = [5 + group.id for group in spec.groups]
    pools = DevicePools(spec, pages, CPU)
    expected = sum(n * group.page_bytes for n, group in zip(pages, spec.groups, strict=True))
    assert pools.size_bytes == pools.bytes_total == expected
    for n, group in zip(pages, spec.groups, strict=True):
        arena = HostArena(group, n)
        assert arena.size_bytes == n * arena.layout.stride_bytes
        assert arena.bytes.data_ptr() % ALIGNMENT_BYTES == 0


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_layer_is_a_typed_view_of_the_raw_bytes(dtype):
    pools = DevicePools(one_buffer(dtype), [6], CPU)
    raw = pools.raw(GroupId(0), "k")
    assert raw.shape == (2, 6, 4, 16 * DTYPE_BYTES[dtype])
    assert raw.data_ptr() % ALIGNMENT_BYTES == 0
    raw.zero_()
    layer = pools.layer(GroupId(0), "k", LayerId(1))
    assert layer.shape == (6, 4, 2, 8)
    assert str(layer.dtype) == f"torch.{dtype}"
    layer[2, 3] = 1
    touched = [tuple(at) for at in raw.flatten(3).any(dim=3).nonzero().tolist()]
    assert touched == [(1, 2, 3)], "layer 1 is the buffer's second, page 2, row 3"


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_poison_is_nan_and_touches_only_its_pages(dtype):
    pools = DevicePools(one_buffer(dtype), [6], CPU)
    pools.raw(GroupId(0), "k").zero_()
    pools.poison(GroupId(0), np.array([1, 4], np.int32))
    for layer_id in (LayerId(1), LayerId(3)):
        layer = pools.layer(GroupId(0), "k", layer_id)
        poisoned = layer[[1, 4]]
        if layer.dtype.is_floating_point:
            assert poisoned.float().isnan().all()
        else:
            assert (poisoned.view(torch.uint8) == 0xFF).all()
        assert not layer[[0, 2, 3, 5]].view(torch.uint8).any()


def test_arena_poison_touches_only_its_pages():
    arena = HostArena(hybrid_spec().groups[0], 4)
    arena.bytes.zero_()
    arena.poison(np.array([2], np.int32))
    assert (arena.bytes[2] == 0xFF).all()
    assert not arena.bytes[[0, 1, 3]].any()


def test_a_group_without_buffers_has_pages_and_no_bytes():
    group = CacheGroup(id=GroupId(0), name="anchor", retention=KeepAll(), buffers=())
    pools = DevicePools(CacheSpec(page_tokens=4, groups=(group,)), [7], CPU)
    arena = HostArena(group, 7)
    assert (pools.pages, pools.size_bytes) == ((7,), 0)
    assert (arena.pages, arena.size_bytes, arena.layout.stride_bytes) == (7, 0, 0)
    pools.poison(GroupId(0), np.array([1], np.int32))
    arena.poison(np.array([1], np.int32))
