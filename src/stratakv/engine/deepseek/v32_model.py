"""DeepSeek-V3.2, and GLM's model of the same build, over our pages.

Owns the order of the layers and the taking over of weights. Parameters are named as in Hugging
Face's module, so that its state dict fits as it is. Must not allocate, batch or sample.
"""

import copy
import math
from collections.abc import Iterator

import torch
from torch import nn
from transformers import DeepseekV32Config, GlmMoeDsaConfig, PreTrainedModel

from stratakv.core.ids import LayerId
from stratakv.engine.deepseek.common_layers import GatedMlp, RMSNorm, activation
from stratakv.engine.deepseek.common_rope import Rope
from stratakv.engine.deepseek.common_shard import heads_split, rank_weights, sum_over_ranks
from stratakv.engine.deepseek.v32_attention import SparseLatentAttention
from stratakv.engine.deepseek.v32_config import V32Config
from stratakv.engine.deepseek.v32_moe import Moe
from stratakv.engine.deepseek.v32_step import Selection, V32Step


class V32Layer(nn.Module):
    """Attention, then experts or a dense feed-forward, each on a normed residual stream."""

    def __init__(self, config: V32Config, layer: LayerId, scale: float) -> None:
        super().__init__()
        hidden, kinds = config.hidden_size, config.mlp_layer_types
        assert kinds is not None, "the configuration fills it"
        self.self_attn = SparseLatentAttention(config, layer, scale)
        if kinds[layer] == "sparse":
            self.mlp: nn.Module = Moe(config)
        else:
            self.mlp = GatedMlp(hidden, config.intermediate_size, activation(config.hidden_act))
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, step: V32Step, inherited: Selection | None
    ) -> tuple[torch.Tensor, Selection]:
        """x: [T, hidden]. Returns [T, hidden] and what its queries have attended to."""
        attended, selection = self.self_attn(self.input_layernorm(x), step, inherited)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), selection


class Trunk(nn.Module):
    """Everything before the output head."""

    def __init__(self, config: V32Config) -> None:
        super().__init__()
        scale = score_scale(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            V32Layer(config, LayerId(index), scale) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: torch.Tensor, step: V32Step) -> torch.Tensor:
        """tokens: int64 [T], packed. Returns [T, hidden], not yet normed."""
        x, selection = self.embed_tokens(tokens), None
        for index, layer in enumerate(self.layers):
            if step.gate is not None:
                step.gate.wait(LayerId(index))
            x, selection = layer(x, step, selection)
        return x


class DeepSeekV32(nn.Module):
    """The causal language model."""

    def __init__(self, config: V32Config) -> None:
        super().__init__()
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor, step: V32Step) -> torch.Tensor:
        """tokens: int64 [T], packed. Returns [T, hidden], not yet normed."""
        return self.model(tokens, step)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x: [S, hidden], not yet normed. Returns float32 [S, vocab]."""
        return self.lm_head(self.model.norm(x)).float()


def take_over(module: PreTrainedModel, ranks: int = 1) -> tuple[DeepSeekV32, Rope]:
    """The same model on the same tensors: weights are shared, not copied, whatever their dtypes.
    Of several ranks each gets its share, as ``load_model`` has split it.

    AssertionError for another model's module. ``check_v32`` says which configurations run.
    """
    config = module.config
    assert isinstance(config, DeepseekV32Config | GlmMoeDsaConfig), type(config).__name__
    heads = heads_split(config.to_dict(), ranks)
    with torch.device("meta"):
        model = DeepSeekV32(_rank_config(config, ranks, heads=heads))
    model.load_state_dict(rank_weights(module), assign=True)
    if ranks > 1:
        sum_over_ranks(_summed_parts(model, heads=heads))
    return model.eval().requires_grad_(requires_grad=False), Rope.of(config)


def _rank_config(config: V32Config, ranks: int, *, heads: bool) -> V32Config:
    """The configuration of a model that is one rank's share; the indexer is nobody's share."""
    share = copy.deepcopy(config)
    share.intermediate_size //= ranks
    share.moe_intermediate_size //= ranks
    if heads:
        share.num_attention_heads //= ranks
    return share


def _summed_parts(model: DeepSeekV32, *, heads: bool) -> Iterator[nn.Module]:
    for layer in model.model.layers:
        assert isinstance(layer, V32Layer)
        yield layer.mlp
        if heads:
            yield layer.self_attn.o_proj


def score_scale(config: V32Config) -> float:
    """1 / sqrt(query dim); a context that YaRN has stretched wants a sharper softmax."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    assert rope is not None, "the configuration fills it"
    sharpness = rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not sharpness or rope["factor"] <= 1:
        return scale
    return scale * (0.1 * sharpness * math.log(rope["factor"]) + 1.0) ** 2
