"""DeepSeek-V4 as its formulas say: tokens in, logits out, NumPy in float64.

Owns the definition that Hugging Face's module and our paged one are both compared with. One prompt,
no cache: what position t may see is what the loop over positions hands it. Must not share code with
the engine, and knows of Hugging Face only how a checkpoint names its tensors and its settings.
Sections are those of the DeepSeek-V4 report.
"""

import math
from collections.abc import Callable, Mapping

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

WINDOW_ONLY = "sliding_attention"
OVERLAPPING = "compressed_sparse_attention"


def forward(tensors: Mapping[str, Array], config: Config, tokens: Ints) -> Array:
    """tensors: by the names of the checkpoint. tokens: [T]. Returns logits [T, vocab]."""
    assert config.hidden_act == "silu"
    weights = Weights(tensors)
    # All n streams of the residual begin as the embedding.
    embedded = weights["model.embed_tokens.weight"][tokens]
    streams = np.stack([embedded] * config.hc_mult, axis=1)
    for layer in range(config.num_hidden_layers):
        streams = decoder_layer(weights.of(f"model.layers.{layer}"), config, layer, tokens, streams)
    head = weights.of("model.hc_head")
    raw = rms_norm(streams.reshape(len(tokens), -1), config.rms_norm_eps) @ head["hc_fn"].T
    shares = sigmoid(raw * head["hc_scale"] + head["hc_base"]) + config.hc_eps
    x = normed(np.einsum("tn,tnd->td", shares, streams), weights["model.norm.weight"], config)
    return weights.project("lm_head", x)


def decoder_layer(
    weights: Weights, config: Config, layer: int, tokens: Ints, streams: Array
) -> Array:
    """streams [T, n, hidden] -> [T, n, hidden]."""

    def attend(x: Array) -> Array:
        x = normed(x, weights["input_layernorm.weight"], config)
        return attention(weights.of("self_attn"), config, config.layer_types[layer], x)

    def feed(x: Array) -> Array:
        x = normed(x, weights["post_attention_layernorm.weight"], config)
        hashed = config.mlp_layer_types[layer] == "hash_moe"
        expert_ids = weights["mlp.gate.tid2eid"][tokens].astype(int) if hashed else None
        return mixture(weights.of("mlp"), config, x, expert_ids)

    streams = hyper_connected(weights.of("attn_hc"), config, streams, attend)
    return hyper_connected(weights.of("ffn_hc"), config, streams, feed)


def normed(x: Array, gain: Array, config: Config) -> Array:
    return rms_norm(x, config.rms_norm_eps) * gain


# Section 2.2: hyper-connections whose mixing matrix is doubly stochastic.


def hyper_connected(
    weights: Weights, config: Config, streams: Array, block: Callable[[Array], Array]
) -> Array:
    """What goes in is a sum over the n streams; what comes out is added to a mixture of them."""
    n, eps = config.hc_mult, config.hc_eps
    raw = rms_norm(streams.reshape(len(streams), -1), config.rms_norm_eps) @ weights["fn"].T
    scale, base = weights["scale"], weights["base"]
    into = sigmoid(scale[0] * raw[:, :n] + base[:n]) + eps
    out_of = 2 * sigmoid(scale[1] * raw[:, n : 2 * n] + base[n : 2 * n])
    logits = (scale[2] * raw[:, 2 * n :] + base[2 * n :]).reshape(-1, n, n)
    mixing = doubly_stochastic(softmax(logits, -1) + eps, config.hc_sinkhorn_iters, eps)
    result = block(np.einsum("tn,tnd->td", into, streams))
    mixed = np.einsum("tij,tid->tjd", mixing, streams)  # stream i goes into stream j
    return out_of[:, :, None] * result[:, None] + mixed


def doubly_stochastic(matrix: Array, rounds: int, eps: float) -> Array:
    """Sinkhorn and Knopp: columns and rows by turns are made to sum to one, columns last. The first
    round has no rows: a softmax has made them sum to one."""
    for number in range(rounds):
        if number > 0:
            matrix = matrix / (matrix.sum(-1, keepdims=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdims=True) + eps)
    return matrix


# Section 2.3: a window of latents, and compressed entries of everything before.


def attention(weights: Weights, config: Config, kind: str, x: Array) -> Array:
    """x [T, hidden] -> [T, hidden]."""
    count, heads, dim = len(x), config.num_attention_heads, config.head_dim
    turns = turns_of(config, "main" if kind == WINDOW_ONLY else "compress")
    low = normed(weights.project("q_a_proj", x), weights["q_a_norm.weight"], config)
    queries = weights.project("q_b_proj", low).reshape(count, heads, dim)
    queries = rms_norm(queries, config.rms_norm_eps)
    latents = normed(weights.project("kv_proj", x), weights["kv_norm.weight"], config)
    latents = np.array([rotate(latent, t, turns) for t, latent in enumerate(latents)])
    entries_at = None if kind == WINDOW_ONLY else entries_of(weights, config, kind, x, low)
    out = np.empty((count, heads, dim))
    for t in range(count):
        # The window counts position t itself.
        keys = latents[max(0, t - config.sliding_window + 1) : t + 1]
        if entries_at is not None:
            keys = np.concatenate([keys, entries_at(t)])
        logits = rotate(queries[t], t, turns) @ keys.T / math.sqrt(dim)
        # A sink takes its share of the softmax and gives nothing.
        shares = softmax(np.concatenate([logits, weights["sinks"][:, None]], 1), -1)[:, :-1]
        # A latent is key and value at once: what its rotation did to the value is undone here.
        out[t] = rotate(shares @ keys, -t, turns)
    # Each group of heads has a matrix of its own, then one mixes the groups.
    grouped = out.reshape(count, config.o_groups, -1)
    matrices = weights["o_a_proj.weight"].reshape(config.o_groups, config.o_lora_rank, -1)
    narrow = np.einsum("tgi,goi->tgo", grouped, matrices)
    return weights.project("o_b_proj", narrow.reshape(count, -1))


