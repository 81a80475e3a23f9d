"""Models that two ranks compute and two others decode say what one says that does both, and so do
one and two, over NIXL. A rank is a process that has its part of both engines;
``test_disagg_serve_ranks`` has servers."""

from dataclasses import replace

import pytest
import torch

from stratakv.core.config import EngineConfig
from stratakv.testing.hand_off import HandOffSide
from tests.fixtures.models import random_prompt, reference_greedy
from tests.fixtures.transports import nixl_is_here
from tests.parallel_models import build
from tests.ranked_models import hand_over
from tests.ranks import run_ranks

WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4}
COUNT = 6
CONFIG = EngineConfig(
    page_tokens=16,
    dtype="float32",
    device_memory="16MiB",
    host_memory="16MiB",
    max_running=4,
    max_model_len=200,
    step_tokens=64,
    chunk_tokens=32,
    snapshot_tokens=16,
)


CASES = {
    "llama": WIDE,
    "qwen3_next": WIDE,
    "gemma3_text": WIDE,
    "deepseek_v3": {},
    "deepseek_v32": {},
    "deepseek_v4": {"o_groups": 4},
}
QUICK = "llama", "qwen3_next", "deepseek_v32"
MIXED = {("gemma3_text", HandOffSide.PREFILL), ("qwen3_next", HandOffSide.DECODE)}
"""Heads in windows, to two ranks; and heads beside states, which all have, from two."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each in QUICK else pytest.mark.long) for each in CASES],
)
def test_two_ranks_hand_over_to_two_exactly(family, tmp_path):
    hands_over(family, tmp_path, None)


@pytest.mark.parametrize(
    ("family", "alone"),
    [
        pytest.param(family, side, marks=() if (family, side) in MIXED else pytest.mark.long)
        for family in CASES
        for side in HandOffSide
    ],
)
def test_one_rank_hands_over_to_two_exactly_and_two_to_one(family, alone, tmp_path):
    """Heads of a page go to, or come from, the rank that has them; what all ranks have goes to
    each, or comes from one."""
    nixl_is_here()
    hands_over(family, tmp_path, alone)


def hands_over(family, path, alone):
    torch.set_num_threads(1)
    model = build(family, **CASES[family])
    model.save_pretrained(path)
    page = 128 if family == "deepseek_v4" else 16
    config = replace(CONFIG, page_tokens=page, snapshot_tokens=page, max_model_len=20 * page)
    prompts = [random_prompt(n, n) for n in (1, 7, 3 * page, 6 * page + 5)]
    played = run_ranks(2, hand_over, path, config, prompts, COUNT, alone)
    first, again, handed_over = played[0]
    assert first == [reference_greedy(model, prompt, COUNT)[0] for prompt in prompts]
    longer = [[*prompt, *output, 5, 9] for prompt, output in zip(prompts, first, strict=True)]
    assert again == [reference_greedy(model, prompt, COUNT)[0] for prompt in longer]
    assert handed_over == [True] * len(prompts)
