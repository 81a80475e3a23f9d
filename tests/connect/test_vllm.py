"""The tier in the released vLLM, on a CPU: what a prompt gets back from the store is what it would
compute, over a restart, with damage, and beside another engine.

vLLM's tiers refuse a machine without a GPU; ``cpu_tiering.CpuTieringSpec`` copies in its place.
"""

import shutil
from pathlib import Path

import pytest

from tests.connect.environment import Lives, cached_of, tokens_of
from tests.fixtures.models import changed_model, random_prompt
from tests.fixtures.tiny_configs import FULL, LINEAR, SLIDING, types

pytestmark = pytest.mark.connect

BLOCK, PROMPT, LONG = 32, 450, 1500
"""Tokens of a block and of a prompt; ``LONG`` where vLLM makes blocks as large as a state."""
SHAPE = {"head_dim": 32, "hidden_size": 128}
FAMILIES = {
    "llama": ({}, "float32"),
    "gemma3": (
        {
            "query_pre_attn_scalar": 32, "sliding_window": 64,
            **types(SLIDING, FULL, SLIDING, FULL),
        },
        "float32",
    ),
    "gpt_oss": (
        {
            "sliding_window": 64, "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False,
                "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 1024,
            },
        },
        "bfloat16",
    ),
    "qwen3_next": (
        {
            **types(LINEAR, LINEAR, LINEAR, FULL), "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        },
        "bfloat16",
    ),
}  # fmt: skip
"""Sizes that vLLM's CPU kernels take, and the dtype that they have for a family."""
HOST_BYTES = 64 << 20


class Engine:
    """Cases of one tiny model."""

    def __init__(self, family, directory):
        changes, self.dtype = FAMILIES[family]
        self.model = directory / "model"
        changed_model(family, **SHAPE, **changes).save_pretrained(self.model)
        self.prompt_tokens = LONG if LINEAR in changes.get("layer_types", ()) else PROMPT
        self.lives = Lives("vllm_life.py", directory)

    def prompts(self, *seeds):
        return [random_prompt(seed, self.prompt_tokens) for seed in seeds]

    def whole(self, life):
        """How much of a prompt that engine can reuse."""
        return (self.prompt_tokens - 1) // life["block"] * life["block"]

    def case(self, store, prompts, host_bytes=HOST_BYTES, **engine):
        tier = {
            "type": "StrataTier", "module_path": "stratakv.connect.vllm",
            "storage": f"file://{store}?quota=512MiB",
        }  # fmt: skip
        transfer = {
            "kv_connector": "StrataConnector",
            "kv_connector_module_path": "stratakv.connect.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec", "spec_module_path": "cpu_tiering",
                "cpu_bytes_to_use": host_bytes, "secondary_tiers": [tier],
            },
        }  # fmt: skip
        return {
            "engine": {
                "model": str(self.model), "dtype": self.dtype, "block_size": BLOCK,
                "skip_tokenizer_init": True, "enforce_eager": True, "max_num_seqs": 2,
                "max_model_len": self.prompt_tokens + 62, "enable_prefix_caching": True,
                "num_gpu_blocks_override": 72, "disable_log_stats": True, **engine,
            },
            "kv_transfer_config": None if store is None else transfer,
            "prompts": prompts,
            "tokens": 8,
        }  # fmt: skip


