"""DeepSeek-V3.2 and GLM's model with the same attention, as their formulas say, in float64.

Owns the definition that Hugging Face's modules and our paged one are both compared with: MLA with
keys and values written out for every head, and an indexer that chooses which tokens they are of.
Must not share code with the engine, and knows of Hugging Face only how a checkpoint names its
tensors and its settings.
"""

import math
from collections.abc import Mapping

import numpy as np

from tests.oracles.common import (
    Array,
    Config,
    Ints,
    Weights,
    frequencies,
    highest,
    rms_norm,
    sigmoid,
    softmax,
    turn,
)

NORM_EPS = 1e-6
"""Of the norms inside attention and indexer, whatever the configuration says of the others."""


def forward(tensors: Mapping[str, Array], config: Config, tokens: Ints) -> Array:
    """tensors: by the names of the checkpoint. tokens: [T]. Returns logits [T, vocab]."""
    assert config.hidden_act == "silu"
    weights, eps = Weights(tensors), config.rms_norm_eps
    x = weights["model.embed_tokens.weight"][tokens]
    selection: list[Ints] = []
    for layer in range(config.num_hidden_layers):
        part = weights.of(f"model.layers.{layer}")
        y = rms_norm(x, eps) * part["input_layernorm.weight"]
        low = part.project("self_attn.q_a_proj", y)
        low = rms_norm(low, NORM_EPS) * part["self_attn.q_a_layernorm.weight"]
        if selects(config, layer):
            selection = selected(part.of("self_attn.indexer"), config, y, low)
        x = x + attention(part.of("self_attn"), config, y, low, selection)
        y = rms_norm(x, eps) * part["post_attention_layernorm.weight"]
        dense = config.mlp_layer_types[layer] == "dense"
        x = x + (mlp(part.of("mlp"), y) if dense else mixture(part.of("mlp"), config, y))
    return weights.project("lm_head", rms_norm(x, eps) * weights["model.norm.weight"])


def selects(config: Config, layer: int) -> bool:
    """One layer of GLM's that does not select attends to what the layer before it does."""
    return config.model_type == "deepseek_v32" or config.indexer_types[layer] == "full"


def attention(
    weights: Weights, config: Config, x: Array, low: Array, selection: list[Ints]
) -> Array:
    """x [T, hidden], low [T, rank] -> [T, hidden]."""
    count, heads = len(x), config.num_attention_heads
    rank, plain = config.kv_lora_rank, config.qk_nope_head_dim
    turns, gain = turns_of(config)
    queries = weights.project("q_b_proj", low).reshape(count, heads, -1)
    narrow = weights.project("kv_a_proj_with_mqa", x)
    latents = rms_norm(narrow[:, :rank], NORM_EPS) * weights["kv_a_layernorm.weight"]
    # One rotated part for all heads; the rest of a key and the value come of the latent.
    rotated = [neighbours(row, t * turns) * gain for t, row in enumerate(narrow[:, rank:])]
    positional = np.array(rotated)
    wide = weights.project("kv_b_proj", latents).reshape(count, heads, -1)
    keys, values = wide[..., :plain], wide[..., plain:]
    out = np.empty((count, heads, config.v_head_dim))
    for t in range(count):
        seen = selection[t]
        logits = np.einsum("hd,shd->hs", queries[t, :, :plain], keys[seen])
        query = neighbours(queries[t, :, plain:], t * turns) * gain
        logits += query @ positional[seen].T
        shares = softmax(logits * score_scale(config), -1)
        out[t] = np.einsum("hs,shd->hd", shares, values[seen])
    return weights.project("o_proj", out.reshape(count, -1))


def selected(weights: Weights, config: Config, x: Array, low: Array) -> list[Ints]:
    """The lightning indexer. For every position the ``index_topk`` best of the tokens up to it:
    heads vote, with weights of any sign, by what is positive of their dot products."""
    heads, dim, rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
    turns, gain = turns_of(config)
    rotate = halves if config.model_type == "deepseek_v32" else neighbours

    def placed(y: Array, t: int) -> Array:
        """The first channels turn, the others stay."""
        return np.concatenate([rotate(y[..., :rope], t * turns) * gain, y[..., rope:]], -1)

    keys = weights.project("wk", x)
    keys = keys - keys.mean(-1, keepdims=True)
    keys = rms_norm(keys, NORM_EPS) * weights["k_norm.weight"] + weights["k_norm.bias"]
    keys = np.array([placed(key, t) for t, key in enumerate(keys)])
    queries = weights.project("wq_b", low).reshape(len(x), heads, dim)
    chosen = []
    for t, query in enumerate(queries):
        votes = np.maximum(placed(query, t) @ keys[: t + 1].T, 0) / math.sqrt(dim)
        scores = weights.project("weights_proj", x[t]) / math.sqrt(heads) @ votes
        chosen.append(highest(scores, config.index_topk))
    return chosen


def neighbours(x: Array, angles: Array) -> Array:
    """x [..., d]: channels 2i and 2i + 1 are a pair."""
    return np.stack(turn(x[..., 0::2], x[..., 1::2], angles), -1).reshape(x.shape)


def halves(x: Array, angles: Array) -> Array:
    """x [..., d]: channels i and i + d/2 are a pair."""
    first, second = np.split(x, 2, -1)
    return np.concatenate(turn(first, second, angles), -1)


def turns_of(config: Config) -> tuple[Array, float]:
    """Angles per position, and what YaRN multiplies cosines and sines by."""
    rope = config.rope_parameters
    turns = frequencies(rope, config.qk_rope_head_dim)
    if rope["rope_type"] == "default":
        return turns, 1.0
    whole = rope.get("mscale_all_dim")
    if not (rope.get("mscale") and whole):
        return turns, sharpness(rope["factor"], 1)
    return turns, sharpness(rope["factor"], rope["mscale"]) / sharpness(rope["factor"], whole)


def score_scale(config: Config) -> float:
    """A context that YaRN has stretched wants a sharper softmax."""
    scale = 1 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return scale
    return scale * sharpness(rope["factor"], rope.get("mscale_all_dim", 0)) ** 2


def sharpness(factor: float, mscale: float) -> float:
    return 1 + 0.1 * mscale * math.log(factor)


def mlp(weights: Weights, x: Array) -> Array:
    gate, up = weights.project("gate_proj", x), weights.project("up_proj", x)
    return weights.project("down_proj", gate * sigmoid(gate) * up)


def mixture(weights: Weights, config: Config, x: Array) -> Array:
    """x [T, hidden] -> [T, hidden]: the shared experts' and the routed ones'."""
    out = mlp(weights.of("shared_experts"), x)
    for t, score in enumerate(sigmoid(weights.project("gate", x))):
        # A learned bias helps to choose experts; it does not weigh them.
        chosen = routed(config, score + weights["gate.e_score_correction_bias"])
        shares = score[chosen] * config.routed_scaling_factor
        if config.norm_topk_prob:
            shares = shares / (score[chosen].sum() + 1e-20)
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = np.split(weights["experts.gate_up_proj"][expert] @ x[t], 2)
            inner = gate * sigmoid(gate) * up
            out[t] += share * (weights["experts.down_proj"][expert] @ inner)
    return out


def routed(config: Config, biased: Array) -> Ints:
    """Experts of the best groups alone; a group is worth its two best."""
    grouped = biased.reshape(config.n_group, -1)
    worth = np.sort(grouped, -1)[:, -2:].sum(-1)
    allowed = np.full_like(grouped, -np.inf)
    best = highest(worth, config.topk_group)
    allowed[best] = grouped[best]
    return highest(allowed.reshape(-1), config.num_experts_per_tok)
