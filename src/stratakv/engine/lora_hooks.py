"""Adds adapters to the linear layers of an unmodified model, each to its own tokens.

Owns the hooks on the model and which adapter each token of the running call has. A call without
adapters meets no hook. Must not load anything (``adapters``).
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from stratakv.core.ids import NONE
from stratakv.engine.adapters import Adapter, LoraWeights
from stratakv.engine.batch import Int32s

Hook = Callable[[nn.Module, tuple[Any, ...], torch.Tensor], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """One adapter's tokens of a call. ``tokens``: int64 [n], None: all of them."""

    adapter: int
    tokens: torch.Tensor | None


class Adapters:
    """Several adapters on one module; an adapter is told by its place in ``adapters``."""

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
            some = None if len(mine) == len(tokens) else torch.from_numpy(mine).to(device)
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
