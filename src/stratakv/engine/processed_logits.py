"""Logits as requests want them: biased, penalised, without the tokens that may not come.

Owns the arithmetic, vLLM's in its order: barred tokens, bias, repetition, frequency, presence. All
rows at once, and no table of the vocabulary's size: a penalty is written where its token stands.
"""

import numpy as np
import numpy.typing as npt
import torch

from stratakv.core.ids import NONE
from stratakv.engine.grammars import TokenMasks
from stratakv.engine.logits_processors import Float32s, LogitsProcessors
from stratakv.engine.tensors import on_device


def masked(logits: torch.Tensor, masks: TokenMasks) -> torch.Tensor:
    """A copy of ``logits``, float32 [S, vocab], in which the rows ``masks.at`` have -infinity where
    a token may not come."""
    vocab = logits.shape[1]
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, bitorder="little")[:, :vocab]
    barred = np.ones((len(bits), vocab), np.bool_)
    barred[:, : bits.shape[1]] = bits == 0
    at = on_device(masks.at, logits.device)
    found = logits.clone()
    found[at] = found[at].masked_fill(on_device(barred, logits.device), -torch.inf)
    return found


def processed(logits: torch.Tensor, wanted: LogitsProcessors) -> torch.Tensor:
    """A copy of ``logits``, float32 [S, vocab], in which the rows ``wanted.at`` are changed."""
    at = on_device(wanted.at, logits.device)
    found = logits.clone()
    some = found[at]
    _bar(some, wanted)
    _bias(some, wanted)
    tokens = on_device(wanted.tokens.astype(np.int64), logits.device)
    if (wanted.repetition != 1).any():
        _repetition(some, tokens, wanted.repetition)
    if wanted.frequency.any() or wanted.presence.any():
        _frequency_and_presence(some, tokens, wanted)
    found[at] = some
    return found


def _bar(some: torch.Tensor, wanted: LogitsProcessors) -> None:
    # A model's end-of-sequence token may lie beyond its vocabulary.
    rows, columns = np.nonzero((wanted.barred != NONE) & (wanted.barred < some.shape[1]))
    _put(some, rows, wanted.barred[rows, columns], np.full(len(rows), -np.inf, np.float32))


def _bias(some: torch.Tensor, wanted: LogitsProcessors) -> None:
    rows, columns = np.nonzero(wanted.bias_tokens != NONE)
    values = wanted.bias_values[rows, columns]
    _put(some, rows, wanted.bias_tokens[rows, columns], values, add=True)


def _repetition(some: torch.Tensor, tokens: torch.Tensor, penalties: Float32s) -> None:
    """Of prompt and output. A token that occurs twice is penalised once: both write the same."""
    penalty = on_device(penalties, some.device)[:, None]
    old = some.gather(1, tokens)
    some.scatter_(1, tokens, torch.where(old > 0, old / penalty, old * penalty))


def _frequency_and_presence(
    some: torch.Tensor, tokens: torch.Tensor, wanted: LogitsProcessors
) -> None:
    """Of the output alone: the prompt's tokens, and what stands behind the output, take nothing."""
    places = np.arange(tokens.shape[1])
    output = (places >= wanted.prompts[:, None]) & (places < wanted.lengths[:, None])
    each = np.where(output, -wanted.frequency[:, None], np.float32(0))
    some.scatter_add_(1, tokens, on_device(each, some.device))
    rows, columns = np.nonzero(output)
    vocab = some.shape[1]
    rows, ids = np.divmod(np.unique(rows * vocab + wanted.tokens[rows, columns]), vocab)
    _put(some, rows, ids, -wanted.presence[rows], add=True)


def _put(
    some: torch.Tensor,
    rows: npt.NDArray[np.intp],
    tokens: npt.NDArray[np.integer],
    values: Float32s,
    *,
    add: bool = False,
) -> None:
    """Write ``values`` at pairs that are all different, or add them there."""
    where = (on_device(rows, some.device), on_device(tokens.astype(np.int64), some.device))
    some.index_put_(where, on_device(values, some.device), accumulate=add)
