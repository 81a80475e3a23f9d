"""Attention over paged keys and values, in place of Hugging Face's.

Registered as ``ATTENTION``; a model whose config names it calls ``paged_attention`` with the step's
``PagedStep`` among its keyword arguments. Owns the way from Hugging Face's interface to the kernels
(``kernels``). Must not decide what is visible (``step_meta``), nor write keys or values
(``hf_cache``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias, assert_never

import torch
from transformers import AttentionInterface

from stratakv.core.ids import GroupId, LayerId
from stratakv.engine.attention.kernels import (
    AttentionKernels,
    Context,
    Expanded,
    GroupAttention,
    Paged,
)
from stratakv.engine.attention.paged_layer import LatentPages, LayerPages, Scoring
from stratakv.transfer.engine import LayerGate

ATTENTION: Final = "stratakv_paged"
STEP: Final = "stratakv_step"
"""Keyword under which a forward passes its ``PagedStep`` to every layer."""

TokenPages: TypeAlias = LayerPages | LatentPages
"""What a layer of attention keeps of every token."""


class Cursor:
    """The layer whose keys were written last. A module that several layers call (Zamba 2) does not
    know for which of them it runs; it attends right after it has written."""

    def __init__(self) -> None:
        self.layer: LayerId | None = None

    def move(self, layer: LayerId) -> None:
        self.layer = layer


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """Everything one forward's layers need; travels as the keyword ``STEP``, so there is no global.

    ``layers`` names the producer's pages for a layer that shares them. ``positions``: of each
    packed token, int64 [T].
    """

    layers: Mapping[LayerId, TokenPages]
    groups: Mapping[GroupId, GroupAttention]
    positions: torch.Tensor
    gate: LayerGate | None
    kernels: AttentionKernels
    cursor: Cursor = field(default_factory=Cursor)

    def layer_of(self, module: torch.nn.Module) -> LayerId:
        """For which layer an attention module runs; one that several share has the index -1, in the
        first Zamba none."""
        index: int | None = module.layer_idx  # pyright: ignore[reportAssignmentType]
        if index is not None and index >= 0:
            return LayerId(index)
        assert self.cursor.layer is not None, "a shared module attends before it has written"
        return self.cursor.layer


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Hugging Face's attention interface, over pages that ``PagedCache.update`` has just written.

    query: [1, H, T, D], or the equal chunks of n requests, [n, H, T / n, D]. key, value: what
    ``update`` returned; latents come expanded. ``attention_mask`` and ``sliding_window`` are
    ignored: the cache group's rule says what is visible; ``scaling``, ``softcap`` and ``s_aux``
    (sinks) are honoured. Returns [1, T, H, value dim], or [n, T / n, H, value dim].
    """
    del attention_mask
    step = kwargs.get(STEP)
    assert isinstance(step, PagedStep), "the model ran outside of a ModelRunner"
    layer = step.layers[step.layer_of(module)]
    group = step.groups[layer.group]
    context = _context(layer, _packed(key), _packed(value))
    scoring = Scoring.of(kwargs, query.shape[-1])
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    packed = _packed(query).transpose(0, 1)
    decodes = group.decodes
    if decodes == len(packed):
        return group.decode(packed, context, scoring).view(shape), None
    out = group.prefill(packed[decodes:], context, scoring)
    if decodes:
        out = torch.cat((group.decode(packed[:decodes], context, scoring), out))
    return out.view(shape), None


def _context(layer: TokenPages, keys: torch.Tensor, values: torch.Tensor) -> Context:
    """keys, values: [heads, tokens, dim], what ``update`` returned; of latents, expanded."""
    match layer:
        case LayerPages():
            return Paged(layer, keys, values)
        case LatentPages():
            return Expanded(keys, values)
        case _:
            assert_never(layer)


def _packed(rows: torch.Tensor) -> torch.Tensor:
    """[n, heads, T, dim] -> [heads, n * T, dim]; a view where n or T is 1."""
    return rows.transpose(0, 1).flatten(1, 2)


AttentionInterface.register(ATTENTION, paged_attention)  # pyright: ignore[reportArgumentType]
