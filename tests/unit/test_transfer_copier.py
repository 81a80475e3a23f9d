"""The copier in C and the one in NumPy, bit against bit."""

import runpy
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratakv.core.ids import LayerId
from stratakv.testing.transfer_ends import (
    TransferEnds,
    cache_specs,
    hybrid_spec,
    page_keys_of,
    spread,
)
from stratakv.transfer import cpu
from stratakv.transfer.copier import CopyRoute
from stratakv.transfer.numpy_copy import NumpyCopier

compiled = pytest.importorskip("stratakv.transfer.compiled_copy", exc_type=ImportError)
_gather = pytest.importorskip("stratakv.transfer._gather", exc_type=ImportError)


def snapshot(ends):
    device = [
        ends.pools.raw(group.id, buffer.name).copy()
        for group in ends.spec.groups
        for buffer in group.buffers
    ]
    return device, [arena.bytes.copy() for arena in ends.arenas]


def fill(ends, seed):
    random = np.random.default_rng(seed)
    for group, arena in zip(ends.spec.groups, ends.arenas, strict=True):
        arena.bytes[:] = random.integers(0, 256, arena.bytes.shape, np.uint8)
        for buffer in group.buffers:
            raw = ends.pools.raw(group.id, buffer.name)
            raw[:] = random.integers(0, 256, raw.shape, np.uint8)


def moved(ends, copier, seed, verb, layers):
    fill(ends, seed)
    device, host = spread(ends, 4, seed), spread(ends, 4, seed + 1)
    for arena in ends.arenas:
        route = CopyRoute.of(ends.pools, arena, layers)
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
    ends = TransferEnds.of(spec, pages=5)
    ours = moved(ends, compiled.CompiledCopier(), seed, verb, layers)
    theirs = moved(ends, NumpyCopier(), seed, verb, layers)
    for mine, other in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
        assert np.array_equal(mine, other)


@pytest.mark.parametrize("elements", [1, 3, 31, 33, 127, 129, 2047])
@pytest.mark.parametrize("verb", ["gather", "scatter"])
def test_rows_about_the_edges_of_streamed_copies(elements, verb):
    ends = TransferEnds.of(hybrid_spec(elements), pages=6)
    layers = frozenset(range(4))
    ours = moved(ends, compiled.CompiledCopier(), elements, verb, layers)
    theirs = moved(ends, NumpyCopier(), elements, verb, layers)
    assert all(np.array_equal(*pair) for pair in zip(ours[0], theirs[0], strict=True))
    assert all(np.array_equal(*pair) for pair in zip(ours[1], theirs[1], strict=True))


class Apart:
    """Pages of pools that somebody else laid out: page beside page, a page's layers between."""

    def __init__(self, pools):
        self.pages = pools.pages
        self.memory = {
            (group.id, buffer.name): pools.raw(group.id, buffer.name).swapaxes(0, 1).copy()
            for group in pools.spec.groups
            for buffer in group.buffers
        }

    def layer_pages(self, group, buffer_name, layer):
        pages = self.memory[group, buffer_name][:, layer]
        view = pages.reshape(len(pages), -1)
        assert np.shares_memory(view, pages)
        return view


@settings(max_examples=50, deadline=None)
@given(spec=cache_specs(), seed=st.integers(0, 100))
def test_pages_that_lie_apart_are_copied_alike_by_both(spec, seed):
    """Another engine's pools: (address, distance between pages) is all that is known of them."""
    ends = TransferEnds.of(spec, pages=5)
    keys, device, host = page_keys_of("apart", 4), spread(ends, 4, seed), spread(ends, 4, seed + 1)
    ends.fill_device(device, keys)
    copiers = compiled.CompiledCopier(), NumpyCopier()
    for there, back in (copiers, copiers[::-1]):
        apart = Apart(ends.pools)
        ends.poison_host()
        routes = [CopyRoute.of(apart, arena, frozenset(range(6))) for arena in ends.arenas]
        for route in routes:
            there.gather(route, device[route.group.id], host[route.group.id])
        ends.verify_host(host, keys)
        other = [pages[::-1].copy() for pages in device]
        for route in routes:
            back.scatter(route, other[route.group.id], host[route.group.id])
            ends.pattern.verify_device(apart, route.group.id, other[route.group.id], keys)


