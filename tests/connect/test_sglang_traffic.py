"""Steps in thousands of SGLang's own scheduler, radix cache, cache controller and pools over the
back end, with retraction, aborts, eviction, restarts and damage: attention never reads a byte that
it would not compute. What SGLang lacks on a CPU is in ``sglang_cpu``.
"""

import json
import os

import pytest

from tests.connect.environment import HERE, ended, engine_process
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
INTERVAL = 4
"""Of qwen3_next's layers, one has keys and values: SGLang's name for what layer types say."""
STATES = {"page_size": 1, "mamba_radix_cache_strategy": "no_buffer", "max_mamba_cache_size": 24}
"""SGLang's plainest way with states; another has kernels write more of them, which no model here
does. Nearly all of that store is states: what is spoilt in it is rarely a page of one token."""
INDEXED = {"page_size": 64, "max_total_tokens": 2048, "chunked_prefill_size": 256,
           "dtype": "bfloat16"}  # fmt: skip
MODELS = {family: (changes, {}) for family, (changes, _) in FAMILIES.items()} | {
    "qwen3_next": (VLLM_FAMILIES["qwen3_next"][0] | {"full_attention_interval": INTERVAL}, STATES),
    "deepseek_v32": ({"index_head_dim": 128}, INDEXED),
}
POOLS = {
    "llama": {"kv"}, "laguna": {"kv", "swa"}, "qwen3_next": {"kv", "mamba"},
    "deepseek_v32": {"kv", "indexer"},
}  # fmt: skip
LENGTHS = {"llama": (6, 400), "laguna": (6, 400), "qwen3_next": (4, 100), "deepseek_v32": (4, 200)}
"""Lives, and steps of each: pages of one token take longer."""
CAPABILITIES = {"deepseek_v32": (9, 0)}


def traffic(family, directory, lives, steps, **extra):
    """The process, and where its counts will be."""
    changes, engine = MODELS[family]
    changed_model(family, **SHAPE, **changes).save_pretrained(directory / "model")
    small = TIERS | SMALL | {"hicache_ratio": 2.0} | engine
    given, answers = directory / "case.json", directory / "answers.json"
    store = {"storage": f"file://{directory}/store?quota={64 if engine else 8}MiB"}
    given.write_text(
        json.dumps(
            {
                "engine": case(directory / "model", None, [])["engine"] | small,
                "extra": EXTRA | store | extra, "seed": 1, "lives": lives, "steps": steps,
                "capability": CAPABILITIES.get(family),
            }
        )
    )  # fmt: skip
    paths = os.pathsep.join(map(str, [ROOT / "src", HERE, HERE / "sglang_cpu"]))
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
    damage = [] if STATES in MODELS[family] else ["kv damaged"]
    for event in (
        "retracted", "aborted", "cached_tokens", *damage,
        *(f"{pool} {event}" for pool in POOLS[family] for event in ("stored", "loaded")),
    ):  # fmt: skip
        assert counts.get(event, 0) >= 5, (event, counts)
    assert counts["checked_bytes"] > 1 << (26 if STATES in MODELS[family] else 28)
    assert (counts.get("checked_states", 0) > 1000) == ("mamba" in POOLS[family])
    assert (counts.get("checked_index_rows", 0) > 10_000) == ("indexer" in POOLS[family])


@pytest.mark.parametrize(
    ("family", "bug"), [("llama", "PageBefore"), ("deepseek_v32", "IndexBefore")]
)
def test_a_page_that_comes_back_under_another_name_is_seen(family, bug, tmp_path):
    process, _ = traffic(family, tmp_path, 2, 100, module_path="sglang_seeded", class_name=bug)
    with pytest.raises(AssertionError, match=r"attention of layer \d would read \d+ wrong tokens"):
        ended(process)
