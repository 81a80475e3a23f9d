"""Conversations of eight turns over all three tiers: their tokens and logits are those of a run
without a cache, no distribution has moved (Kullback-Leibler divergence), and every group has found
exactly the pages that its rule says it must find."""

import pytest
import torch

from stratakv.core.choices import SNAPSHOT_TOKENS
from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import KeepBoundary, Retention, needed
from tests.engines import evict_device, on_device, on_host, on_storage
from tests.fixtures.models import random_prompt
from tests.hit_cases import Lab, last_end, oracle
from tests.integration import test_deepseek_v4_engine as v4
from tests.storage_cases import attach, check_sums, evict_all, file_url, storage_lab

TURNS = 8
ANSWER = 6
MOST_KL = 1e-6
WAITS = {"prefetch_policy": "wait-complete", "prefetch_threshold": 1}


def divergence(this: Lab, name: str, tokens: list[int]) -> float:
    """Mean over the answer's tokens of KL(without a cache || ours)."""
    answer = this.answers[name]
    _, logits = oracle(this.model, tuple(tokens), len(answer.tokens))
    ours = torch.log_softmax(answer.logits.double(), -1)
    theirs = torch.log_softmax(logits.double(), -1)
    return (theirs.exp() * (theirs - ours)).sum(-1).mean().item()


def kept_ends(spec: CacheSpec, prompt: int, computed: int, snapshot: int) -> set[int]:
    """Ends, in tokens, at which every group has what it needs after a request that has computed its
    ``prompt`` and its answer, ``computed`` in all. States: of the end that the same prompt could
    hit, of the request's own end, and of every ``snapshot`` tokens behind the prompt."""
    page = spec.page_tokens
    full = range(0, computed // page * page + 1, page)
    states = {last_end(prompt, page), computed}
    states |= {end for end in full if end >= prompt and end % snapshot == 0}

    def there(rule: Retention, end: int) -> bool:
        """Token groups have every full page; a state group the states that were kept."""
        wanted = {(index + 1) * page for index in needed(rule, end, page)}
        return wanted <= (states if isinstance(rule, KeepBoundary) else {*full})

    return {end for end in full if all(there(group.retention, end) for group in spec.groups)}


def converse(this: Lab, message, snapshot: int = SNAPSHOT_TOKENS) -> list[tuple[int, int]]:
    """Before each turn the pages stay, or leave the device, or all memory. ``message(turn, known)``
    is what the user says next. Returns what each turn went on from, and what its anchor had."""
    known: list[int] = []
    found: list[float] = []
    ends: list[tuple[int, int]] = []
    kept: set[int] = {0}
    for turn in range(TURNS):
        tier = (on_device, on_host, on_storage)[turn % 3]
        this.parts.cache.progress.settle()
        if tier is on_host:
            evict_device(this.parts)
        if tier is on_storage:
            evict_all(this)
        tokens = [*known, *message(turn, known)]
        name = f"turn {turn}"
        this.submit(name, tokens, count=ANSWER)
        this.drain()
        answer = this.answers[name]
        ends.append((max(kept), last_end(max(1, len(known)), this.page)))
        assert answer.cached == tier(this.spec, max(kept)), f"turn {turn}"
        found.append(divergence(this, name, tokens))
        known = [*tokens, *answer.tokens]
        # The answer's last token has no KV.
        kept = kept_ends(this.spec, len(tokens), len(known) - 1, snapshot)
    assert sum(found) / TURNS <= MOST_KL, found
    check_sums(this)
    return ends


def random_message(turn: int, _) -> list[int]:
    return random_prompt(70 + turn, 37)


@pytest.mark.parametrize("family", ["deepseek_v32", "gemma3"])
def test_eight_turns(family, tmp_path):
    with storage_lab(family, 16, file_url(tmp_path)) as this:
        ends = converse(this, random_message)
        assert all(end == anchor for end, anchor in ends)


@pytest.mark.parametrize("snapshot", [16, SNAPSHOT_TOKENS])
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "nemotron_h"])
def test_eight_turns_of_a_model_with_states(family, snapshot, tmp_path):
    """A turn goes on from the last state that was kept, behind the end of the pages: from that of
    the last prompt, or, where states are kept often, from one within the answer."""
    with storage_lab(family, 16, file_url(tmp_path), snapshot_tokens=snapshot) as this:
        ends = converse(this, random_message, snapshot)
        behind = [end < anchor for end, anchor in ends]
        assert any(behind) == (snapshot > 16)


@pytest.mark.parametrize("seed", [0, 1])
def test_eight_turns_of_deepseek_v4(seed, tmp_path):
    """What the user says is drawn until rounding cannot decide what an indexer selects."""

    def message(turn, known):
        for attempt in range(60):
            turn_of_user = random_prompt(1000 * turn + attempt, 61)
            if v4.clearness(seed, (*known, *turn_of_user)) > 2 * v4.CLEAR:
                return turn_of_user
        raise AssertionError("no clear message was found")

    with v4.lab(seed, **WAITS) as this:
        attach(this.parts, file_url(tmp_path))
        converse(this, message)
