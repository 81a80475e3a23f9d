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


def masked(logits: torch.Tensor, masks: TokenMasks) -> torch.Tensor:
    """A copy of ``logits``, float32 [S, vocab], in which the rows ``masks.at`` have -infinity where
    a token may not come."""
    vocab = logits.shape[1]
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, bitorder="little")[:, :vocab]
    barred = np.ones((len(bits), vocab), np.bool_)
    barred[:, : bits.shape[1]] = bits == 0
    at = torch.from_numpy(masks.at).to(logits.device)
    found = logits.clone()
    found[at] = found[at].masked_fill(torch.from_numpy(barred).to(logits.device), -torch.inf)
    return found


def processed(logits: torch.Tensor, wanted: LogitsProcessors) -> torch.Tensor:
    """A copy of ``logits``, float32 [S, vocab], in which the rows ``wanted.at`` are changed."""
    at = torch.from_numpy(wanted.at).to(logits.device)
    found = logits.clone()
    some = found[at]
    _bar(some, wanted)
    _bias(some, wanted)
    tokens = torch.from_numpy(wanted.tokens.astype(np.int64)).to(logits.device)
    if (wanted.repetition != 1).any():
        _repetition(some, tokens, wanted.repetition)
    if wanted.frequency.any() or wanted.presence.any():
        _frequency_and_presence(some, tokens, wanted)
    found[at] = some
    return found


def _bar(some: torch.Tensor, wanted: LogitsProcessors) -> None:
    # A model's end-of-sequence token may lie beyond its vocabulary.
    rows, columns = np.nonzero((wanted.barred != NONE) & (wanted.barred < some.shape[1]))
    _put(some, rows, wanted.barred[rows, columns], torch.tensor(-torch.inf))


def _bias(some: torch.Tensor, wanted: LogitsProcessors) -> None:
    rows, columns = np.nonzero(wanted.bias_tokens != NONE)
    values = torch.from_numpy(wanted.bias_values[rows, columns])
    _put(some, rows, wanted.bias_tokens[rows, columns], values, add=True)


def _repetition(some: torch.Tensor, tokens: torch.Tensor, penalties: Float32s) -> None:
    """Of prompt and output. A token that occurs twice is penalised once: both write the same."""
    penalty = torch.from_numpy(penalties).to(some.device)[:, None]
    old = some.gather(1, tokens)
    some.scatter_(1, tokens, torch.where(old > 0, old / penalty, old * penalty))


def _frequency_and_presence(
    some: torch.Tensor, tokens: torch.Tensor, wanted: LogitsProcessors
) -> None:
    """Of the output alone: the prompt's tokens, and what stands behind the output, take nothing."""
    places = np.arange(tokens.shape[1])
    output = (places >= wanted.prompts[:, None]) & (places < wanted.lengths[:, None])
    each = torch.from_numpy(np.where(output, -wanted.frequency[:, None], np.float32(0)))
    some.scatter_add_(1, tokens, each.to(some.device))
    rows, columns = np.nonzero(output)
    vocab = some.shape[1]
    rows, ids = np.divmod(np.unique(rows * vocab + wanted.tokens[rows, columns]), vocab)
    _put(some, rows, ids, torch.from_numpy(-wanted.presence[rows]), add=True)


def _put(
    some: torch.Tensor,
    rows: npt.NDArray[np.intp],
    tokens: npt.NDArray[np.integer],
    values: torch.Tensor,
    *,
    add: bool = False,
) -> None:
    """Write ``values`` at pairs that are all different, or add them there."""
    where = (torch.from_numpy(rows), torch.from_numpy(tokens.astype(np.int64)))
    where = tuple(each.to(some.device) for each in where)
    some.index_put_(where, values.to(some.device), accumulate=add)
