"""DeepSeek's sparse attention over thousands of tokens: chunks, a hit in the middle, decoding.

Against Hugging Face's at batch 1. Only the last layer selects: among thousands of tokens some query
has a near tie at rank k, and here it touches no position but its own. At those that are compared
the choice is clear of rounding.
"""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV4Config, DeepseekV32Config, GlmMoeDsaConfig

from stratakv.engine.deepseek import v4_attention, v32_indexer
from stratakv.engine.huggingface.model import wrap
from tests.fixtures import deepseek_v4, deepseek_v32
from tests.fixtures.deepseek_v4 import V4Host
from tests.fixtures.models import TOLERANCE
from tests.fixtures.schedules import assert_same
from tests.fixtures.weights import fill

pytestmark = pytest.mark.long

PROMPT, NEW, HIT, SELECTED = 4200, 4, 2176, 48
CUTS = (*range(512, HIT, 512), HIT, *range(2560, 4096, 512), 4096, 4097)
CLEAR = 2e-6
"""Ten times what float32 gets wrong in the scores of one layer."""
LONG = {"max_position_embeddings": 8192, "index_topk": SELECTED, "num_hidden_layers": 1}
V32 = {**deepseek_v32._BASE, **deepseek_v32.CONFIGS["groups"]}
GLM = {**deepseek_v32._BASE, **deepseek_v32.CONFIGS["glm"], "indexer_types": ["full"]}
KINDS = [deepseek_v4.W, deepseek_v4.H, deepseek_v4.C]
CONFIGS = {
    "deepseek_v32": lambda: DeepseekV32Config(**copy.deepcopy(V32) | LONG),
    "glm_moe_dsa": lambda: GlmMoeDsaConfig(
        **copy.deepcopy(GLM) | LONG | {"first_k_dense_replace": 0}
    ),
    "deepseek_v4": lambda: DeepseekV4Config(
        **deepseek_v4.SIZES | LONG | {"layer_types": KINDS, "num_hidden_layers": len(KINDS)}
    ),
}


@cache
def model(name):
    found = AutoModelForCausalLM.from_config(
        CONFIGS[name](), dtype=torch.float32, attn_implementation="eager"
    )
    fill(found, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for part, buffer in found.named_buffers():
            if part.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1, generator=generator)
            if part.endswith("tid2eid"):
                count = found.config.n_routed_experts
                experts = torch.rand(len(buffer), count, generator=generator)
                buffer.copy_(experts.topk(buffer.shape[1]).indices)
    return found.eval().requires_grad_(requires_grad=False)


class Gaps:
    """The least gap at rank k of each query that is asked about alone, relative to its scores."""

    def __init__(self, monkeypatch):
        self.gaps = []
        for module in (v32_indexer, v4_attention):
            monkeypatch.setattr(module, "best_places", self.watch(module.best_places))

    def watch(self, best_places):
        def watched(score, shape, k, cost):
            last = slice(shape[0] - 1, shape[0])
            scores = score(last, slice(0, shape[1]))[0]
            best = scores.topk(k + 1).values
            self.gaps.append(float((best[k - 1] - best[k]) / scores[scores.isfinite()].abs().max()))
            return best_places(score, shape, k, cost)

        return watched


def with_one_fewer(host, row, prompt):
    """What the last layer would say to the next token if it selected less by one."""
    attention = host.runner.model.model.layers[-1].self_attn
    if isinstance(attention, v4_attention.V4Attention):
        attention.compressor.indexer.top_k -= 1
    else:
        attention.indexer.topk -= 1
    logits = host.go_on(row, prompt)
    if isinstance(attention, v4_attention.V4Attention):
        attention.compressor.indexer.top_k += 1
    else:
        attention.indexer.topk += 1
    host.close(row)
    return logits


@pytest.mark.parametrize("name", CONFIGS)
def test_thousands_of_tokens_give_hugging_faces_logits(name, monkeypatch):
    gaps = Gaps(monkeypatch)
    prompt = np.random.default_rng(1).integers(0, 256, PROMPT).tolist()
    host = V4Host(wrap(copy.deepcopy(model(name))), 128, tokens=3 * 4480)
    row, found = host.open(), {}
    for end in CUTS:
        found[end] = host.run((row, prompt[host.computed[row] : end]))[0]
        if end == HIT:
            hit, other = host.fork(row), host.fork(row)
    host.close(row)
    for end in (*CUTS[CUTS.index(HIT) + 1 :], PROMPT):
        logits = host.run((hit, prompt[host.computed[hit] : end]))[0]
        if end in found:
            assert_same(logits, found[end])
        found[end] = logits
    fewer = with_one_fewer(host, other, prompt)
    text = list(prompt)
    for _ in range(NEW):
        text.append(int(found[len(text)].argmax()))
        found[len(text)] = host.run((hit, text[-1:]))[0]
    ends = sorted(end for end in found if end >= 4096)
    with torch.no_grad():
        wanted = model(name)(
            input_ids=torch.tensor([text]), use_cache=False, logits_to_keep=len(text) - 4095
        ).logits[0]
    assert min(gaps.gaps) > CLEAR
    assert (fewer - wanted[-NEW - 1]).abs().max() > 100 * TOLERANCE * wanted.abs().max()
    for end in ends:
        assert_same(found[end], wanted[end - 4096])
