"""Rows to sample: their parameters, column by column, logits, and what penalties make of them."""

import numpy as np
import torch

from stratakv.engine.batch import SamplingBatch
from stratakv.engine.request import SamplingParams


def params(
    rows, temperature=1.0, top_p=1.0, top_k=0, seeds=None, positions=None, logprobs=-1, min_p=0
):
    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (rows,)).copy()

    return SamplingBatch(
        temperature=column(temperature, np.float32),
        top_p=column(top_p, np.float32),
        top_k=column(top_k, np.int32),
        seeds=column(0 if seeds is None else seeds, np.uint64),
        positions=column(np.arange(rows) if positions is None else positions, np.int64),
        logprobs=column(logprobs, np.int32),
        min_p=column(min_p, np.float32),
    )


def logits_of(seed, rows, vocab=50):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def penalised(logits, prompt, output, asks: SamplingParams):
    """float64 [vocab]: vLLM's formulas for one row, token by token."""
    prompt, output = list(map(int, prompt)), list(map(int, output))
    found = logits.double().clone()
    for token in asks.stop_tokens if len(output) < asks.min_tokens else ():
        found[token] = -torch.inf
    for token, bias in asks.logit_bias:
        found[token] += bias
    for token in {*prompt, *output}:
        penalty = asks.repetition_penalty
        found[token] = found[token] / penalty if found[token] > 0 else found[token] * penalty
    for token in set(output):
        found[token] -= asks.frequency_penalty * output.count(token) + asks.presence_penalty
    return found
