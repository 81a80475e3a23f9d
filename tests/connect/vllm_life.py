"""Lives of a vLLM engine in one process: prompts in, tokens and what was cached out.

Owns nothing that lasts. Runs in vLLM's environment, as ``vllm_life.py CASES.json ANSWERS.json``. A
case has ``engine`` (arguments of ``LLM``), ``kv_transfer_config`` or null, ``prompts`` (token
ids) and ``tokens``; each is a life of its own, which begins with empty tiers of its own.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
)

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

from stratakv.testing.patience import wait_until


def live(case):
    given = case["kv_transfer_config"]
    transfer = None if given is None else KVTransferConfig(**given)
    llm = LLM(kv_transfer_config=transfer, **case["engine"])
    core = llm.llm_engine.engine_core.engine_core
    sampling = SamplingParams(
        temperature=0, max_tokens=case["tokens"], ignore_eos=True, detokenize=False
    )
    answers = []
    for prompt in case["prompts"]:
        (one,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        answers.append(
            {
                "cached": one.num_cached_tokens,
                "tokens": list(one.outputs[0].token_ids),
            }
        )
        settle(core)
    block = llm.llm_engine.vllm_config.cache_config.block_size
    counts = {} if transfer is None else dict(tiers_of(core)[0].totals)
    ensure_kv_transfer_shutdown()
    llm.llm_engine.engine_core.shutdown()
    del llm, core
    cleanup_dist_env_and_memory()
    gc.collect()
    return {"answers": answers, "counts": counts, "block": block}


def tiers_of(core):
    return core.scheduler.connector.connector_scheduler.manager.secondary_tiers


def settle(core):
    """Step until the tiers have nothing under way."""
    connector = core.scheduler.connector
    if connector is not None:
        manager = connector.connector_scheduler.manager
        wait_until(lambda: core.step() and not manager.has_pending_work(), "the tiers' end")


if __name__ == "__main__":
    torch.cpu._init_amx()  # matrix units must be asked for before the first bfloat16 product
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([live(case) for case in cases]))