def entries_of(
    weights: Weights, config: Config, kind: str, x: Array, low: Array
) -> Callable[[int], Array]:
    """x [T, hidden], low [T, rank]. What is returned gives the compressed entries that position t
    attends to, [m, d]: of blocks that have ended at t or before, and the best of those."""
    ratio = config.compress_rates[kind]
    compressor = weights.of("compressor")
    if kind != OVERLAPPING:
        every = compressed(compressor, config, x, ratio)
        return lambda t: every[: (t + 1) // ratio]
    entries = compressed(compressor, config, x, ratio, overlaps=True)
    indexer = compressor.of("indexer")
    index_keys = compressed(indexer, config, x, ratio, overlaps=True)

    def selected(t: int) -> Array:
        closed = (t + 1) // ratio
        scores = index_scores(indexer, config, t, (x[t], low[t]), index_keys[:closed])
        return entries[highest(scores, config.index_topk)]

    return selected


def compressed(
    weights: Weights, config: Config, x: Array, ratio: int, *, overlaps: bool = False
) -> Array:
    """x [T, hidden] -> one entry per whole block of ``ratio`` tokens, [T // ratio, d].

    An entry is an average of values whose weights are a softmax over the tokens, for each channel
    by itself. Where blocks overlap a token has two values: the first for the next block's entry,
    the second for its own block's. The very first entry is made of its own block alone.
    """
    dim = len(weights["kv_norm.weight"])
    turns = turns_of(config, "compress")
    values, gates = weights.project("kv_proj", x), weights.project("gate_proj", x)
    bias = weights["position_bias"]
    entries = np.empty((len(x) // ratio, dim))
    for block in range(len(entries)):
        start = block * ratio
        own, before = slice(start, start + ratio), slice(start - ratio, start)
        value, gate = values[own], gates[own] + bias
        if overlaps:
            value, gate = value[:, dim:], gate[:, dim:]
        if overlaps and block > 0:
            value = np.concatenate([values[before, :dim], value])
            gate = np.concatenate([gates[before, :dim] + bias[:, :dim], gate])
        mean = (softmax(gate, 0) * value).sum(0)
        # An entry stands where the first token of its own block stands.
        entries[block] = rotate(normed(mean, weights["kv_norm.weight"], config), start, turns)
    return entries


def index_scores(
    weights: Weights, config: Config, t: int, inputs: tuple[Array, Array], keys: Array
) -> Array:
    """The lightning indexer (section 2.3.1). inputs: x [hidden] and low [rank] of position t; keys
    [n, d] -> [n]. Heads vote, with weights of any sign, by what is positive of their products."""
    x, low = inputs
    heads, dim = config.index_n_heads, config.index_head_dim
    queries = weights.project("q_b_proj", low).reshape(heads, dim)
    queries = rotate(queries, t, turns_of(config, "compress"))
    votes = np.maximum(queries @ keys.T, 0) / math.sqrt(dim)
    return weights.project("scorer.weights_proj", x) / math.sqrt(heads) @ votes


def turns_of(config: Config, name: str) -> Array:
    """name: ``main`` where there is a window alone, else ``compress``. Cosines are not scaled."""
    rope = config.rope_parameters[name]
    assert rope["rope_type"] == "default" or rope["attention_factor"] == 1
    return frequencies(rope, int(config.head_dim * rope["partial_rotary_factor"]))


def rotate(x: Array, position: int, turns: Array) -> Array:
    """x [..., d]: neighbours among its last 2 len(turns) channels are turned as pairs."""
    out, first = x.copy(), x.shape[-1] - 2 * len(turns)
    even, odd = np.s_[..., first::2], np.s_[..., first + 1 :: 2]
    out[even], out[odd] = turn(x[even], x[odd], position * turns)
    return out


# Section 2.1: experts, for the first layers by a table from token to experts.


def mixture(weights: Weights, config: Config, x: Array, expert_ids: Ints | None) -> Array:
    """x [T, hidden] -> [T, hidden]. expert_ids: [T, k] of a layer that routes by token."""
    logits = weights.project("gate", x)
    scores = {"sigmoid": sigmoid, "sqrtsoftplus": root_softplus}[config.scoring_func](logits)
    shared = weights.of("shared_experts")
    out = gated(shared.project("gate_proj", x), shared.project("up_proj", x), config)
    out = shared.project("down_proj", out)
    for t, score in enumerate(scores):
        if expert_ids is None:
            # A learned bias helps to choose experts; it does not weigh them.
            biased = score + weights["gate.e_score_correction_bias"]
            chosen = highest(biased, config.num_experts_per_tok)
        else:
            chosen = expert_ids[t]
        shares = score[chosen] / (score[chosen].sum() + 1e-20) * config.routed_scaling_factor
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = np.split(weights["experts.gate_up_proj"][expert] @ x[t], 2)
            out[t] += share * (weights["experts.down_proj"][expert] @ gated(gate, up, config))
    return out


def gated(gate: Array, up: Array, config: Config) -> Array:
    """SwiGLU with bounds: the gate from above, the other factor from both sides."""
    limit = config.swiglu_limit
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * sigmoid(gate) * up


def root_softplus(x: Array) -> Array:
    return np.sqrt(np.logaddexp(0, x))
