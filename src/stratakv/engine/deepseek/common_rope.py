"""Rotary positions over a part of a head.

Owns the rotation, in both conventions for which elements form a pair, and which scalings there are.
Must not compute a scaling of its own: the frequencies are Hugging Face's.
"""

from dataclasses import dataclass
from typing import Final

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from stratakv.engine.deepseek.common_config import number
from stratakv.spec.model_config import ModelConfig

_STATIC: Final = ("default", "linear", "yarn", "llama3")
"""Scalings whose frequencies do not depend on how long a sequence has become. With the others a
cached key would change its meaning as its request grows."""


def rotated_dim(config: ModelConfig, rope: ModelConfig) -> int:
    """How many elements of a head turn by ``rope``, a part of ``config``'s ``rope_parameters``.
    ConfigError for a scaling that changes with the length of the sequence, and for a part of a head
    that is not made of pairs. That no number of a scaling is missing, Hugging Face has checked."""
    named = ModelConfig({"rope_type": "default", **rope.fields, "model_type": config.model_type})
    kind = named.text("rope_type")
    if kind not in _STATIC:
        raise named.fault("rope_type", f"one of {', '.join(_STATIC)}")
    share = number(named, "partial_rotary_factor") if named.has("partial_rotary_factor") else 1.0
    head_dim = config.integer("head_dim")
    dim = int(head_dim * share)
    if not 0 < dim <= head_dim or dim % 2:
        raise config.fault("head_dim", f"of an even number of rotated elements, not of {dim}")
    return dim


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
        is ``config.head_dim`` elements times ``partial_rotary_factor``. ``rotated_dim`` says which
        configurations there are."""
        fields = config.to_dict()
        rope = fields["rope_parameters"]
        rope = rope if layer_type is None else rope[layer_type]
        kind = rope.get("rope_type", "default")
        if kind == "default":
            dim = int(fields["head_dim"] * rope.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
            return cls(1.0 / rope["rope_theta"] ** exponents, 1.0)
        assert kind in _STATIC, f"rope_type {kind!r} was not refused"
        inverse, scale = ROPE_INIT_FUNCTIONS[kind](config, layer_type=layer_type)
        return cls(inverse, float(scale))

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """positions: int64 [T]."""
        angles = positions[:, None].float() * self.inverse.to(positions.device)
        return Rotation(
            (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)
        )
