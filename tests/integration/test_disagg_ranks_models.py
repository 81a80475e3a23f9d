"""Models that two ranks compute and two others decode say what one says that does both. A rank is
a process that has its part of both engines; ``test_disagg_serve_ranks`` has servers."""

from dataclasses import replace

import pytest
import torch

from stratakv.core.config import EngineConfig
from tests.fixtures.models import random_prompt, reference_greedy
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


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each in QUICK else pytest.mark.long) for each in CASES],
)
def test_two_ranks_hand_over_to_two_exactly(family, tmp_path):
    torch.set_num_threads(1)
    model = build(family, **CASES[family])
    model.save_pretrained(tmp_path)
    page = 128 if family == "deepseek_v4" else 16
    config = replace(CONFIG, page_tokens=page, snapshot_tokens=page, max_model_len=20 * page)
    prompts = [random_prompt(n, n) for n in (1, 7, 3 * page, 6 * page + 5)]
    first, again, handed_over = run_ranks(2, hand_over, tmp_path, config, prompts, COUNT)[0]
    assert first == [reference_greedy(model, prompt, COUNT)[0] for prompt in prompts]
    longer = [[*prompt, *output, 5, 9] for prompt, output in zip(prompts, first, strict=True)]
    assert again == [reference_greedy(model, prompt, COUNT)[0] for prompt in longer]
    assert handed_over == [True] * len(prompts)
