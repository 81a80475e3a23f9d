"""Conversations of eight turns over all three tiers: their tokens and logits are those of a run
without a cache, and no distribution has moved (Kullback-Leibler divergence)."""

import pytest
import torch

from tests.engines import evict_device, on_device, on_host, on_storage
from tests.fixtures.models import random_prompt
from tests.hit_cases import Lab, last_end, oracle
from tests.integration import test_deepseek_v4_engine as v4
from tests.storage_cases import attach, check_sums, evict_all, file_url, storage_lab

TURNS = 8
MOST_KL = 1e-6
WAITS = {"prefetch_policy": "wait-complete", "prefetch_threshold": 1}


def divergence(this: Lab, name: str, tokens: list[int]) -> float:
    """Mean over the answer's tokens of KL(without a cache || ours)."""
    answer = this.answers[name]
    _, logits = oracle(this.model, tuple(tokens), len(answer.tokens))
    ours = torch.log_softmax(answer.logits.double(), -1)
    theirs = torch.log_softmax(logits.double(), -1)
    return (theirs.exp() * (theirs - ours)).sum(-1).mean().item()


def converse(this: Lab, message, *, exact: bool) -> None:
    """Before each turn the pages stay, or leave the device, or all memory. ``message(turn, known)``
    is what the user says next."""
    known: list[int] = []
    found: list[float] = []
    for turn in range(TURNS):
        before = len(known)
        tier = (on_device, on_host, on_storage)[turn % 3]
        this.parts.cache.settle()
        if tier is on_host:
            evict_device(this.parts)
        if tier is on_storage:
            evict_all(this)
        tokens = [*known, *message(turn, known)]
        name = f"turn {turn}"
        this.submit(name, tokens, count=6)
        this.drain()
        answer = this.answers[name]
        if exact and turn:
            end = last_end(before, this.page)  # the answer's last token has no KV
            assert answer.cached == tier(this.spec, end), f"turn {turn}"
        elif turn:
            assert answer.cached.total > 0, f"turn {turn}"
        found.append(divergence(this, name, tokens))
        known = [*tokens, *answer.tokens]
    assert sum(found) / TURNS <= MOST_KL, found
    check_sums(this)


@pytest.mark.parametrize(
    ("family", "exact"), [("deepseek_v32", True), ("qwen3_next", False), ("gemma3", True)]
)
def test_eight_turns(family, exact, tmp_path):
    with storage_lab(family, 16, file_url(tmp_path)) as this:
        converse(this, lambda turn, _: random_prompt(70 + turn, 37), exact=exact)


@pytest.mark.parametrize("seed", [0, 1])
def test_eight_turns_of_deepseek_v4(seed, tmp_path):
    """What the user says is drawn until rounding cannot decide what an indexer selects."""

    def message(turn, known):
        for attempt in range(60):
            said = random_prompt(1000 * turn + attempt, 61)
            if v4.clearness(seed, (*known, *said)) > 2 * v4.CLEAR:
                return said
        raise AssertionError("no clear message was found")

    with v4.lab(seed, **WAITS) as this:
        attach(this.parts, file_url(tmp_path))
        converse(this, message, exact=True)
