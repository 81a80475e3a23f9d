"""A DeepSeek-V4 causal LM on our pages, under Hugging Face's parameter names.

Owns the layer stack and taking weights over from a Hugging Face state dict, without a copy. Must
not know requests or page ids. Source: transformers 5.23, ``DeepseekV4ForCausalLM``.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from stratakv.core.ids import LayerId
from stratakv.engine.deepseek.v4_attention import V4Attention, V4Pages
from stratakv.engine.deepseek.v4_config import V4Config
from stratakv.engine.deepseek.v4_mhc import HyperConnection, HyperHead
from stratakv.engine.deepseek.v4_moe import SparseBlock
from stratakv.engine.deepseek.v4_norm import WideRMSNorm
from stratakv.engine.deepseek.v4_step import V4Step


class V4Layer(nn.Module):
    def __init__(self, config: V4Config, layer: int) -> None:
        super().__init__()
        self.self_attn = V4Attention(config, layer)
        self.mlp = SparseBlock(config, layer)
        self.input_layernorm = WideRMSNorm(config.hidden, config.norm_eps)
        self.post_attention_layernorm = WideRMSNorm(config.hidden, config.norm_eps)
        self.attn_hc = HyperConnection(config)
        self.ffn_hc = HyperConnection(config)

    def forward(self, streams: torch.Tensor, pages: V4Pages, step: V4Step) -> torch.Tensor:
        """streams [T, N, hidden] -> the same."""
        mixing = self.attn_hc(streams)
        attended = self.self_attn(self.input_layernorm(mixing.block_input), pages, step)
        streams = mixing.spread(attended, streams)
        mixing = self.ffn_hc(streams)
        output = self.mlp(self.post_attention_layernorm(mixing.block_input), step.token_ids)
        return mixing.spread(output, streams)


class V4Stack(nn.Module):
    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(V4Layer(config, layer) for layer in range(len(config.rates)))
        self.norm = WideRMSNorm(config.hidden, config.norm_eps)
        self.hc_head = HyperHead(config)
        self.streams = config.streams

    def forward(self, pages: Sequence[V4Pages], step: V4Step) -> torch.Tensor:
        """pages: per layer. Returns streams [T, N, hidden] after the last layer."""
        embedded = self.embed_tokens(step.token_ids)
        streams = embedded[:, None].expand(-1, self.streams, -1)
        for index, (layer, own) in enumerate(zip(self.layers, pages, strict=True)):
            if step.gate is not None:
                step.gate.wait(LayerId(index))
            streams = layer(streams, own, step)
        return streams


class V4Model(nn.Module):
    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.model = V4Stack(config)
        self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False)

    @classmethod
    def of(cls, config: V4Config, weights: Mapping[str, torch.Tensor]) -> "V4Model":
        """``weights``: ``state_dict()`` of Hugging Face's module; its tensors become ours.
        RuntimeError names what is missing, left over or of another shape."""
        with torch.device("meta"):
            model = cls(config)
        model.load_state_dict(weights, strict=True, assign=True)
        return model.eval().requires_grad_(requires_grad=False)

    def forward(self, pages: Sequence[V4Pages], step: V4Step) -> torch.Tensor:
        return self.model(pages, step)

    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        """streams [S, N, hidden] -> float32 [S, vocab]."""
        return self.lm_head(self.model.norm(self.model.hc_head(streams))).float()
