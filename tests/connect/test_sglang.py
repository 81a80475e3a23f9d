"""The back end in the released SGLang, on a CPU: what a prompt gets back from the store is what it
would compute. SGLang has no build for a CPU alone: ``sglang_cpu`` has what it lacks, and says so.
"""

import json
import os

import pytest

from tests.connect.environment import HERE, Lives, cached_of, tokens_of
from tests.connect.test_vllm import SHAPE, damaged
from tests.fixtures.models import changed_model, random_prompt
from tests.fixtures.tiny_configs import FULL, SLIDING, types
from tests.meta.source import ROOT

pytestmark = pytest.mark.connect

PROMPT, WHOLE = 450, 448
"""Tokens of a prompt, and of its whole pages of 16, but for the last token."""
FAMILIES = {
    "llama": ({}, 28),
    "laguna": (
        {
            "sliding_window": 64, "mlp_layer_types": ["dense"] * 4,
            **types(SLIDING, FULL, SLIDING, FULL),
        },
        28 + 4,
    ),
}  # fmt: skip
"""What differs, and how many pages a prompt leaves in the store: those of KV, and of a window."""
TIERS = {
    "enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct", "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
}  # fmt: skip


def case(model, store, prompts, pages=None, **engine):
    extra = {
        "backend_name": "strata", "module_path": "stratakv.connect.sglang",
        "class_name": "StrataStorage", "interface_v1": 1, "prefetch_threshold": 16,
        "storage": f"file://{store}?quota=512MiB",
    }  # fmt: skip
    tiers = TIERS | {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }
    return {
        "engine": {
            "model_path": str(model), "skip_tokenizer_init": True, "device": "cpu",
            "attention_backend": "torch_native", "sampling_backend": "pytorch",
            "dtype": "float32", "page_size": 16, "max_total_tokens": 1024, "context_length": 1024,
            "max_running_requests": 2, "disable_overlap_schedule": True,
            "grammar_backend": "none", "log_level": "warning", "random_seed": 1,
            "mem_fraction_static": 0.3, "enable_cache_report": True,
            **({} if store is None else tiers), **engine,
        },
        "prompts": prompts,
        "tokens": 8,
        "stored": None if pages is None else {"directory": str(store), "pages": pages},
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_store_gives_back_is_what_would_be_computed(family, tmp_path):
    model, store = tmp_path / "model", tmp_path / "store"
    changes, pages = FAMILIES[family]
    changed_model(family, **SHAPE, **changes).save_pretrained(model)
    paths = os.pathsep.join([str(ROOT / "src"), str(HERE), str(HERE / "sglang_cpu")])
    lives = Lives("sglang_life.py", tmp_path, PYTHONPATH=paths, TORCHDYNAMO_DISABLE="1")
    asked = [random_prompt(seed, PROMPT) for seed in range(3)]
    (plain,) = lives.live(case(model, None, asked))
    (first,) = lives.live(case(model, store, asked, 3 * pages))
    assert cached_of(first) == [0] * 3
    assert tokens_of(first) == tokens_of(plain)
    nothing = {"random_seed": 2, "log_level": "error", "max_running_requests": 1, "port": 31000}
    (restarted,) = lives.live(case(model, store, asked, **nothing))
    assert cached_of(restarted) == [WHOLE] * 3
    assert tokens_of(restarted) == tokens_of(plain)
    (spoilt,) = lives.live(case(model, damaged(store, tmp_path / "damaged"), asked))
    assert cached_of(spoilt) == [0] * 3
    assert tokens_of(spoilt) == tokens_of(plain)
    if family == "llama":
        (other,) = lives.live(case(model, store, asked, moe_runner_backend="triton"))
        assert cached_of(other) == [0] * 3
