"""Decode attention the plain way: one request after the other, each its own gather and SDPA.

The yardstick for ragged batches: it pads nothing, whatever the lengths. Everything but the
attention of decoding rows is the engine's. Owns nothing.
"""

from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from transformers import AttentionInterface

from stratakv.core.ids import LayerId
from stratakv.engine.attention import STEP, PagedStep, paged_attention
from stratakv.engine.model import HuggingFaceModel
from stratakv.engine.paged_layer import LayerPages, Scoring
from stratakv.engine.step_meta import DecodeBucket

PER_REQUEST: Final = "stratakv_bench_per_request"


def use_per_request_attention(model: HuggingFaceModel) -> None:
    """From here on, steps that only decode attend request by request."""
    model.module.set_attn_implementation(PER_REQUEST)


_Spans = list[tuple[torch.Tensor, slice]]


class _PerRequestAttention:
    """Keeps the spans of the step at hand: worked out once a step, not once a layer."""

    def __init__(self) -> None:
        self._step: PagedStep | None = None
        self._spans: dict[int, _Spans] = {}

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        """Hugging Face's attention interface; shapes as ``attention.paged_attention`` has them."""
        step = kwargs[STEP]
        assert isinstance(step, PagedStep)
        layer = step.layers[LayerId(module.layer_idx)]  # pyright: ignore[reportArgumentType]
        assert isinstance(layer, LayerPages), "the loop knows keys and values only"
        group = step.groups[layer.group]
        if group.chunks:
            return paged_attention(module, query, key, value, attention_mask, **kwargs)
        if self._step is not step:
            self._step, self._spans = step, {}
        scoring = Scoring.of(kwargs, query.shape[-1])
        rows = query[0].transpose(0, 1)
        out = query.new_empty(rows.shape[0], rows.shape[1], layer.value_dim)
        for bucket in group.buckets:
            places = range(bucket.count) if bucket.tokens is None else bucket.tokens.tolist()
            for row, seen in zip(places, self._of(bucket), strict=True):
                out[row] = _attend_one(rows[row], layer, seen, scoring)
        return out[None], None

    def _of(self, bucket: DecodeBucket) -> _Spans:
        found = self._spans.get(id(bucket))
        if found is None:
            found = self._spans[id(bucket)] = _cut(bucket)
        return found


AttentionInterface.register(PER_REQUEST, _PerRequestAttention())  # pyright: ignore[reportArgumentType]


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
