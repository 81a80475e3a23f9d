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
from stratakv.core.ids import RequestId
from stratakv.disagg.nixl import NixlTransport
from stratakv.engine.huggingface.model import load_model
from stratakv.spec.sharding import sharding_of
from stratakv.testing.hand_off import HandOffSide
from stratakv.testing.patience import PATIENCE_S
from tests.engines import greedy, tokens_of
from tests.ranked_pairs import DECODE, PREFILL, Play, RankedPair, perform


def hand_over(
    path: Path,
    config: EngineConfig,
    prompts: list[list[int]],
    count: int,
    alone: HandOffSide | None = None,
) -> tuple[list[list[int]], list[list[int]], list[bool]] | None:
    """Of each prompt, all at once, what is generated; then of each as a conversation goes on, and
    whether prefill had a part in it. Between the two one is aborted and one retracted. ``alone``:
    the side that has one rank, which NIXL reaches. Rank 0 reports."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    ranks = TorchRanks(PATIENCE_S)
    models = {n: load_model(path, config.dtype, ranks=n) for n in _sizes(ranks, alone)}

    @contextmanager
    def engine(side, sockets):
        del side
        mine = replace(config, tp=sockets.ranks.ranks.size)
        model = models[mine.tp]
        sizes = sockets.ranks.all_reduce_min(size(model.facts, mine, device_free=None))
        parts = build_sized(model, mine, sizes, sockets)
        try:
            yield parts
        finally:
            parts.close()

    play = Play(engine, acts={"retract": _retract})
    if alone is not None:
        found = models[ranks.size].facts.config
        play = replace(
            play,
            alone=alone,
            asks=True,
            opens=lambda side, rank: NixlTransport,
            sharding=lambda own, ranks: sharding_of(found, own.whole, ranks),
        )
    return perform(play, ranks, partial(_talk, prompts, count))


def _sizes(ranks: TorchRanks, alone: HandOffSide | None) -> set[int]:
    """Of the models that this process has a part of."""
    return {ranks.size, *([1] if alone is not None and not ranks.rank else [])}


def _retract(pair: RankedPair) -> None:
    if DECODE in pair.sides:
        pair.sides[DECODE].engine.retract(RequestId("r"))


def _disturb(prompt: list[int], count: int, pair: RankedPair) -> None:
    """One is aborted while its pages may be written, and one retracted that decodes."""
    pair.submit(greedy("gone", [3, *prompt], count))
    pair.until(lambda: pair.sides[PREFILL].engine.status(RequestId("gone")) is not None, "it")
    pair.step()
    pair.abort(DECODE, "gone")
    pair.submit(greedy("r", prompt, count))
    pair.until(lambda: len(pair.out[DECODE]["r"]) > 1, "its tokens")
    pair.do("retract")
    pair.drain()


def _talk(prompts: list[list[int]], count: int, pair: RankedPair):
    first = pair.run(*(greedy(f"{n}", tokens, count) for n, tokens in enumerate(prompts)))
    _disturb(prompts[-1], count, pair)
    assert tokens_of(pair.out[DECODE]["r"]) == first[-1]
    longer = [[*tokens, *output, 5, 9] for tokens, output in zip(prompts, first, strict=True)]
    again = pair.run(*(greedy(f"{n}+", tokens, count) for n, tokens in enumerate(longer)))
    pair.settle()
    cached = [pair.out[DECODE][f"{n}+"][0].cached for n in range(len(prompts))]
    return first, again, [each.prefill is not None for each in cached]
