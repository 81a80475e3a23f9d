# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""What the installed vLLM does, tried where our tier relies on it, and its own parser of flags.

Owns these trials. Runs in vLLM's environment; starts nothing and reads no weights.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import JobResult

from stratakv.connect.namespace import processing_field
from stratakv.connect.remote_code import refuse_code_elsewhere
from stratakv.connect.vllm import OFF, PAGES, StrataTier
from stratakv.connect.vllm_fields import check_config_path, refuse
from stratakv.core.errors import ConfigError


def problems() -> Sequence[str]:
    """What it does in another way."""
    found: list[str] = []
    block = bytes(range(32))
    key = make_offload_key(block, 3)
    if get_offload_block_hash(key) != block or get_offload_group_idx(key) != 3:
        found.append("a key is no longer a block's hash and its group")
    try:
        JobResult(job_id=1, success=False, successful_keys=(), transfer_time=0.0, transfer_bytes=0)
        stats = OffloadingConnectorStats()
        stats.increase_counter(PAGES, 1, ("stored",))
        stats.set_gauge(OFF, 1)
        StrataTier.build_metric_definitions({})
    except (TypeError, ValueError, KeyError) as error:
        found.append(f"results or metrics are made in another way: {error}")
    return found


def parsed_flags(words: Sequence[str]) -> tuple[Mapping[str, Any], Sequence[str]]:
    """What vLLM's own parser makes of the words behind ``vllm serve``, and which it does not know.
    It ends the process where it does not take them."""
    from vllm.entrypoints.cli.serve import ServeSubcommand  # noqa: PLC0415 - much to load
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    verbs = FlexibleArgumentParser(prog="vllm").add_subparsers()
    given, rest = ServeSubcommand().subparser_init(verbs).parse_known_args(words)
    return vars(given), rest


def check_flags(values: Mapping[str, Any]) -> None:
    """ConfigError for what the tier would refuse at the start, or could not work beside."""
    refuse(
        lora=bool(values["enable_lora"]),
        formats=[str(values["load_format"])],
        algorithm=str(values["prefix_caching_hash_algo"]),
    )
    if (tokenizer := values["tokenizer"]) is not None:
        processing_field("--tokenizer", tokenizer, str(values["model_tag"]))
    if (configured := values["hf_config_path"]) is not None:
        check_config_path(configured)
    match values["speculative_config"]:
        case {"model": str(draft)} if Path(draft).is_dir():
            refuse_code_elsewhere("--speculative-config", Path(draft))
        case _:
            pass
    if values["enable_prefix_caching"] is False:
        raise ConfigError(
            "--enable-prefix-caching is off: allowed is prefix caching, which asks the tiers"
        )
