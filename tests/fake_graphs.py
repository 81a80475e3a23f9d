"""CUDA graphs, without a GPU: what is recorded is each ATen operation and each Triton kernel, on
the memory that it was given; a replay does them again.

What a capture would not allow is an error here, and so is a replay on memory that is gone: as on a
GPU, a graph keeps nothing alive but what it has allocated itself. What a capture computes is NaN:
a GPU computes nothing then.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.interpreter import GridExecutor

from stratakv.engine.in_c import IN_C

ATEN = torch.ops.aten
HOST_READS = {
    ATEN._local_scalar_dense, ATEN.nonzero, ATEN.masked_select, ATEN._unique2, ATEN.unique_dim,
    ATEN.bincount, ATEN.equal, ATEN.is_nonzero, ATEN.nonzero_static,
}  # fmt: skip
"""A thread waits for what the device has computed, be it for a shape."""
COPIES = {ATEN.lift_fresh, ATEN._pin_memory}
"""From memory of the host that is not pinned."""
FROM_HOST = ("from_numpy", "as_tensor", "frombuffer")
TO_HOST = {"numpy", "tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu"}
FACTORIES = {
    torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.tensor, torch.linspace,
    torch.eye,
}  # fmt: skip


def as_on_a_gpu(monkeypatch):
    """Layers with states are Hugging Face's own: what is C on a CPU goes by the host."""
    if IN_C:
        takes = "stratakv.engine.huggingface.compiled_state_steps.is_float32_on_cpu"
        monkeypatch.setattr(takes, lambda *tensors: False)


class NotCapturableError(RuntimeError):
    """As torch raises where a stream that is captured is asked for more."""


@dataclass(frozen=True)
class Outside:
    """A tensor that was there before: an address, and no more."""

    storage: Any
    dtype: torch.dtype
    place: tuple

    @classmethod
    def of(cls, tensor):
        place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return cls(torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()),
                   tensor.dtype, place)  # fmt: skip

    def found(self):
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise AssertionError(f"a graph uses memory that is gone: {self.dtype} {self.place}")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.place)


class OnTheDevice(TorchFunctionMode):
    """Refuses numbers that come from the host or go there, where a CPU's tensor would not show."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name in TO_HOST:
            raise NotCapturableError(f"{name}: numbers go to the host")
        if function in FACTORIES and kwargs.get("device") is None:
            raise NotCapturableError(f"{name}: a tensor of the host's")
        return function(*args, **kwargs)


class Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.steps, self.own = [], {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = function.overloadpacket
        if packet in HOST_READS | COPIES or _reads_mask(packet, args):
            raise NotCapturableError(
                f"{function}: operation not permitted when stream is capturing"
            )
        if torch._C._dispatch_has_kernel_for_dispatch_key(
            function.name(), "CompositeImplicitAutograd"
        ):
            with self:
                return function.decompose(*args, **kwargs)
        given = tree_map_only(torch.Tensor, self._kept, (args, kwargs))
        before = {_key(one) for one in tree_leaves((args, kwargs)) if _is_tensor(one)}
        out = function(*args, **kwargs)
        made = [one for one in tree_leaves(out) if _is_tensor(one) and _key(one) not in before]
        for one in made:
            self.own[_key(one)] = one
        if made or function._schema.is_mutable:
            self.steps.append((function, given, made))
        return out

    def launch(self, executor, args, kwargs):
        given = tree_map_only(torch.Tensor, self._kept, (args, kwargs))
        with _disable_current_modes():
            LAUNCH(executor, *args, **kwargs)
        self.steps.append((lambda *a, **k: LAUNCH(executor, *a, **k), given, []))

    def _kept(self, tensor):
        return tensor if _key(tensor) in self.own else Outside.of(tensor)


LAUNCH = GridExecutor.__call__


def _is_tensor(one):
    return isinstance(one, torch.Tensor)


def _key(tensor):
    return tensor.untyped_storage()._cdata


def _reads_mask(packet, args):
    if packet not in (ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_):
        return packet is ATEN.repeat_interleave and not isinstance(args[-1], int)
    return any(_is_tensor(one) and one.dtype in (torch.bool, torch.uint8) for one in args[1])


class FakeGraph:
    def __init__(self, graphs, recording):
        self._graphs, self._recording = graphs, recording
        self.replays = 0

    def replay(self):
        self.replays += 1
        self._graphs.before_replay()
        with torch.inference_mode():
            for function, given, made in self._recording.steps:
                args, kwargs = tree_map_only(Outside, Outside.found, given)
                out = function(*args, **kwargs)
                found = [one for one in tree_leaves(out) if _is_tensor(one)]
                for to, one in zip(made, found[-len(made) :] if made else (), strict=True):
                    to.copy_(one)


class FakeGraphs:
    """``before_replay``: called before each."""

    def __init__(self):
        self.before_replay = lambda: None
        self.warmed, self.graphs = 0, []

    def warm_up(self, work):
        assert not self.graphs, "what is warmed up after a graph was recorded may take its memory"
        self.warmed += 1
        work()

    def record(self, work):
        recording = Recording()

        def launch(executor, *args, **kwargs):
            recording.launch(executor, args, kwargs)

        def refused(*_, **__):
            raise NotCapturableError("numbers come from the host")

        with ExitStack() as stack:
            stack.enter_context(patch.object(GridExecutor, "__call__", launch))
            for name in FROM_HOST:
                stack.enter_context(patch.object(torch, name, refused))
            stack.enter_context(OnTheDevice())
            stack.enter_context(recording)
            outputs = work()
        for one in recording.own.values():
            if one.is_floating_point():
                one.fill_(float("nan"))
        graph = FakeGraph(self, recording)
        self.graphs.append(graph)
        return graph, outputs


class Computed:
    """``Graphs`` that records nothing: a replay does the work once more, for steps of the same
    shapes to be compared with, number by number."""

    def __init__(self):
        self.before_replay = lambda: None

    def warm_up(self, work):
        pass

    def record(self, work):
        outputs = work()
        return Again(self, work, outputs), outputs


class Again:
    def __init__(self, graphs, work, outputs):
        self._graphs, self._work, self._outputs = graphs, work, outputs

    def replay(self):
        self._graphs.before_replay()
        found = self._work()
        self._outputs.logits.copy_(found.logits)
        self._outputs.hidden.copy_(found.hidden)
