"""What SGLang lacks to run on a CPU beside a CPU build of torch, in every process that it starts.

Owns stand-ins, in tests only, each of which changes something outside of the storage back end:
1. torchvision, torchaudio, torchcodec, decord, whose wheels are CUDA's: modules of empty classes.
2. Three copies between device and host pages, which are CUDA kernels: the same in torch.
3. Pinning of host memory: there is no device to pin it for.
4. In SGLang 0.5.23 the ``torch_native`` attention writes sliding layers at translated places and
   reads them at untranslated ones: reads are translated too.
Python imports this module by itself where its directory is on the path.
"""

import importlib.abc
import importlib.machinery
import inspect
import sys
import types

from transformers import AutoImageProcessor, AutoProcessor
from transformers.utils import import_utils

ABSENT = ("torchvision", "torchaudio", "torchcodec", "decord")
POOLS = ("sglang.srt.mem_cache.pool_host.", "sglang.srt.mem_cache.memory_pool_host")
ATTENTION = "sglang.srt.layers.attention.torch_native_backend"


class Empty(type):
    """A class whose every attribute is another."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty(name, (), {})

    def __call__(cls, *given, **named):
        return given[0] if given and callable(given[0]) else super().__call__()

    def __or__(cls, other):
        return cls

    def __iter__(cls):
        return iter(())


class EmptyModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty(name, (), {})


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that are not there, and whatever is imported from them."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        made = EmptyModule(spec.name)
        made.__path__ = []
        made.__version__ = "0"
        return made

    def exec_module(self, module):
        """There is nothing in it."""


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices].view(-1, *target.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """Layers of rows to pages of layers."""
    layers = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices.view(-1, page_size)[:, 0] // page_size
    for buffer, target in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[buffer * layers + layer][src_indices]
            target[pages, layer] = rows.reshape(-1, *target.shape[2:])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size
):
    """One layer of pages to rows."""
    pages = src_indices.view(-1, page_size)[:, 0] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].reshape(-1, *target.shape[1:])


COPIES = {
    one.__name__: one
    for one in (
        transfer_kv_direct,
        transfer_kv_all_layer_direct_lf_pf,
        transfer_kv_per_layer_direct_pf_lf,
    )
}


PINNING = ("_cuda_host_register", "_cuda_host_unregister")


def nothing(*_, **__):
    """There is no device."""


def unpinned(cls):
    cls.pin_memory = property(lambda self: False, lambda self, value: None)


def read_where_written(cls):
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(cls, name, translated(vars(cls)[name]))


def translated(forward):
    signature = inspect.signature(forward)

    def call(self, *given, **named):
        bound = signature.bind(self, *given, **named)
        window = bound.arguments.get("sliding_window_size")
        if self.use_sliding_window_kv_pool and window is not None and window > -1:
            pool = self.token_to_kv_pool
            table = bound.arguments["req_to_token"]
            last = pool.full_to_swa_index_mapping.numel() - 1
            places = pool.translate_loc_from_full_to_swa(table.flatten().clamp(0, last))
            bound.arguments["req_to_token"] = places.view_as(table)
        return forward(*bound.args, **bound.kwargs)

    return call


class Amended(importlib.abc.MetaPathFinder):
    """SGLang's own modules, with what they lack."""

    def find_spec(self, name, path=None, target=None):
        if not name.startswith(POOLS) and name != ATTENTION:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            vars(module).update(COPIES)
            run(module)
            for copy, made in COPIES.items():
                if vars(module).get(copy) is None:
                    setattr(module, copy, made)
            amend(module)

        spec.loader.exec_module = exec_module
        return spec


def amend(module):
    names = vars(module)
    match module.__name__.rpartition(".")[2]:
        case "common":
            names.update(dict.fromkeys(PINNING, nothing))
        case "base":
            unpinned(names["HostKVCache"])
        case "mamba":
            unpinned(names["MambaPoolHost"])
        case "torch_native_backend":
            read_where_written(names["TorchNativeAttnBackend"])


# transformers keeps what it has seen: it must see that there is none, before the stand-ins come.
for absent in (*ABSENT, "torchvision_v2"):
    if (known := vars(import_utils).get(f"is_{absent}_available")) is not None:
        known()
assert AutoImageProcessor is not None
assert AutoProcessor is not None
sys.meta_path[:0] = [Absent(), Amended()]