def damaged(store: Path, into: Path) -> Path:
    """A copy of a store in which one byte of every 512 of every page is another."""
    shutil.copytree(store, into)
    segments = [path for path in into.rglob("*.seg") if path.stat().st_size > 1 << 16]
    assert segments
    for path in segments:
        data = bytearray(path.read_bytes())
        for at in range(len(data) // 16, len(data), 512):
            data[at] ^= 1
        path.write_bytes(data)
    return into


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_store_gives_back_is_what_would_be_computed(family, tmp_path):
    engine = Engine(family, tmp_path)
    store, empty = tmp_path / "store", tmp_path / "empty"
    asked = engine.prompts(0, 1, 2, 3)
    plain, first = engine.lives.live(engine.case(None, asked), engine.case(store, [*asked, *asked]))
    whole = engine.whole(plain)
    assert tokens_of(first) == 2 * tokens_of(plain)
    assert cached_of(first) == [0] * 4 + [whole] * 4
    assert whole >= 2 * BLOCK
    bad = damaged(store, tmp_path / "damaged")
    restarted, spoilt, cold = engine.lives.live(
        engine.case(store, asked), engine.case(bad, asked), engine.case(empty, asked)
    )
    assert cached_of(restarted) == [whole] * 4
    assert cached_of(spoilt) == cached_of(cold) == [0] * 4
    assert spoilt["counts"]["damaged"] > 0
    assert "loaded" not in spoilt["counts"]
    for life in (restarted, spoilt, cold):
        assert tokens_of(life) == tokens_of(plain)


def test_pages_that_left_both_tiers_of_vllm_come_back_from_the_store(tmp_path):
    engine = Engine("llama", tmp_path)
    asked = engine.prompts(0, 1, 2, 3, 0, 1)
    small = {"host_bytes": 20 * (64 << 10), "num_gpu_blocks_override": 24}
    plain, first = engine.lives.live(
        engine.case(None, asked), engine.case(tmp_path / "store", asked, **small)
    )
    assert tokens_of(first) == tokens_of(plain)
    assert cached_of(first) == [0] * 4 + [engine.whole(first)] * 2
    assert first["counts"]["loaded"] >= 2 * engine.whole(first) // BLOCK


def test_two_engines_on_one_store_at_once(tmp_path):
    engine = Engine("llama", tmp_path)
    store, asked = tmp_path / "store", engine.prompts(0, 1, 2, 3)
    (plain,) = engine.lives.live(engine.case(None, asked))
    begun = [engine.lives.begin([engine.case(store, part)]) for part in (asked, asked[::-1])]
    (one,), (other,) = [engine.lives.finish(life) for life in begun]
    assert tokens_of(one) == tokens_of(plain)
    assert tokens_of(other) == tokens_of(plain)[::-1]
    written = one["counts"].get("stored", 0) + other["counts"].get("stored", 0)
    assert written >= 4 * engine.whole(one) // BLOCK
    (third,) = engine.lives.live(engine.case(store, asked))
    assert cached_of(third) == [engine.whole(third)] * 4
    assert tokens_of(third) == tokens_of(plain)


def test_another_model_or_setting_never_hits_and_one_that_decides_nothing_does(tmp_path):
    engine = Engine("llama", tmp_path)
    store, asked = tmp_path / "store", engine.prompts(0)
    (first,) = engine.lives.live(engine.case(store, asked))
    other = engine.case(store, asked)
    changed_model("llama", seed=1, **SHAPE).save_pretrained(other_model := tmp_path / "other")
    other["engine"]["model"] = str(other_model)
    longer = engine.case(store, asked, max_model_len=500)
    half = engine.case(store, asked, dtype="bfloat16")
    unknown = engine.case(store, asked, additional_config={"of_somebody_else": 1})
    same = engine.case(
        store, asked, max_num_seqs=1, max_num_batched_tokens=600, num_gpu_blocks_override=64
    )
    lives = engine.lives.live(other, longer, half, unknown, same)
    assert [cached_of(life) for life in lives] == [[0]] * 4 + [[engine.whole(first)]]
    assert tokens_of(lives[-1]) == tokens_of(first)


def test_two_ranks_share_pages_with_two_ranks_alone(tmp_path):
    engine = Engine("llama", tmp_path)
    store, asked = tmp_path / "store", engine.prompts(0, 1)
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    (one,) = engine.lives.live(engine.case(store, asked))
    engine.lives = Lives("vllm_life.py", tmp_path, VLLM_CPU_OMP_THREADS_BIND="0|1")
    (first,) = engine.lives.live(engine.case(store, asked, **ranks))
    (restarted,) = engine.lives.live(engine.case(store, asked, **ranks))
    assert cached_of(one) == cached_of(first) == [0, 0]
    assert cached_of(restarted) == [engine.whole(restarted)] * 2
    assert tokens_of(restarted) == tokens_of(first) == tokens_of(one)
