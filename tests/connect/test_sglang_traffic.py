"""Steps in thousands of SGLang's own scheduler, radix cache, cache controller and pools over the
back end, with retraction, aborts, eviction, restarts and damage: attention never reads a byte that
it would not compute. What SGLang lacks on a CPU is in ``sglang_cpu``.
"""

import json
import os

import pytest

from tests.connect.environment import HERE, ended, engine_process, faulty_package, misbehaving
from tests.connect.test_sglang import FAMILIES, SHAPE, TIERS, case
from tests.connect.test_vllm import FAMILIES as VLLM_FAMILIES
from tests.fixtures.models import changed_model
from tests.meta.source import ROOT

pytestmark = pytest.mark.connect

SMALL = {"max_total_tokens": 1024, "max_running_requests": 6, "chunked_prefill_size": 128}
EXTRA = {
    "backend_name": "strata", "module_path": "stratakv.connect.sglang",
    "class_name": "StrataStorage", "interface_v1": 1, "prefetch_threshold": 16,
}  # fmt: skip
SOON = {"timeout_s": 0.2}
"""Before a store that hangs comes back."""
INTERVAL = 4
"""Of qwen3_next's layers, one has keys and values: SGLang's name for what layer types say."""
STATES = {"page_size": 1, "mamba_radix_cache_strategy": "no_buffer", "max_mamba_cache_size": 24}
"""SGLang's plainest way with states; another has kernels write more of them, which no model here
does. Nearly all of that store is states: what is spoilt in it is rarely a page of one token."""
INDEXED = {"page_size": 64, "max_total_tokens": 2048, "chunked_prefill_size": 256,
           "dtype": "bfloat16"}  # fmt: skip
COMPRESSED = {
    "page_size": 256, "max_total_tokens": 8192, "chunked_prefill_size": 512, "dtype": "bfloat16",
    "context_length": 4096, "swa_full_tokens_ratio": 0.5,
}  # fmt: skip
SGLANG_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 128,
    "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4], "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 512, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64, "n_hash_layers": 1,
    "sliding_window": 128, "window_size": 128, "index_n_heads": 8, "index_head_dim": 128,
    "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 2, "vocab_size": 512,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
"""DeepSeek-V4 as SGLang reads it. The checked model has no weights: any will do beside it."""
MODELS = {family: (changes, {}) for family, (changes, _) in FAMILIES.items()} | {
    "qwen3_next": (VLLM_FAMILIES["qwen3_next"][0] | {"full_attention_interval": INTERVAL}, STATES),
    "deepseek_v32": ({"index_head_dim": 128}, INDEXED),
    "deepseek_v4": ({}, COMPRESSED),
}
POOLS = {
    "llama": {"kv"}, "laguna": {"kv", "swa"}, "qwen3_next": {"kv", "mamba"},
    "deepseek_v32": {"kv", "indexer"},
    "deepseek_v4": {"kv", "swa", *(f"deepseek_v4_{pool}" for pool in (
        "c4", "c4_indexer", "c4_state", "c4_indexer_state", "c128"))},
}  # fmt: skip
DAMAGED = {
    "llama": ("kv", 5), "laguna": ("kv", 5), "deepseek_v32": ("kv", 5),
    "deepseek_v4": ("deepseek_v4_c4", 1),
}  # fmt: skip
"""Pools of which pages are found spoilt, and how many at least: of DeepSeek-V4, whose KV pages are
one byte, the first bad pool ends a load."""
LENGTHS = {
    "llama": (6, 400), "laguna": (6, 400), "qwen3_next": (4, 100), "deepseek_v32": (4, 200),
    "deepseek_v4": (6, 150),
}  # fmt: skip
"""Lives, and steps of each: pages of one token take longer."""
LONGEST = {"deepseek_v4": 1500}
CAPABILITIES = {"deepseek_v32": (9, 0), "deepseek_v4": (9, 0)}


def traffic(family, directory, lives, steps, stores=(), **extra):
    """The process, and where its counts will be. ``stores``: URLs, for lives in turns."""
    changes, engine = MODELS[family]
    if engine is COMPRESSED:
        changed_model("llama").save_pretrained(directory / "model")
        (directory / "model" / "config.json").write_text(json.dumps(SGLANG_V4))
    else:
        changed_model(family, **SHAPE, **changes).save_pretrained(directory / "model")
    small = TIERS | SMALL | {"hicache_ratio": 2.0} | engine
    given, answers = directory / "case.json", directory / "answers.json"
    usual = f"file://{directory}/store?quota={64 if engine else 8}MiB"
    given.write_text(
        json.dumps(
            {
                "engine": case(directory / "model", None, [])["engine"] | small,
                "extra": EXTRA | extra, "seed": 1, "lives": lives, "steps": steps,
                "stores": [*stores] or [usual],
                "capability": CAPABILITIES.get(family), "longest": LONGEST.get(family, 400),
            }
        )
    )  # fmt: skip
    places = [ROOT / "src", HERE, HERE / "sglang_cpu", faulty_package(directory)]
    paths = os.pathsep.join(map(str, places))
    process = engine_process(
        "sglang_traffic.py", given, answers, PYTHONPATH=paths, TORCHDYNAMO_DISABLE="1"
    )
    return process, answers


@pytest.mark.parametrize("family", MODELS)
def test_attention_reads_what_would_be_computed(family, tmp_path):
    lives, steps = LENGTHS[family]
    process, answers = traffic(family, tmp_path, lives, steps)
    ended(process)
    counts = json.loads(answers.read_text())
    assert counts["steps"] >= lives * steps
    # Everything that could go wrong has been tried.
    for event in (
        "retracted", "aborted", "cached_tokens",
        *(f"{pool} {event}" for pool in POOLS[family] for event in ("stored", "loaded")),
    ):  # fmt: skip
        assert counts.get(event, 0) >= 5, (event, counts)
    if family in DAMAGED:
        pool, least = DAMAGED[family]
        assert counts.get(f"{pool} damaged", 0) >= least, counts
    assert counts["checked_bytes"] > 1 << (26 if STATES in MODELS[family] else 28)
    states = "mamba" in POOLS[family] or family == "deepseek_v4"
    assert (counts.get("checked_states", 0) > 1000) == states
    assert (counts.get("checked_rows", 0) > 10_000) == (family == "deepseek_v4")
    assert (counts.get("checked_index_rows", 0) > 10_000) == ("indexer" in POOLS[family])


def test_a_store_that_lies_fails_hangs_or_is_full_costs_hits_and_nothing_else(tmp_path):
    urls = misbehaving(tmp_path / "store").values()
    process, answers = traffic("laguna", tmp_path, 2 * len(urls), 150, urls, **SOON)
    ended(process)
    counts = json.loads(answers.read_text())
    for event in (
        "stored", "loaded", "missing", "damaged", "unread", "unwritten", "refused", "late",
    ):  # fmt: skip
        assert counts.get(f"kv {event}", 0) >= 5, (event, counts)


@pytest.mark.parametrize(
    ("family", "bug", "what"),
    [
        ("llama", "PageBefore", ""), ("deepseek_v32", "IndexBefore", ""),
        ("deepseek_v4", "IndexBefore", ""), ("deepseek_v4", "StatesLeftOut", ", its states,"),
    ],
)  # fmt: skip
def test_a_page_that_comes_back_wrong_is_seen(family, bug, what, tmp_path):
    process, _ = traffic(family, tmp_path, 2, 100, module_path="sglang_seeded", class_name=bug)
    wrong = rf"attention of layer \d{what} would read \d+ wrong tokens"
    with pytest.raises(AssertionError, match=wrong):
        ended(process)
