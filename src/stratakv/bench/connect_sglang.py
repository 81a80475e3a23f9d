# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""A life of SGLang over our back end or its own ``file``, for ``bench connect``.

Owns SGLang's settings in it. Runs in SGLang's environment."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratakv.bench.connect_lives import (
    HOST_BYTES,
    PAGE_TOKENS,
    Life,
    Lived,
    measure,
    wait_until_quiet,
)


def live(life: Life) -> Lived:
    import sglang  # noqa: PLC0415 - takes seconds

    engine = sglang.Engine(**engine_arguments(life))
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}

    def answer(tokens: list[int]) -> int:
        one = engine.generate(input_ids=tokens, sampling_params=sampling)
        return int(one["meta_info"]["cached_tokens"])

    # SGLang writes beside, in processes of its own: the directory alone says when it has ended.
    lived = measure(life, answer, lambda since_s: wait_until_quiet(Path(life.directory), since_s))
    engine.shutdown()
    return lived


def engine_arguments(life: Life) -> Mapping[str, Any]:
    """Of ``Engine``, and of ``ServerArgs``."""
    on_cpu = {
        "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch",
        "dtype": "float32", "disable_overlap_schedule": True, "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct", "max_total_tokens": 4 * life.prompt_tokens,
        "mem_fraction_static": 0.3, "grammar_backend": "none", "hicache_ratio": 3.0,
    }  # fmt: skip
    return {
        "model_path": life.model, "skip_tokenizer_init": True, "page_size": PAGE_TOKENS,
        "context_length": life.prompt_tokens + PAGE_TOKENS, "max_running_requests": 2,
        "log_level": "warning", "random_seed": 1, "enable_cache_report": True,
        "enable_hierarchical_cache": True,
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete", **_storage(life),
        **(on_cpu if life.stand_ins else {"hicache_size": HOST_BYTES >> 30}),
    }  # fmt: skip


def _storage(life: Life) -> Mapping[str, str]:
    return {
        "hicache_storage_backend": "file" if life.tier == "own" else "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(storage_config(life)),
    }


def storage_config(life: Life) -> dict[str, Any]:
    """Of its back end."""
    if life.tier == "own":
        extra = {"file_storage_path": life.directory, "prefetch_threshold": PAGE_TOKENS}
        if life.quota_bytes:
            extra["max_size"] = str(life.quota_bytes)
        return extra
    quota = f"?quota={life.quota_bytes}B" if life.quota_bytes else ""
    return {
        "backend_name": "strata", "module_path": "stratakv.connect.sglang",
        "class_name": "StrataStorage", "interface_v1": 1, "prefetch_threshold": PAGE_TOKENS,
        "storage": f"file://{life.directory}{quota}",
    }  # fmt: skip