@pytest.mark.parametrize("page", [-1, 6])
@pytest.mark.parametrize("verb", ["gather", "scatter"])
def test_a_page_outside_the_pools_is_refused_by_both(page, verb):
    ends = TransferEnds.of(hybrid_spec(), pages=6)
    inside, outside = np.array([1, 2], np.int32), np.array([1, page], np.int32)
    route = CopyRoute.of(ends.pools, ends.arenas[0], (LayerId(0),))
    for copier in (compiled.CompiledCopier(), NumpyCopier()):
        for pair in ((inside, outside), (outside, inside)):
            with pytest.raises((IndexError, ValueError)):
                getattr(copier, verb)(route, *pair)


def test_device_pages_that_no_copy_could_take_are_refused():
    ends = TransferEnds.of(hybrid_spec(), pages=6)
    pools = ends.pools

    class Whole:
        pages = pools.pages

        def __init__(self, change):
            self.change = change

        def layer_pages(self, *place):
            return self.change(pools.layer_pages(*place))

    for change, message in (
        (lambda pages: pages.view(np.uint16), "bytes, not"),
        (lambda pages: pages[:, 1:], "bytes of a page"),
        (np.asfortranarray, "together"),
    ):
        with pytest.raises(AssertionError, match=message):
            CopyRoute.of(Whole(change), ends.arenas[0], (LayerId(0),))


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


def test_the_helper_copies_what_it_is_given():
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


def row_arguments(**changed):
    """Of a sound call for one row of two in a page."""
    device, host, (segments, *_) = arguments()
    sound = {
        "segments": segments,
        "device_pages": np.array([1], np.int32),
        "device_offsets": np.array([0], np.int32),
        "host_pages": np.array([1], np.int32),
        "host_offsets": np.array([1], np.int32),
        "rows": 2,
        "device_capacity": 2,
        "host_capacity": 2,
        "host_address": host.ctypes.data,
        "host_stride": 32,
    }
    return device, host, tuple((sound | changed).values())


def test_the_helper_copies_single_rows():
    device, host, call = row_arguments()
    _gather.scatter_rows(*call)
    assert (device[1, :8] == host[1, 16:24]).all()
    assert not device[0].any()
    assert not device[1, 8:].any()


@pytest.mark.parametrize(
    "changed",
    [
        {"device_pages": np.array([2], np.int32)},
        {"device_offsets": np.array([2], np.int32)},
        {"host_pages": np.array([-1], np.int32)},
        {"host_offsets": np.array([-1], np.int32)},
        {"host_offsets": np.array([2], np.int32)},
        {"host_pages": np.array([0, 1], np.int32)},
        {"device_offsets": np.array([0], np.int64)},
        {"segments": np.zeros((2, 4), np.int64)},
        {"segments": np.array([[1 << 40, 16, 17, 16]], np.int64)},
        {"rows": 0},
    ],
)
def test_the_helper_refuses_rows_that_would_leave_their_pages(changed):
    device, _, call = row_arguments(**changed)
    with pytest.raises(ValueError, match=r"page|segment|items|length"):
        _gather.scatter_rows(*call)
    assert not device.any()


def test_without_the_helper_the_engine_copies_with_numpy(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "stratakv.transfer.compiled_copy")
    monkeypatch.setitem(sys.modules, "stratakv.transfer._gather", None)
    monkeypatch.delattr("stratakv.transfer._gather")
    fresh = runpy.run_path(str(cpu.__file__))
    assert isinstance(fresh["DEFAULT_COPIER"], NumpyCopier)
    assert "not built" in caplog.text


def test_with_the_helper_the_engine_uses_it():
    assert isinstance(cpu.DEFAULT_COPIER, compiled.CompiledCopier)
