# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""What the installed SGLang does, tried where our back end relies on it, and its own parser of
flags.

Owns these trials. Runs in SGLang's environment; starts nothing and reads no weights.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from stratakv.connect.namespace import processing_field
from stratakv.connect.remote_code import refuse_code_elsewhere
from stratakv.connect.sglang_fields import check_settings


def problems() -> Sequence[str]:
    """What it does in another way."""
    found: list[str] = []
    try:
        sent = PoolTransfer(PoolName.KV, host_indices=None, keys=["a"])
        if sent.hit_policy != PoolHitPolicy.ALL_PAGES:
            found.append("a pool is no longer asked for all pages unless it says otherwise")
        PoolTransferResult(1, {str(PoolName.KV): 1}, [1])
    except TypeError as error:
        found.append(f"transfers are made in another way: {error}")
    if str(PoolName.KV) != "kv":
        found.append(f"a pool's name is {PoolName.KV!s} as text")

    one, pool = SimpleNamespace(), object()
    HiCacheStorage.register_mem_pool_host(one, pool)
    if vars(one).get("mem_pool_host") is not pool:
        found.append("a back end is no longer given the pool of KV by register_mem_pool_host")
    return found


def parsed_flags(words: Sequence[str]) -> tuple[Mapping[str, Any], Sequence[str]]:
    """What SGLang's own parser makes of the words behind ``sglang.launch_server``, and which it
    does not know. It ends the process where it does not take them."""
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415 - much to load

    parser = argparse.ArgumentParser(prog="sglang.launch_server")
    ServerArgs.add_cli_args(parser)
    given, rest = parser.parse_known_args(words)
    return vars(given), rest


def check_flags(values: Mapping[str, Any]) -> None:
    """ConfigError for what the back end would refuse at the start."""
    check_settings(values)
    if (tokenizer := values["tokenizer_path"]) is not None:
        processing_field("--tokenizer-path", tokenizer, values["model_path"])
    draft = values["speculative_draft_model_path"]
    if draft is not None and Path(draft).is_dir():
        refuse_code_elsewhere("--speculative-draft-model-path", Path(draft))
