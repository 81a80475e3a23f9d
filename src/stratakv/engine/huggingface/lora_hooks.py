"""Adds adapters to the linear layers of an unmodified model, each to its own tokens.

Owns the hooks on the model, which adapter each token of the running call has, and one small call,
made at start, that finds the layers which see other tokens than the model's call: the whole context
(what expands latents), only the tokens whose logits are wanted (a head), or an expert's share.
Those cannot be adapted; one that is never called PEFT would not adapt either. A call without
adapters meets no hook. Must not load anything (``adapters``).
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel

from stratakv.core.ids import NONE
from stratakv.engine.batch import Int32s
from stratakv.engine.huggingface.adapters import Adapter, LoraWeights
from stratakv.engine.tensors import on_device

Hook = Callable[[nn.Module, tuple[Any, ...], torch.Tensor], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """One adapter's tokens of a call. ``tokens``: int64 [n], None: all of them."""

    adapter: int
    tokens: torch.Tensor | None


class Adapters:
    """Several adapters on one module; an adapter is named by its place in ``adapters``."""

    def __init__(self, module: nn.Module, adapters: Sequence[Adapter]) -> None:
        self.digests: Final[Mapping[str, bytes]] = {a.name: a.digest for a in adapters}
        self._layers: dict[str, list[LoraWeights | None]] = {
            path: [a.weights.get(path) for a in adapters]
            for path in sorted({path for a in adapters for path in a.weights})
        }
        self._module = module
        self._handles: list[RemovableHandle] = []
        self._total = 0
        self._shares: tuple[_Share, ...] = ()

    @contextmanager
    def applied(self, tokens: Int32s | None) -> Generator[None]:
        """Within the block, a call of the module adapts its tokens.

        ``tokens``: the adapter of each token, or NONE, int32 [T] in the order in which the input
        ids lie in memory, whatever their shape; None if no token has one.
        """
        shares = () if tokens is None else self._split(tokens)
        if bool(shares) != bool(self._handles):
            self._hook() if shares else self._unhook()
        self._total = 0 if tokens is None else len(tokens)
        self._shares = shares
        try:
            yield
        finally:
            self._shares = ()

    def _split(self, tokens: Int32s) -> tuple[_Share, ...]:
        device = next(self._module.parameters()).device
        shares: list[_Share] = []
        for adapter in np.unique(tokens).tolist():
            if adapter == NONE:
                continue
            mine = np.flatnonzero(tokens == adapter)
            some = None if len(mine) == len(tokens) else on_device(mine, device)
            shares.append(_Share(adapter, some))
        return tuple(shares)

    def _hook(self) -> None:
        for path, weights in self._layers.items():
            module = self._module.get_submodule(path)
            self._handles.append(module.register_forward_hook(self._added(weights)))

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _added(self, weights: Sequence[LoraWeights | None]) -> Hook:
        """A hook that writes into the layer's output: nothing else holds it yet."""

        def add(_module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            if not self._shares:
                return
            states = inputs[0].reshape(-1, inputs[0].shape[-1])
            sums = output.view(-1, output.shape[-1])
            assert len(states) == self._total, "a layer sees other tokens than the model"
            for share in self._shares:
                found = weights[share.adapter]
                if found is None:
                    continue
                if share.tokens is None:
                    sums.add_(states @ found.down.T @ found.up.T, alpha=found.scale)
                else:
                    product = states[share.tokens] @ found.down.T @ found.up.T
                    sums.index_add_(0, share.tokens, product, alpha=found.scale)

        return add


Watch = Callable[[nn.Module, tuple[torch.Tensor, ...]], None]

BEFORE: Final = 2
NOW: Final = 3
"""Tokens of the call that is watched; ``BEFORE`` are in the cache by then, one gives logits."""


@torch.inference_mode()
def unfit(model: PreTrainedModel, cache_keyword: str, paths: Collection[str]) -> Sequence[str]:
    """Those of ``paths`` in ``model`` that cannot be adapted. ``cache_keyword``: of its forward.

    The model runs with Hugging Face's own attention and cache, and is left as it was.
    """
    seen: defaultdict[str, list[int]] = defaultdict(list)
    handles = [
        model.get_submodule(path).register_forward_pre_hook(_watch(seen[path]))
        for path in sorted(paths)
    ]
    attention = str(model.config._attn_implementation)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    model.set_attn_implementation("eager")
    try:
        cache = DynamicCache(config=model.config)
        for start, count in ((0, BEFORE), (BEFORE, NOW)):
            for rows in seen.values():
                rows.clear()
            _call(model, {cache_keyword: cache}, start, count)
    finally:
        model.set_attn_implementation(attention)
        for handle in handles:
            handle.remove()
    return [path for path, rows in seen.items() if set(rows) - {NOW}]


def _watch(rows: list[int]) -> Watch:
    def note(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        rows.append(inputs[0].shape[:-1].numel())

    return note


def _call(model: PreTrainedModel, cache: dict[str, Any], start: int, count: int) -> None:
    positions = torch.arange(start, start + count, device=model.device)[None]
    takes = inspect.signature(model.forward).parameters
    positions_of = {"position_ids": positions} if "position_ids" in takes else {}
    # As the runner asks for logits: given by number, Gemma 4 leaves tokens out of its last layers.
    last = torch.tensor([count - 1], device=model.device)
    ids = torch.zeros_like(positions)
    model(input_ids=ids, use_cache=True, logits_to_keep=last, **cache, **positions_of)
