"""Engines on two and four ranks say what one says, whatever tier the prefix comes from, also where
one rank's store has holes or is slow and failing.
"""

from dataclasses import replace

import pytest
import torch

from stratakv.assembly.sizing import size
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.engine.huggingface.model_facts import read_facts
from tests.fixtures.models import random_prompt, reference_greedy
from tests.parallel_models import build
from tests.ranked_engines import Play, perform
from tests.ranks import run_ranks

WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4}
CASES = {
    "llama": ("llama", WIDE),
    "gemma3": ("gemma3_text", WIDE),
    "qwen3_next": ("qwen3_next", WIDE),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v4": ("deepseek_v4", {"o_groups": 4}),
}
COUNT = 4


def play_of(family, changes, folder, ranks):
    model = build(family, **changes)
    page = 128 if family == "deepseek_v4" else 16
    model.save_pretrained(folder / "model")
    length = 3 * page + 20
    stem = random_prompt(1, 2 * page + 5)
    prompts = [
        stem + random_prompt(2, length - len(stem)),
        stem + random_prompt(3, length - len(stem)),
        random_prompt(4, length),
        stem + random_prompt(5, length - len(stem)),
    ]
    prompts.append(prompts[-1])  # at once again: it lies on the device, however small that is
    config = EngineConfig(
        page_tokens=page,
        dtype="float32",
        host_memory="16MiB",
        max_running=1,
        max_model_len=length + COUNT,
        step_tokens=4 * page,
        chunk_tokens=2 * page,
        snapshot_tokens=page,
        load_back_threshold=1,
        prefetch_threshold=page,
        prefetch_policy="wait-complete",
    )
    config = replace(config, device_memory=scarce(folder / "model", config, ranks))
    wanted = [reference_greedy(model, prompt, COUNT)[0] for prompt in prompts]
    return Play(folder / "model", folder / "store", config, prompts, COUNT), wanted


def scarce(path, config, ranks):
    """Device memory that holds one request and not much more; what V4 keeps beyond its window is
    so small that a little more memory would hold all of the play."""
    facts, config = read_facts(path, "float32"), replace(config, tp=ranks)
    need = 1 << 14
    while True:
        try:
            size(facts, replace(config, device_memory=f"{need}B"), device_free=None)
        except ConfigError:
            need = need * 9 // 8
        else:
            return f"{need}B" if config.page_tokens == 128 else f"{need * 5 // 4}B"


# Four processes on two cores take most: what they add to two is a matter of the groups alone.
LONG = {("gemma3", 4), ("deepseek_v3", 4), ("qwen3_next", 4), ("deepseek_v4", 4)}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=[pytest.mark.long] if (name, ranks) in LONG else [])
        for name in CASES
        for ranks in (2, 4)
    ],
)
def test_ranks_say_what_one_says_from_every_tier(tmp_path, name, ranks):
    torch.set_num_threads(1)
    play, wanted = play_of(*CASES[name], tmp_path, ranks)
    results = run_ranks(ranks, perform, play)[0]
    for act, tokens in results.tokens.items():
        assert tokens == wanted, act
    page = play.config.page_tokens
    tiers = {
        act: dict(zip(("device", "host", "storage"), zip(*found, strict=True), strict=True))
        for act, found in results.cached.items()
    }
    assert any(max(found["device"]) >= page for found in tiers.values())
    assert max(tiers["again"]["host"]) >= 2 * page
    assert max(tiers["stored"]["storage"]) >= 2 * page
    assert max(tiers["restarted"]["storage"]) >= 2 * page
    assert sum(tiers["gaps"]["storage"]) < sum(tiers["restarted"]["storage"])
