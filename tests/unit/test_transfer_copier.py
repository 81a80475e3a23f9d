"""The copier in C and the one in torch, bit against bit."""

import runpy
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratakv.core.ids import LayerId
from stratakv.testing.transfer_ends import Ends, cache_specs, hybrid_spec, spread
from stratakv.transfer import cpu
from stratakv.transfer.copier import Route
from stratakv.transfer.torch_copy import TorchCopier

compiled = pytest.importorskip("stratakv.transfer.compiled_copy", exc_type=ImportError)
_gather = pytest.importorskip("stratakv.transfer._gather", exc_type=ImportError)


def snapshot(ends):
    device = [
        ends.pools.raw(group.id, buffer.name).clone()
        for group in ends.spec.groups
        for buffer in group.buffers
    ]
    return device, [arena.bytes.clone() for arena in ends.arenas]


def fill(ends, seed):
    generator = torch.Generator().manual_seed(seed)
    for group, arena in zip(ends.spec.groups, ends.arenas, strict=True):
        arena.bytes.random_(0, 256, generator=generator)
        for buffer in group.buffers:
            ends.pools.raw(group.id, buffer.name).random_(0, 256, generator=generator)


def moved(ends, copier, seed, verb, layers):
    fill(ends, seed)
    device, host = spread(ends, 4, seed), spread(ends, 4, seed + 1)
    for arena in ends.arenas:
        route = Route.of(ends.pools, arena, layers)
        copy = copier.gather if verb == "gather" else copier.scatter
        copy(route, device[arena.group.id], host[arena.group.id])
    return snapshot(ends)


@settings(max_examples=150, deadline=None)
@given(
    spec=cache_specs(),
    seed=st.integers(0, 100),
    verb=st.sampled_from(["gather", "scatter"]),
    layers=st.one_of(st.just(frozenset(range(6))), st.frozensets(st.integers(0, 5))),
)
def test_both_copiers_leave_the_same_bytes_everywhere(spec, seed, verb, layers):
    ends = Ends.of(spec, pages=5)
    ours = moved(ends, compiled.CompiledCopier(), seed, verb, layers)
    theirs = moved(ends, TorchCopier(), seed, verb, layers)
    for mine, other in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("elements", [1, 3, 31, 33, 127, 129, 2047])
@pytest.mark.parametrize("verb", ["gather", "scatter"])
def test_rows_about_the_edges_of_streamed_copies(elements, verb):
    ends = Ends.of(hybrid_spec(elements), pages=6)
    layers = frozenset(range(4))
    ours = moved(ends, compiled.CompiledCopier(), elements, verb, layers)
    theirs = moved(ends, TorchCopier(), elements, verb, layers)
    assert all(torch.equal(*pair) for pair in zip(ours[0], theirs[0], strict=True))
    assert all(torch.equal(*pair) for pair in zip(ours[1], theirs[1], strict=True))


def test_torch_copies_work_on_pools_made_in_inference_mode():
    with torch.inference_mode():
        ends = Ends.of(hybrid_spec(), pages=6)
        fill(ends, seed=1)
    (pages, *_), (arena, *_) = spread(ends, 4, 1), ends.arenas
    TorchCopier().scatter(Route.of(ends.pools, arena, (LayerId(0),)), pages, pages)
    landed = ends.pools.raw(arena.group.id, "k")[0].flatten(1).numpy()
    assert (landed[pages] == arena.bytes.numpy()[pages, : landed.shape[1]]).all()


def arguments(**changed):
    """Arguments of a sound call over two pages of 16 bytes, one segment."""
    device, host = np.zeros((2, 16), np.uint8), np.arange(64, dtype=np.uint8).reshape(2, 32)
    sound = {
        "segments": np.array([[device.ctypes.data, 16, 8, 16]], np.int64),
        "device_pages": np.array([1], np.int32),
        "host_pages": np.array([0], np.int32),
        "device_capacity": 2,
        "host_capacity": 2,
        "host_address": host.ctypes.data,
        "host_stride": 32,
    }
    return device, host, tuple((sound | changed).values())


def test_the_helper_copies_what_it_is_told():
    device, host, call = arguments()
    _gather.scatter(*call)
    assert (device[1] == host[0, 8:24]).all()
    assert not device[0].any()


def test_the_helper_takes_plain_bytes():
    device, host, call = arguments(device_pages=b"\0\0\0\0", host_pages=b"\1\0\0\0")
    _gather.scatter(*call)
    assert (device[0] == host[1, 8:24]).all()


@pytest.mark.parametrize(
    "changed",
    [
        {"device_pages": np.array([2], np.int32)},
        {"device_pages": np.array([-1], np.int32)},
        {"host_pages": np.array([2], np.int32)},
        {"host_pages": np.array([-1], np.int32)},
        {"host_pages": np.array([0, 1], np.int32)},
        {"device_pages": np.array([1], np.int64)},
        {"device_pages": b"\0\0\0"},
        {"segments": np.zeros((1, 3), np.int64)},
        {"segments": np.array([[1 << 40, 16, 17, 16]], np.int64)},
        {"segments": np.array([[1 << 40, 16, -1, 16]], np.int64)},
        {"segments": np.array([[1 << 40, 16, 2**63 - 8, 16]], np.int64)},
        {"segments": np.array([[1 << 40, 8, 0, 16]], np.int64)},
        {"segments": np.array([[0, 16, 0, 16]], np.int64)},
        {"segments": np.array([[1 << 40, 16, 0, 0]], np.int64)},
    ],
)
@pytest.mark.parametrize("verb", ["gather", "scatter"])
def test_the_helper_refuses_what_would_leave_its_pages(changed, verb):
    device, host, call = arguments(**changed)
    with pytest.raises(ValueError, match=r"page|segment|items|length"):
        getattr(_gather, verb)(*call)
    assert not device.any()
    assert (host.ravel() == np.arange(64)).all()


def test_without_the_helper_the_engine_copies_with_torch(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "stratakv.transfer.compiled_copy")
    monkeypatch.setitem(sys.modules, "stratakv.transfer._gather", None)
    monkeypatch.delattr("stratakv.transfer._gather")
    fresh = runpy.run_path(str(cpu.__file__))
    assert isinstance(fresh["DEFAULT_COPIER"], TorchCopier)
    assert "not built" in caplog.text


def test_with_the_helper_the_engine_uses_it():
    assert isinstance(cpu.DEFAULT_COPIER, compiled.CompiledCopier)
