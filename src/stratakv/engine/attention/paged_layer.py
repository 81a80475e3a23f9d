"""What attention kernels work with: one layer's pages, how it scores, memory to gather into.

Owns the weights' arithmetic (softcap, mask, sinks, softmax). Must not know batches or groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch

from stratakv.core.ids import GroupId, LayerId


@dataclass(frozen=True, slots=True, eq=False)
class KeyBounds:
    """Of the keys of each page of a layer the least and the greatest of every element, [pages, 2,
    heads, dim]; they share memory with the pools."""

    layer: LayerId
    rows: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerPages:
    """One layer's keys and values, [pages, P, heads, dim] each; they share memory with the pools.
    The same again by row, [pages * P, heads * dim], and by page, [pages, P * heads * dim].
    ``bounds``: where queries see selected pages alone."""

    group: GroupId
    heads: int
    key_dim: int
    value_dim: int
    key_rows: torch.Tensor
    value_rows: torch.Tensor
    key_pages: torch.Tensor
    value_pages: torch.Tensor
    bounds: KeyBounds | None = None

    @classmethod
    def of(
        cls,
        group: GroupId,
        keys: torch.Tensor,
        values: torch.Tensor,
        bounds: KeyBounds | None = None,
    ) -> "LayerPages":
        pages, size, heads, key_dim = keys.shape
        assert values.shape[:3] == keys.shape[:3], f"{tuple(keys.shape)}, {tuple(values.shape)}"
        rows = pages * size
        return cls(
            group=group,
            heads=heads,
            key_dim=key_dim,
            value_dim=values.shape[3],
            key_rows=keys.view(rows, -1),
            value_rows=values.view(rows, -1),
            key_pages=keys.view(pages, -1),
            value_pages=values.view(pages, -1),
            bounds=bounds,
        )


@dataclass(frozen=True, slots=True, eq=False)
class LatentPages:
    """One layer's latents (MLA), each with its rotary key behind; they share memory with the pools.
    By row, [pages * P, dim], and by page, [pages, P * dim]."""

    group: GroupId
    dim: int
    rows: torch.Tensor
    pages: torch.Tensor

    @classmethod
    def of(cls, group: GroupId, latents: torch.Tensor) -> "LatentPages":
        """latents: [pages, P, dim]."""
        dim = latents.shape[-1]
        return cls(group, dim, latents.view(-1, dim), latents.view(len(latents), -1))


class Scratch:
    """Memory that gathers land in, kept between layers and steps: fresh megabytes would be page
    faults each time. What a name holds is dead as soon as its next gather begins."""

    def __init__(self) -> None:
        self._flat: dict[str, torch.Tensor] = {}

    def gather(self, name: str, pages: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """pages [n, elements], index int64 [m] -> [m, elements], valid until the next call."""
        shape = (len(index), pages.shape[1])
        size = shape[0] * shape[1]
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size or flat.dtype != pages.dtype:
            flat = self._flat[name] = pages.new_empty(size + size // 4)
        return torch.index_select(pages, 0, index, out=flat[:size].view(shape))


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How a layer turns dot products into weights, as its Hugging Face module asks for it.
    ``sinks`` [query heads]: a logit per head that takes weight and gives no value."""

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None

    @classmethod
    def of(cls, kwargs: Mapping[str, object], key_dim: int) -> "Scoring":
        """From the keyword arguments of Hugging Face's attention interface."""
        scale = cast("float | None", kwargs.get("scaling"))
        return cls(
            scale=key_dim**-0.5 if scale is None else scale,
            softcap=cast("float | None", kwargs.get("softcap")),
            sinks=cast("torch.Tensor | None", kwargs.get("s_aux")),
        )

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None

    def weights(
        self, scores: torch.Tensor, mask: torch.Tensor | None, heads: tuple[int, ...]
    ) -> torch.Tensor:
        """Softmax over the last dim of scaled dot products, in float32.

        scores: may change, but stay finite. mask: broadcasts to scores. heads: shape in which sinks
        broadcast to scores, say (H, 1, 1).
        """
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if mask is not None:
            scores = scores + mask
        if self.sinks is None:
            return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        sinks = self.sinks.view(heads).expand(*scores.shape[:-1], 1).to(scores.dtype)
        weights = torch.cat((scores, sinks), -1).softmax(-1, dtype=torch.float32)
        return weights[..., :-1].to(scores.dtype)
