# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""A life of vLLM over our tier or its own, for ``bench connect``.

Owns vLLM's settings in it. Runs in vLLM's environment."""

import os
import time
from collections.abc import Mapping
from typing import Any

from stratakv.bench.connect_lives import HOST_BYTES, PAGE_TOKENS, Life, Lived, measure


def live(life: Life) -> Lived:
    # Scheduler and model in this process, so that it can be seen when the tiers have ended.
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING",
        VLLM_CPU_KVCACHE_SPACE="1",
    )  # fmt: skip
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - after its settings
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    llm = LLM(kv_transfer_config=KVTransferConfig(**_transfer(life)), **_arguments(life))
    core = llm.llm_engine.engine_core.engine_core
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    def answer(tokens: list[int]) -> int:
        (one,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        return int(one.num_cached_tokens)

    lived = measure(life, answer, lambda since_s: _settle(core, since_s))
    llm.llm_engine.engine_core.shutdown()
    return lived


def _arguments(life: Life) -> Mapping[str, Any]:
    return {
        "model": life.model, "skip_tokenizer_init": True, "enforce_eager": True,
        "max_num_seqs": 2, "max_model_len": life.prompt_tokens + PAGE_TOKENS,
        "enable_prefix_caching": True, "disable_log_stats": True,
        **({"dtype": "float32", "block_size": PAGE_TOKENS} if life.stand_ins else {}),
    }  # fmt: skip


def _transfer(life: Life) -> Mapping[str, Any]:
    """vLLM's own tier has no quota."""
    extra: dict[str, Any] = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": HOST_BYTES}
    if life.stand_ins:
        extra |= {"spec_name": "CpuTieringSpec", "spec_module_path": "cpu_tiering"}
    if life.tier == "own":
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": life.directory}]
        return {
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }  # fmt: skip
    quota = f"?quota={life.quota_bytes}B" if life.quota_bytes else ""
    url = f"file://{life.directory}{quota}"
    extra["secondary_tiers"] = [
        {"type": "StrataTier", "module_path": "stratakv.connect.vllm", "storage": url}
    ]
    return {
        "kv_connector": "StrataConnector", "kv_connector_module_path": "stratakv.connect.vllm",
        "kv_role": "kv_both", "kv_connector_extra_config": extra,
    }  # fmt: skip


def _settle(core: Any, since_s: float) -> float:  # noqa: ANN401 - vLLM's EngineCore
    """Step until the tiers have nothing under way."""
    manager = core.scheduler.connector.connector_scheduler.manager
    while manager.has_pending_work():
        core.step()
        time.sleep(0.0005)
    return time.time() - since_s
