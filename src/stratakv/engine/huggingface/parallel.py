"""One rank's share of a model's weights, as Hugging Face's loader splits them.

Owns the plan that the loader is given, and the refusal of a model that ranks cannot share. Ranks
must be in one ``torch.distributed`` group before weights are read. What each rank then caches is in
``spec.sharding``; must not know pages.
"""

import re
from collections.abc import Mapping
from typing import Final, cast

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.distributed import DistributedConfig

from stratakv.engine.deepseek.common_shard import allowed_ranks, own_rules, own_shard_refusal
from stratakv.engine.deepseek.refused import OWN_TYPES
from stratakv.engine.huggingface.model_facts import DTYPES, ModelFacts
from stratakv.spec.sharding import attention_splits, sharding_refusal

EXPERT_ROW_BYTES: Final = 16
_EXPERT_WIDTHS: Final = ("moe_intermediate_size", "expert_ffn_hidden_size")
_EXPERT_COUNTS: Final = ("num_local_experts", "num_experts", "moe_num_experts")
_LATENT_HEADS: Final = frozenset({"axk1", "deepseek_v3", "youtu"})
"""Model types whose plan leaves out attention, and whose modules split it as DeepSeek-V2's do."""
_WHOLE: Final = "replicate"
_READS_EMBEDDING: Final = frozenset({"gemma4"})
"""Whole models whose forward looks into the embedding, where it expects all of it."""
_EMBEDDING: Final = re.compile(r"(embed_tokens|lm_head)$")
"""With the output layer, which may have the same weights."""
_ATTENTION: Final = re.compile(r"\.(self_attn|attention)(\.|$)")


def tp_refusal(facts: ModelFacts, ranks: int) -> str | None:
    """Why ``ranks`` cannot share a model; None where they can. Asked before weights are read."""
    if ranks == 1:
        return None
    if facts.config.get("quantization_config") is not None:
        return "its weights are quantized; allowed with more than 1 are plain ones"
    if reason := sharding_refusal(facts.config, ranks):
        return reason
    if facts.config["model_type"] in OWN_TYPES:
        return own_shard_refusal(facts, ranks)
    return _expert_refusal(facts, ranks)


def _expert_refusal(facts: ModelFacts, ranks: int) -> str | None:
    """torch's grouped products want rows of 16 bytes, here of one rank's part of an expert."""
    config = facts.config
    unit = EXPERT_ROW_BYTES // DTYPES[facts.dtype].itemsize
    names = [name for name in _EXPERT_WIDTHS if config.get(name)]
    if not names and any(config.get(name) for name in _EXPERT_COUNTS):
        names = ["intermediate_size"]
    for name in names:
        width = config.get(name)
        if isinstance(width, int) and width % (unit * ranks):
            return (
                f"each rank's part of {name} {width}, the width of an expert, must be a multiple "
                f"of {unit}; {allowed_ranks(width, unit)}"
            )
    return None


def device_refusal(ranks: int, device: torch.device) -> str | None:
    """Why ``ranks`` of this machine cannot run on ``device``; None where they can. Asked before
    they meet. Hugging Face's loader puts a share on an accelerator wherever it sees one, that of
    the number in ``LOCAL_RANK``."""
    if ranks == 1:
        return None
    seen = torch.accelerator.current_accelerator(check_available=True)
    found = "cpu" if seen is None else seen.type
    if found == device.type:
        return None
    return (
        f"ranks would load their weights to {found}, and run on {device.type}; allowed is --tp 1, "
        f"or to hide the accelerator from them (CUDA_VISIBLE_DEVICES= where it is cuda)"
    )


def loading(config: PretrainedConfig, facts: ModelFacts, ranks: int) -> dict[str, object]:
    """What ``from_pretrained`` must be given beside the usual, so that it reads one rank's share.
    ``device_refusal`` must have been asked."""
    if ranks == 1:
        return {}
    assert dist.get_world_size() == ranks, f"{dist.get_world_size()} processes, not {ranks}"
    # An empty plan would split nothing; none is the model's own.
    rules = _rules(config, facts, ranks) or None
    return {"distributed_config": DistributedConfig(tp_size=ranks, tp_plan=rules)}


def _rules(config: PretrainedConfig, facts: ModelFacts, ranks: int) -> dict[str, str]:
    """What is to be split otherwise than Hugging Face's plan has it."""
    name, splits = str(facts.config["model_type"]), attention_splits(facts.config, ranks)
    if name in OWN_TYPES:
        return own_rules(facts, ranks)
    rules: dict[str, str] = {}
    if name in _LATENT_HEADS:
        queries = "q_b_proj" if facts.config.get("q_lora_rank") else "q_proj"
        heads = {queries: "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
        rules = {f"model.layers.*.self_attn.{part}": rule for part, rule in heads.items()}
    if not splits:
        rules = _whole(config, _ATTENTION)
    if config.model_type in _READS_EMBEDDING:
        rules |= _whole(config, _EMBEDDING)
    return rules


def _whole(config: PretrainedConfig, parts: re.Pattern[str]) -> dict[str, str]:
    """Rules by which every rank has all weights of what the plan would split of ``parts``."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    plan = cast("Mapping[str, str]", model.tp_plan)
    return {name: _WHOLE for name in plan if parts.search(name)}
