"""A device without a GPU, on which it is an error that the host waits.

``AWAY`` is a torch device of its own, whose memory is the CPU's. A tensor there says so, and so
does all that is computed with it: what somebody forgot to bring there is found too. Interface:

    module = away(module)                # or torch.empty(..., device=AWAY)
    with no_host_reads() as reads:       # on every thread, until the block ends
        ...                              # HostReadError where the host would wait for a GPU
    assert reads.count == 1              # events waited for: tensors.on_host, the one way back

Within the block torch's pinned memory and CUDA's events are stand-ins: bytes of an asynchronous
copy to the host are there once an event behind it was waited for, and not before. A list of numbers
that torch brings there by itself, as an index, ends in an internal error of torch's. Needs
``torch.inference_mode``; must not know an engine.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("away")
AWAY = torch.device("away", 0)
HOST = torch.device("cpu")

WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "allclose", "_unique",
    "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "is_nonzero",
    "_to_sparse", "histogram", "_grouped_mm", "_assert_scalar", "_linalg_check_errors",
}  # fmt: skip
"""Of torch's operators those whose code for CUDA reads a number on the host, by their size if for
no other reason. ``_grouped_mm`` does but for bfloat16 on some GPUs."""
BY_INDEX = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}


class HostReadError(AssertionError):
    """On a GPU the host would wait here."""


@dataclass(eq=False)
class Reads:
    """``count``: events that were waited for."""

    count: int = 0
    pinned: dict[int, torch.Tensor] = field(default_factory=dict)
    under_way: list[Callable[[], object]] = field(default_factory=list)

    def pin(self, there: torch.Tensor) -> torch.Tensor:
        self.pinned[there.untyped_storage().data_ptr()] = there
        return there

    def holds(self, one: torch.Tensor) -> bool:
        return one.untyped_storage().data_ptr() in self.pinned


_now: list[Reads] = []
"""The block that is open; none: nothing is an error."""


class Away(torch.Tensor):
    """``here``: the same numbers, on the CPU."""

    here: torch.Tensor
    is_cuda = True  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, here):
        found = torch.Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(),
            dtype=here.dtype, device=AWAY, requires_grad=False,
        )  # fmt: skip
        found.here = here
        return found

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def __repr__(self):
        return f"Away({self.here!r})"

    def data_ptr(self):
        """Whoever follows it is a driver."""
        return self.here.data_ptr()

    def numpy(self, *, force=False):
        _wait("numpy")
        return self.here.numpy(force=force)

    def tolist(self):
        _wait("tolist")
        return self.here.tolist()

    def __array__(self, *args, **kwargs):
        return self.numpy()


@torch.inference_mode()
def away(module: nn.Module) -> nn.Module:
    """All that the module holds is there from now on."""
    return module.to(AWAY)


@contextmanager
def no_host_reads() -> Generator[Reads]:
    """HostReadError within, where the host would wait."""
    assert not _now, "one block at a time"
    reads, patch = Reads(), mock.patch.object
    with (
        patch(torch.Tensor, "pin_memory", lambda one: reads.pin(one.clone())),
        patch(torch.cuda, "Event", partial(_Event, reads)),
        patch(torch.cuda, "current_stream", lambda device=None: None),
        patch(torch, "tensor", partial(_made, torch.tensor)),
        patch(torch, "as_tensor", partial(_made, torch.as_tensor)),
        patch(torch, "empty", partial(_empty, reads, torch.empty)),
        patch(torch, "empty_like", partial(_empty, reads, torch.empty_like)),
    ):
        _now.append(reads)
        try:
            yield reads
        finally:
            _now.clear()


class _Event:
    def __init__(self, reads, blocking=False):
        self._reads = reads

    def record(self, stream=None):
        self._before = list(self._reads.under_way)

    def query(self):
        return False

    @torch.inference_mode()
    def synchronize(self):
        self._reads.count += 1
        for copy in self._before:
            copy()


def _empty(reads, make, *args, pin_memory=False, **kwargs):
    found = make(*args, **kwargs)
    return reads.pin(found) if pin_memory else found


def _made(make, numbers, *args, device=None, **kwargs):
    """A list of numbers goes there as a copy of its own."""
    if device is None or torch.device(device).type != AWAY.type:
        return make(numbers, *args, device=device, **kwargs)
    if isinstance(numbers, Away):
        return numbers.to(**kwargs)
    _wait(f"torch.{make.__name__}")
    return Away(make(numbers, *args, **kwargs))


def _wait(what):
    if _now:
        raise HostReadError(what)


def _run(func, args, kwargs):
    if _composite(func):  # of others, which a mode of inference does not part by itself
        return func.decompose(*args, **kwargs)
    name = func.overloadpacket.__name__
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    if _now:
        _check(name, func, args, kwargs, tensors)
    if name == "copy_" and _now and not isinstance(args[0], Away):
        return _later(*args)
    if name == "histc":  # whole numbers: a GPU's alone
        return Away(args[0].here.float().histc(*args[1:]).to(args[0].dtype))
    known = {id(one.here): one for one in tensors if isinstance(one, Away)}
    found = func(*tree_map(_here, args), **tree_map(_here, kwargs))
    if (target := kwargs.get("device")) is not None and target.type == HOST.type:
        return found
    return tree_map(partial(_there, known), found)


@cache
def _composite(func):
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _check(name, func, args, kwargs, tensors):
    if name in WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        raise HostReadError(name)
    there = [one for one in tensors if isinstance(one, Away)]
    others = [one for one in tensors if not isinstance(one, Away)]
    if name == "_to_copy":
        target = kwargs.get("device")
        if there and target is not None and target.type == HOST.type:
            raise HostReadError("a copy to the host")
    elif name == "copy_" and others and there:
        asynchronous = len(args) > 2 and args[2]
        if not _now[0].holds(others[0]):
            raise HostReadError("a copy from or to memory that is not pinned")
        if not asynchronous:
            raise HostReadError("a copy that is waited for")
    elif name in BY_INDEX:
        places = [one for one in tree_leaves(args[1]) if isinstance(one, torch.Tensor)]
        if any(one.dtype in (torch.bool, torch.uint8) for one in places):
            raise HostReadError(f"{name} by a mask")
        if others:
            raise HostReadError(f"{name} with a tensor of the host's")
    elif there:
        assert all(one.dim() == 0 for one in others), f"{func}: tensors on the host, and there"


def _later(target, source, *_):
    """What the target holds until then is nobody's."""
    was = source.here.clone()
    target.view(torch.uint8 if target.dim() else target.dtype).fill_(0x5A)
    _now[0].under_way.append(partial(target.copy_, was))
    return target


def _here(one):
    if isinstance(one, Away):
        return one.here
    if isinstance(one, torch.device) and one.type == AWAY.type:
        return HOST
    return one


def _there(known, one):
    if not isinstance(one, torch.Tensor):
        return one
    return known[id(one)] if id(one) in known else Away(one)


_library = torch.library.Library("_", "IMPL")
_library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
