"""Sees a model's last hidden states, of every token of a call, on their way to its output layer.

Owns the hook; outside a call there is none. Must not change anything.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


class LastHidden:
    """``module``: a causal LM; its decoder is what stands before its output layer."""

    def __init__(self, module: PreTrainedModel) -> None:
        base = module.base_model
        if base is module:  # Llama 4 names a part that it has not got
            base = module.get_submodule("model")
        assert isinstance(base, PreTrainedModel), type(base).__name__
        self._trunk: nn.Module = base.get_decoder()
        self._seen: torch.Tensor | None = None

    @contextmanager
    def kept(self) -> Generator[None]:
        """Within the block, a call of the module is watched."""
        handle = self._trunk.register_forward_hook(self._keep)
        try:
            yield
        finally:
            handle.remove()

    def take(self, tokens: int) -> torch.Tensor:
        """[T, hidden] of the call that was watched, in the order of its token ids; given once."""
        seen, self._seen = self._seen, None
        assert seen is not None, "the decoder was not called"
        return seen.reshape(tokens, -1)

    def _keep(
        self, _module: nn.Module, _arguments: tuple[Any, ...], output: Sequence[torch.Tensor]
    ) -> None:
        self._seen = output[0]
