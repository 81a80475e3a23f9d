"""Rotary positions over a part of a head.

Owns the rotation, in both conventions for which elements form a pair. Must not compute a scaling of
its own: the frequencies are Hugging Face's.
"""

from dataclasses import dataclass
from typing import Final

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from stratakv.core.errors import ConfigError

_STATIC: Final = ("linear", "yarn", "llama3")
"""Scalings whose frequencies do not depend on how long a sequence has become. With the others a
cached key would change its meaning as its request grows."""


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Cosines and sines of T tokens, [T, dim / 2] each.

    Either way the result holds the pairs' first elements, then their second ones, as Hugging Face
    leaves them. ``x``: [T, ..., dim].
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def pairs(self, x: torch.Tensor) -> torch.Tensor:
        """Elements 0 and 1 are a pair, then 2 and 3."""
        return self._turn(x[..., 0::2], x[..., 1::2])

    def halves(self, x: torch.Tensor) -> torch.Tensor:
        """Element i of the first half and element i of the second are a pair."""
        first, second = x.chunk(2, -1)
        return self._turn(first, second)

    def tail(self, x: torch.Tensor) -> torch.Tensor:
        """The last dim elements of each row as ``pairs``, but left where they were; [T, ..., n]."""
        size = 2 * self.cos.shape[-1]
        kept, turned = x.split([x.shape[-1] - size, size], -1)
        wide = turned.float()
        first, second = self._turn(wide[..., 0::2], wide[..., 1::2]).chunk(2, -1)
        return torch.cat((kept, torch.stack((first, second), -1).flatten(-2).to(x.dtype)), -1)

    @property
    def inverse(self) -> "Rotation":
        """Turns back what this turned."""
        return Rotation(self.cos, -self.sin)

    def _turn(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        shape = (first.shape[0], *[1] * (first.dim() - 2), first.shape[-1])
        cos, sin = self.cos.view(shape), self.sin.view(shape)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """inverse: radians per token of each pair, float32 [dim / 2]. scale: of cosine and sine."""

    inverse: torch.Tensor
    scale: float

    @classmethod
    def of(cls, config: PretrainedConfig, layer_type: str | None = None) -> "Rope":
        """``layer_type``: which of ``rope_parameters``, where they differ by it. The rotated part
        is ``config.head_dim`` elements times ``partial_rotary_factor``. ConfigError for a scaling
        that changes with the length of the sequence."""
        fields = config.to_dict()
        rope = fields["rope_parameters"]
        rope = rope if layer_type is None else rope[layer_type]
        kind = rope.get("rope_type", "default")
        if kind == "default":
            dim = int(fields["head_dim"] * rope.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
            return cls(1.0 / rope["rope_theta"] ** exponents, 1.0)
        if kind not in _STATIC:
            raise ConfigError(
                f"model type {config.model_type!r}: rope_type must be default or one of "
                f"{', '.join(_STATIC)}, got {kind!r}"
            )
        inverse, scale = ROPE_INIT_FUNCTIONS[kind](config, layer_type=layer_type)
        return cls(inverse, float(scale))

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """positions: int64 [T]."""
        angles = positions[:, None].float() * self.inverse.to(positions.device)
        return Rotation(
            (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)
        )
