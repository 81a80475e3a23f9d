"""What the oracles are made of: norms, a softmax, the tie rule, rotations, a view of a checkpoint.

Owns these few formulas in float64, how an oracle is asked and compared with, and how a mistake is
put into one. Must not know a model.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Config = Any
"""Whatever has the fields of a checkpoint's ``config.json``."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint's tensors by their names there, seen from one of its modules."""

    tensors: Mapping[str, Array]
    module: str = ""

    def of(self, name: str) -> "Weights":
        return Weights(self.tensors, f"{self.module}{name}.")

    def __getitem__(self, name: str) -> Array:
        return self.tensors[self.module + name]

    def project(self, name: str, x: Array) -> Array:
        """x [..., in] -> [..., out]."""
        y = x @ self[f"{name}.weight"].T
        bias = f"{self.module}{name}.bias"
        return y + self.tensors[bias] if bias in self.tensors else y


def rms_norm(x: Array, eps: float) -> Array:
    """Over the last axis, without a gain."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array, axis: int) -> Array:
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def highest(scores: Array, k: int) -> Ints:
    """Where the k best of n scores are, all if n <= k: among equals the lowest index wins."""
    return np.sort(np.argsort(-scores, kind="stable")[:k])


def turn(real: Array, imaginary: Array, angles: Array) -> tuple[Array, Array]:
    """Pairs of channels as complex numbers, each turned by its angle."""
    turned = (real + 1j * imaginary) * np.exp(1j * angles)
    return turned.real, turned.imag


def frequencies(rope: Mapping[str, Any], dim: int) -> Array:
    """Angle per position of each pair of ``dim`` channels; rope: one entry of the configuration."""
    base = rope["rope_theta"]
    plain = base ** (-np.arange(0, dim, 2) / dim)
    if rope["rope_type"] == "default":
        return plain
    assert rope["rope_type"] == "yarn"

    def pair_of(full_turns: float) -> float:
        """The pair that makes so many full turns over the original context."""
        length = rope["original_max_position_embeddings"] / (2 * math.pi * full_turns)
        return dim * math.log(length) / (2 * math.log(base))

    # Fast pairs stay, slow ones are slowed down by the factor, those between in proportion.
    low = max(math.floor(pair_of(rope["beta_fast"])), 0)
    high = min(math.ceil(pair_of(rope["beta_slow"])), dim - 1)
    slowed = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return plain * (1 - slowed) + plain / rope["factor"] * slowed


def last_among_equals(scores: Array, k: int) -> Ints:
    """``highest`` with the tie rule turned round."""
    return np.sort(len(scores) - 1 - highest(scores[::-1], k))


def expected(oracle: ModuleType, module: Any, tokens: npt.ArrayLike) -> Array:
    """What the oracle says of Hugging Face's module: logits at every position, [T, vocab]."""
    tensors = {name: tensor.double().numpy() for name, tensor in module.state_dict().items()}
    return oracle.forward(tensors, module.config, np.asarray(tokens))


def distance(mine: npt.ArrayLike, formula: Array) -> float:
    """The largest difference relative to the largest logit. AssertionError for what is not
    finite."""
    mine = np.asarray(mine, np.float64)
    assert np.isfinite(mine).all()
    assert np.isfinite(formula).all()
    return float(np.abs(mine - formula).max() / np.abs(formula).max())


def mistaken(oracle: ModuleType, right: str, wrong: str) -> ModuleType:
    """A copy of the oracle with a few characters of its source replaced."""
    source = inspect.getsource(oracle)
    assert source.count(right) == 1, right
    copy = ModuleType("mistaken")
    exec(compile(source.replace(right, wrong), "mistaken", "exec"), vars(copy))
    return copy
