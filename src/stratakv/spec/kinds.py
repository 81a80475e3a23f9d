"""What one layer keeps, per kind of attention: plain data, no decisions.

Owns the shapes of rows. Must not read a model's configuration (``families``), nor put layers
together (``derive``). Shapes are those that Hugging Face's layers write.
"""

from dataclasses import dataclass
from math import prod
from typing import Final

from stratakv.core.errors import ConfigError
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepLive, KeepWindow, Retention

KEY: Final = "k"
VALUE: Final = "v"
LATENT: Final = "latent"
INDEX_KEY: Final = "index_k"
BOUNDS: Final = "bounds"
"""Of the keys of each page, with the number of pages that a query sees: ``bounds16``."""
CONV: Final = "conv"
RECURRENT: Final = "recurrent"

STATE_DTYPE: Final = "float32"
"""Hugging Face accumulates every recurrent state in float32, whatever the model's dtype."""


@dataclass(frozen=True, slots=True)
class PageFormat:
    """``tokens`` per page, and the dtype of the model's activations."""

    tokens: int
    dtype: str

    def rows(self, tokens_per_row: int) -> int:
        """Rows of one page where one row stands for several tokens."""
        if self.tokens % tokens_per_row:
            raise ConfigError(
                f"--page-tokens {self.tokens}: this model compresses {tokens_per_row} tokens to "
                f"one row, allowed are multiples of {tokens_per_row}"
            )
        return self.tokens // tokens_per_row


@dataclass(frozen=True, slots=True)
class LayerBuffer:
    """One layer's share of one buffer, under one retention rule."""

    retention: Retention
    name: str
    rows_per_page: int
    row_shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if prod(self.row_shape) < 1:
            raise ConfigError(
                f"MODEL: buffer {self.name}: a row of shape {self.row_shape} has no bytes; "
                "allowed are sizes from 1 up"
            )


def key_value(
    rule: Retention, page: PageFormat, *, heads: int, head_dim: int, value_dim: int | None = None
) -> tuple[LayerBuffer, ...]:
    """Multi-head, grouped and multi-query attention: a key and a value per head and token."""
    value_shape = (heads, head_dim if value_dim is None else value_dim)
    return (
        LayerBuffer(rule, KEY, page.tokens, (heads, head_dim), page.dtype),
        LayerBuffer(rule, VALUE, page.tokens, value_shape, page.dtype),
    )


def latent(rule: Retention, page: PageFormat, *, rank: int, rope_dim: int) -> LayerBuffer:
    """Multi-head latent attention: one row of the compressed latent, then the rotary key.

    Hugging Face caches the two parts as "keys" [1, rank] and "values" [1, rope_dim].
    """
    return LayerBuffer(rule, LATENT, page.tokens, (rank + rope_dim,), page.dtype)


def index_keys(page: PageFormat, *, dim: int) -> LayerBuffer:
    """Sparse attention's indexer scores every token of the prefix against these keys."""
    return LayerBuffer(KeepAll(), INDEX_KEY, page.tokens, (dim,), page.dtype)


def state(
    page: PageFormat, *, conv: tuple[int, int], recurrent: tuple[int, ...] | None
) -> tuple[LayerBuffer, ...]:
    """Mamba and linear attention: one snapshot per page boundary.

    conv: [channels, kernel width], the last inputs of the causal convolution. recurrent: the
    accumulated state, or None where the layer is a convolution only.
    """
    rule = KeepBoundary()
    buffers = (LayerBuffer(rule, CONV, 1, conv, page.dtype),)
    if recurrent is None:
        return buffers
    return (*buffers, LayerBuffer(rule, RECURRENT, 1, recurrent, STATE_DTYPE))


def shared_latent_window(page: PageFormat, *, window: int, dim: int) -> LayerBuffer:
    """DeepSeek-V4's local branch: one vector per token that is key and value at once."""
    return LayerBuffer(KeepWindow(window), LATENT, page.tokens, (dim,), page.dtype)


def compressed(page: PageFormat, *, name: str, ratio: int, dim: int) -> LayerBuffer:
    """DeepSeek-V4: one entry of ``dim`` for every closed block of ``ratio`` tokens."""
    return LayerBuffer(KeepAll(), name, page.rows(ratio), (dim,), page.dtype)


def open_block(page: PageFormat, *, name: str, ratio: int, dim: int) -> LayerBuffer:
    """DeepSeek-V4: the block that is still filling, as [value and gate, token, dim].

    It is empty at every page boundary, since a page is a whole number of blocks.
    """
    page.rows(ratio)
    return LayerBuffer(KeepLive(), name, 1, (2, ratio, dim), page.dtype)


def overlap(page: PageFormat, *, name: str, window: int, ratio: int, dim: int) -> LayerBuffer:
    """DeepSeek-V4: the last closed block's part in the next entry, as [value and gate, token, dim].

    One row per page: the state at the page's end. It rides with the window pages, because
    continuing needs both together and never one alone.
    """
    return LayerBuffer(KeepWindow(window), name, 1, (2, ratio, dim), page.dtype)
