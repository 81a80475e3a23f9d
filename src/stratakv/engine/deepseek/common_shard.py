"""One rank's share of our own DeepSeek modules.

Owns which of their weights are split, and the sums over ranks that make up for it: heads of
attention and the inner width of feed-forwards and experts, each summed once where it enters the
residual stream. Everything else every rank has whole and computes alike, to the bit: embeddings,
latents, compressed entries, and the whole indexer, so that all ranks attend to the same tokens.
Must not load weights (``engine.huggingface.parallel``), nor know pages.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from stratakv.engine.huggingface.model_facts import ModelFacts
from stratakv.spec.model_config import ModelConfig

_WHOLE: Final = "replicate"
_RULES: Final = {"model.embed_tokens": _WHOLE, "lm_head": _WHOLE}
_HEADS: Final = {
    "deepseek_v32": {"q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"},
    "glm_moe_dsa": {"q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"},
    "deepseek_v4": {
        "q_b_proj": "colwise", "o_a_proj": "colwise", "o_b_proj": "rowwise", "sinks": "colwise",
    },
}  # fmt: skip
"""By model type: the weights of attention that belong to heads, and how Hugging Face's loader names
the splitting by rows (columns of the transposed matrix) and by columns."""
_WIDTHS: Final = {
    "deepseek_v32": ("intermediate_size", "moe_intermediate_size"),
    "glm_moe_dsa": ("intermediate_size", "moe_intermediate_size"),
    "deepseek_v4": ("moe_intermediate_size",),
}
"""Fields whose value each rank has a part of."""
_SHARED_EXPERTS: Final = {
    "gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise",
}  # fmt: skip


def own_shard_refusal(facts: ModelFacts, ranks: int) -> str | None:
    """Why ranks cannot share a model that runs on a module of our own; None where they can."""
    config = ModelConfig(facts.config)
    for name in _WIDTHS[config.model_type]:
        width = config.integer(name, 0)
        if width % ranks:
            return f"{name} {width} does not divide by that; {allowed_ranks(width)}"
    return None


def allowed_ranks(width: int, unit: int = 1) -> str:
    """How many can share ``width``, where each has a multiple of ``unit``."""
    return "allowed is 1" if width % unit else f"allowed are the divisors of {width // unit}"


def own_rules(facts: ModelFacts, ranks: int) -> dict[str, str]:
    """What the loader must split otherwise than Hugging Face's plan has it."""
    name = str(facts.config["model_type"])
    split = heads_split(facts.config, ranks)
    heads = {
        f"model.layers.*.self_attn.{part}": rule if split else _WHOLE
        for part, rule in _HEADS[name].items()
    }
    shared = {
        f"model.layers.*.mlp.shared_experts.{part}": rule for part, rule in _SHARED_EXPERTS.items()
    }
    return {**_RULES, **heads, **shared}


def heads_split(fields: Mapping[str, object], ranks: int) -> bool:
    """Whether each rank has some heads; else all of them. V4 projects groups of heads together."""
    config = ModelConfig(fields)
    counts = (config.integer("num_attention_heads"), config.integer("o_groups", ranks))
    return not any(count % ranks for count in counts)


def rank_weights(module: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state dict with this rank's part of what is split; no copies."""
    return {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for name, tensor in module.state_dict().items()
    }


def sum_over_ranks(parts: Iterable[nn.Module]) -> None:
    """From here on each of ``parts`` says the sum of what it would say on every rank. All ranks
    must call them in one order. A bias is the first rank's to add."""
    for part in parts:
        own = dict(part.named_parameters(recurse=False))
        if "bias" in own and dist.get_rank() > 0:
            part.bias = nn.Parameter(torch.zeros_like(own["bias"]), requires_grad=False)
        part.register_forward_hook(_summed)


def _summed(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    del module, args
    dist.all_reduce(output)
    return output
