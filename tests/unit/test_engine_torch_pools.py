"""Tensors over the device tier's bytes."""

import numpy as np
import pytest
import torch

from stratakv.core.ids import GroupId, LayerId
from stratakv.engine.attention.torch_pools import TorchPools
from stratakv.spec.groups import DTYPE_BYTES, BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll


def one_buffer(dtype):
    buffer = BufferSpec(
        name="k", layers=(LayerId(3), LayerId(1)), rows_per_page=4, row_shape=(2, 8), dtype=dtype
    )
    group = CacheGroup(id=GroupId(0), name="full", retention=KeepAll(), buffers=(buffer,))
    return CacheSpec(page_tokens=4, groups=(group,))


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_layer_is_a_typed_view_of_the_raw_bytes(dtype):
    pools = TorchPools(one_buffer(dtype), [6])
    raw = pools.raw(GroupId(0), "k")
    raw.fill(0)
    layer = pools.layer(GroupId(0), "k", LayerId(1))
    assert layer.shape == (6, 4, 2, 8)
    assert str(layer.dtype) == f"torch.{dtype}"
    layer[2, 3] = 1
    touched = np.argwhere(raw.any(axis=3)).tolist()
    assert touched == [[1, 2, 3]], "layer 1 is the buffer's second, page 2, row 3"


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_poison_is_nan_and_touches_only_its_pages(dtype):
    pools = TorchPools(one_buffer(dtype), [6])
    pools.raw(GroupId(0), "k").fill(0)
    pools.poison(GroupId(0), np.array([1, 4], np.int32))
    for layer_id in (LayerId(1), LayerId(3)):
        layer = pools.layer(GroupId(0), "k", layer_id)
        poisoned = layer[[1, 4]]
        if layer.dtype.is_floating_point:
            assert poisoned.float().isnan().all()
        else:
            assert (poisoned.view(torch.uint8) == 0xFF).all()
        assert not layer[[0, 2, 3, 5]].view(torch.uint8).any()
