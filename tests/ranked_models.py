"""What one rank does in the tests of models that are handed over from ranks to ranks: its part of
both engines, in a process of its own. Runs in processes that ``tests.ranks`` starts."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging

from stratakv.agreement.torch_ranks import TorchRanks
from stratakv.assembly.models import build_sized
from stratakv.assembly.sizing import size
from stratakv.core.config import EngineConfig
from stratakv.engine.model import load_model
from stratakv.testing.patience import PATIENCE_S
from tests.engines import greedy
from tests.ranked_pairs import DECODE, Play, RankedPair, perform


def hand_over(
    path: Path, config: EngineConfig, prompts: list[list[int]], count: int
) -> tuple[list[list[int]], list[list[int]], list[bool]] | None:
    """Of each prompt, all at once, what is generated; then of each as a conversation goes on, and
    whether prefill had a part in it. Rank 0 reports."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    ranks = TorchRanks(PATIENCE_S)
    config = replace(config, tp=ranks.size)
    model = load_model(path, config.dtype, ranks=ranks.size)

    @contextmanager
    def engine(side, sockets):
        del side
        sizes = sockets.ranks.all_reduce_min(size(model.facts, config, on_host=True))
        parts = build_sized(model, config, sizes, sockets)
        try:
            yield parts
        finally:
            parts.close()

    return perform(Play(engine), ranks, partial(_talk, prompts, count))


def _talk(prompts: list[list[int]], count: int, pair: RankedPair):
    first = pair.run(*(greedy(f"{n}", tokens, count) for n, tokens in enumerate(prompts)))
    longer = [[*tokens, *output, 5, 9] for tokens, output in zip(prompts, first, strict=True)]
    again = pair.run(*(greedy(f"{n}+", tokens, count) for n, tokens in enumerate(longer)))
    pair.settle()
    cached = [pair.out[DECODE][f"{n}+"][0].cached for n in range(len(prompts))]
    return first, again, [each.prefill is not None for each in cached]
