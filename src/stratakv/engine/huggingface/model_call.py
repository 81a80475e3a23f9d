"""One call of a Hugging Face module on the paged pools, of tensors that lie on its device.

Owns what a call is given and what it returns. All of it is the device's: no number of a tensor is
looked at, so that a call may be recorded once and replayed. Must not plan a step (``runner``), nor
know batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch

from stratakv.core.ids import GroupId, LayerId
from stratakv.engine.attention.kernels import AttentionKernels, GroupAttention
from stratakv.engine.attention.paged_layer import Scratch
from stratakv.engine.huggingface.attention import STEP, PagedStep, TokenPages
from stratakv.engine.huggingface.hf_cache import PagedCache
from stratakv.engine.huggingface.last_hidden import LastHidden
from stratakv.engine.huggingface.model import HuggingFaceModel
from stratakv.engine.huggingface.state_layer import OpenStates, StatePages, StateRows
from stratakv.transfer.engine import LayerGate


@dataclass(frozen=True, slots=True, eq=False)
class CallInputs:
    """tokens, positions: packed, [T]. kept: places whose logits are wanted, int64, in a column of
    ``height`` rows of T / height tokens each. groups, states: where each group's layers read and
    write."""

    tokens: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor
    height: int
    groups: Mapping[GroupId, GroupAttention]
    states: Mapping[GroupId, StateRows]


@dataclass(frozen=True, slots=True, eq=False)
class CallOutputs:
    """logits: [height * kept, vocab] in the model's own dtype. hidden: [T, ...], of every token,
    after the last layer."""

    logits: torch.Tensor
    hidden: torch.Tensor


class ModelCall:
    """``model``, with the pages of its layers."""

    def __init__(
        self,
        model: HuggingFaceModel,
        tokens: Mapping[LayerId, TokenPages],
        states: Mapping[LayerId, StatePages],
        kernels: AttentionKernels,
    ) -> None:
        self.device = model.device
        self._module = model.module
        self._hidden = LastHidden(model.module)
        self._cache_keyword = model.cache_keyword
        self._layers, self._states, self._kernels = tokens, states, kernels

    def __call__(
        self, inputs: CallInputs, scratch: Scratch, gate: LayerGate | None = None
    ) -> CallOutputs:
        """``scratch``: that states are gathered into. Each layer waits at ``gate``."""
        step = PagedStep(
            layers=self._layers,
            groups=inputs.groups,
            positions=inputs.positions,
            gate=gate,
            kernels=self._kernels,
        )
        states = OpenStates(self._states, inputs.states, gate, scratch)
        with self._hidden.kept():
            logits = self._module(
                input_ids=inputs.tokens.view(inputs.height, -1).long(),
                position_ids=inputs.positions.view(inputs.height, -1),
                use_cache=True,
                logits_to_keep=inputs.kept,
                **{self._cache_keyword: PagedCache(step, states), STEP: step},
            ).logits
        states.close()
        found = cast("torch.Tensor", logits).flatten(0, 1)
        return CallOutputs(found, self._hidden.take(len(inputs.positions)))
