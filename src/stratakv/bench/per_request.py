"""Decode attention the plain way: one request after the other, each its own gather and SDPA.

The yardstick for ragged batches: it pads nothing, whatever the lengths. Everything but the
attention of decoding rows is the engine's. Owns nothing.
"""

from dataclasses import replace
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it

from stratakv.assembly.device import CPU
from stratakv.engine.attention.dense_kernels import DenseAttention, DenseKernels
from stratakv.engine.attention.paged_layer import LayerPages, Scoring, Scratch
from stratakv.engine.attention.step_meta import DecodeBucket, GroupStep
from stratakv.engine.huggingface.model import HuggingFaceModel

_Spans = list[tuple[torch.Tensor, slice]]


class PerRequestKernels(DenseKernels):
    def _attention(self, step: GroupStep, page_tokens: int, scratch: Scratch) -> DenseAttention:
        return _PerRequest(step, page_tokens, scratch)


def per_request_kernels(model: HuggingFaceModel) -> PerRequestKernels:
    return PerRequestKernels(model.device, model.module.dtype)


PER_REQUEST: Final = replace(CPU, kernels=per_request_kernels)
"""The device of an engine that decodes request by request."""


class _PerRequest(DenseAttention):
    """Spans are worked out once a step, not once a layer."""

    def __init__(self, step: GroupStep, page_tokens: int, scratch: Scratch) -> None:
        super().__init__(step, page_tokens, scratch)
        self._spans = [_cut(bucket) for bucket in step.buckets]

    def attend_pages(
        self, at: int, query: torch.Tensor, layer: LayerPages, scoring: Scoring
    ) -> torch.Tensor:
        rows = [
            _attend_one(row, layer, seen, scoring)
            for row, seen in zip(query, self._spans[at], strict=True)
        ]
        return torch.stack(rows)


def _cut(bucket: DecodeBucket) -> _Spans:
    """Each row's own pages, and the tokens in them that it sees."""
    pages = bucket.pages.view(bucket.count, bucket.width)
    if bucket.mask is None:
        return [(row, bucket.keys) for row in pages]
    visible = bucket.mask[:, 0, 0] == 0
    size = visible.shape[1] // bucket.width
    first = visible.int().argmax(1).tolist()
    counts = visible.sum(1).tolist()
    return [
        (row[: -(-(start + count) // size)], slice(start, start + count))
        for row, start, count in zip(pages, first, counts, strict=True)
    ]


def _attend_one(
    query: torch.Tensor, layer: LayerPages, seen: tuple[torch.Tensor, slice], scoring: Scoring
) -> torch.Tensor:
    """query [H, D] -> [H, value dim]."""
    pages, span = seen
    keys = layer.key_pages[pages].view(-1, layer.heads, layer.key_dim)[span].transpose(0, 1)
    values = layer.value_pages[pages].view(-1, layer.heads, layer.value_dim)[span].transpose(0, 1)
    grouped = query.view(layer.heads, -1, query.shape[-1])
    if scoring.plain:
        out = F.scaled_dot_product_attention(grouped, keys, values, scale=scoring.scale)
    else:
        scores = (grouped * scoring.scale) @ keys.transpose(1, 2)
        out = scoring.weights(scores, None, (layer.heads, -1, 1)) @ values
    return out.reshape(len(query), layer.value_dim)
