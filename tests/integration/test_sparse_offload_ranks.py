"""Two ranks whose selected rows are on the host say what one says that has all on the device, also
where they are short of pages on both tiers, where clients leave, and where one rank's store fails.
"""

import pytest
import torch
from transformers.utils import logging

from stratakv.core.config import EngineConfig
from tests.engines import greedy, run, small_engine, tokens_of
from tests.fixtures import deepseek_v4, deepseek_v32
from tests.fixtures.deepseek_v32 import random_tokens
from tests.offload_ranks import OffloadPlay, perform
from tests.ranks import run_ranks

ANSWER, PLENTY = 18, 300
MODELS = {
    "deepseek_v32": (lambda: deepseek_v32.v32_model("small"), 8, 24),
    "deepseek_v4": (lambda: deepseek_v4.hugging_face(deepseek_v4.TWICE), 16, 8),
}
"""The model, its page, and the least buffer."""
POOLS = {
    "deepseek_v32": ((PLENTY, 16), (PLENTY, 60)),
    "deepseek_v4": ((PLENTY, 14, PLENTY, 8), (PLENTY, 40, PLENTY, 8)),
}
"""Two requests spilled, and on the host four whole."""


def right(model, config, prompts):
    groups = {8: 1, 16: 3}[config.page_tokens]
    with small_engine(model, config, (PLENTY,) * groups, (0,) * groups) as parts:
        return [
            tokens_of(run(parts, greedy(str(at), prompt, ANSWER))[str(at)])
            for at, prompt in enumerate(prompts)
        ]


@pytest.mark.parametrize("count", [5, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_say_what_one_says_without_offload(tmp_path, name, count):
    torch.set_num_threads(1)
    make, page, buffer = MODELS[name]
    logging.disable_progress_bar()
    make().save_pretrained(tmp_path / "model")
    prompts = [random_tokens(seed, 12 * page + 5 * seed % 21) for seed in range(count)]
    settings = {
        "page_tokens": page, "dtype": "float32", "max_running": 5, "max_model_len": 16 * page,
        "chunk_tokens": 3 * page, "step_tokens": 8 * page, "reserve_tokens": ANSWER,
        "load_back_threshold": 1, "prefetch_threshold": page, "prefetch_policy": "wait-complete",
        "host_memory": "16MiB", "device_memory": "16MiB",
    }  # fmt: skip
    device, host = POOLS[name]
    play = OffloadPlay(
        path=tmp_path / "model",
        store=tmp_path / "store",
        config=EngineConfig(**settings, sparse_offload=True, device_buffer_size=buffer),
        device=device,
        host=host,
        prompts=prompts,
        answer=ANSWER,
    )
    wanted = right(wrapped(name), EngineConfig(**settings), prompts)
    found = run_ranks(2, perform, play)
    for act, tokens in found[0].tokens.items():
        for at, (ours, theirs) in enumerate(zip(tokens, wanted, strict=True)):
            whole = act != "aborted" or at % 2
            assert ours == (theirs if whole else theirs[: len(ours)]), f"{act}, prompt {at}"
    assert any(len(ours) < ANSWER for ours in found[0].tokens["aborted"])
    for rank in found:
        assert rank.rows, "no rank reads from another's host"
        assert rank.pages
    assert found[0].stored
    assert (found[0].spilled, found[0].rows) == (found[1].spilled, found[1].rows)


def wrapped(name):
    if name == "deepseek_v32":
        return deepseek_v32.wrapped("small")
    return deepseek_v4.adopted(deepseek_v4.TWICE)
