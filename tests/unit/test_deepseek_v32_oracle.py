"""Hugging Face's DeepSeek-V3.2 and ours on pages give what the formulas give, in float64.

The two could share a misreading: ours was written from theirs. The oracle is a third opinion, and
whatever is changed in it shows.
"""

import copy
from functools import cache

import pytest

from stratakv.engine.attention import scratch_limit
from stratakv.engine.huggingface.model import wrap
from tests.fixtures.deepseek_v32 import all_logits, prompt, v32_model, wrapped
from tests.fixtures.models import TOLERANCE
from tests.fixtures.runner_host import Host
from tests.oracles import deepseek_v32 as oracle
from tests.oracles.common import distance, expected, last_among_equals, mistaken

LENGTH = 150
CASES = pytest.mark.parametrize(
    ("name", "page_tokens"), [("groups", 16), ("yarn", 64), ("yarn without mscale", 16), ("glm", 1)]
)
AROUND = sorted({n + d for n in (16, 24, 64, 128) for d in (-1, 0, 1)} | {1, 2, LENGTH})
WRONG = 100 * TOLERANCE


@cache
def by_formula(name):
    """Logits at every position of the prompt, float64 [LENGTH, vocab]."""
    return expected(oracle, v32_model(name), prompt(name, LENGTH))


@CASES
def test_selection_leaves_something_out(name, page_tokens):
    assert v32_model(name).config.index_topk < LENGTH // 2


@CASES
def test_the_oracle_does_not_look_ahead(name, page_tokens):
    part = expected(oracle, v32_model(name), prompt(name, LENGTH)[:65])
    assert distance(part, by_formula(name)[:65]) < 1e-12


@CASES
def test_hugging_face_gives_the_formulas_logits(name, page_tokens):
    for length in AROUND:
        logits = all_logits(v32_model(name), prompt(name, LENGTH)[:length])
        assert distance(logits, by_formula(name)[:length]) <= TOLERANCE


def assert_follows(host, tokens, formula, ends):
    """Chunks that end there, one after another."""
    row = host.open()
    for end in ends:
        logits = host.run((row, tokens[host.computed[row] : end]))[0]
        assert distance(logits, formula[end - 1]) <= TOLERANCE
    host.close(row)


@CASES
def test_a_prompt_of_any_length_gives_the_formulas_logits(name, page_tokens):
    host = Host(wrapped(name), page_tokens)
    for length in AROUND:
        assert_follows(host, prompt(name, LENGTH), by_formula(name), [length])


@CASES
def test_chunks_and_then_decoding_give_the_formulas_logits(name, page_tokens):
    host = Host(wrapped(name), page_tokens)
    ends = [*AROUND[:-4], 100, *range(120, LENGTH + 1)]
    assert_follows(host, prompt(name, LENGTH), by_formula(name), ends)


@CASES
def test_a_ragged_batch_gives_the_formulas_logits(name, page_tokens):
    """A prompt's chunks beside rows that decode."""
    host, tokens = Host(wrapped(name), page_tokens), prompt(name, LENGTH)
    long, *short = [host.open() for _ in range(3)]
    host.run((short[0], tokens[:14]), (short[1], tokens[:60]))
    for end in (7, 16, 17, 60, 63, 65, 100, LENGTH):
        chunks = [(row, tokens[host.computed[row] :][:1]) for row in short]
        chunks.append((long, tokens[host.computed[long] : end]))
        for (row, _), logits in zip(chunks, host.run(*chunks), strict=True):
            assert distance(logits, by_formula(name)[host.computed[row] - 1]) <= TOLERANCE


@pytest.mark.parametrize("tied", ["indexer.weights_proj.weight", "mlp.gate.weight"])
@pytest.mark.parametrize("scratch_bytes", [1, scratch_limit.SCRATCH_BYTES])
def test_among_equals_the_lowest_index_wins(tied, scratch_bytes, monkeypatch):
    """Hugging Face leaves that open: ours is compared with the rule alone, in any pieces."""
    monkeypatch.setattr(scratch_limit, "SCRATCH_BYTES", scratch_bytes)
    module = copy.deepcopy(v32_model("groups"))
    for name, tensor in module.state_dict().items():
        if name.endswith((tied, "e_score_correction_bias")):
            tensor.zero_()
    tokens = prompt("groups", LENGTH)[:70]
    formula = expected(oracle, module, tokens)
    assert_follows(Host(wrap(module), 16), tokens, formula, [30, 60, *range(61, 71)])
    monkeypatch.setattr(oracle, "highest", last_among_equals)
    assert distance(expected(oracle, module, tokens), formula) > WRONG


OF_SCORES = "np.maximum(placed(query, t) @ keys[: t + 1].T, 0)"
OF_SHARPNESS = '* sharpness(rope["factor"], rope.get("mscale_all_dim", 0)) ** 2'
OF_COSINES = 'return turns, sharpness(rope["factor"], 1)'
OF_PAIRS = 'halves if config.model_type == "deepseek_v32" else neighbours'
OF_CHOICE = 'score + weights["gate.e_score_correction_bias"]'
MISTAKES = {
    "everything is selected": ("highest(scores, config.index_topk)", "np.arange(t + 1)", "glm"),
    "one too few is selected": ("config.index_topk)", "config.index_topk - 1)", "glm"),
    "itself cannot be selected": ("keys[: t + 1].T", "keys[: max(t, 1)].T", "yarn"),
    "negative votes count": (OF_SCORES, "placed(query, t) @ keys[: t + 1].T", "groups"),
    "index keys keep their mean": ("keys - keys.mean(-1, keepdims=True)", "keys", "groups"),
    "index keys are not shifted": (' + weights["k_norm.bias"]', "", "groups"),
    "index keys are not rotated": ("[placed(key, t) for", "[key for", "groups"),
    "index pairs of neighbours": (OF_PAIRS, "neighbours", "yarn"),
    "GLM's index pairs of halves": (OF_PAIRS, "halves", "glm"),
    "the first layer selects for all": ("if selects(config, layer):", "if layer == 0:", "glm"),
    "keys are not rotated": ("neighbours(row, t * turns)", "neighbours(row, 0 * turns)", "groups"),
    "pairs of halves": ("neighbours(row, t * turns)", "halves(row, t * turns)", "groups"),
    "YaRN forgotten": ("frequencies(rope,", 'frequencies(rope | {"rope_type": "default"},', "yarn"),
    "no sharper softmax": (OF_SHARPNESS, "", "yarn"),
    "cosines not scaled": (OF_COSINES, "return turns, 1", "yarn without mscale"),
    "all groups": ("highest(worth, config.topk_group)", "highest(worth, 99)", "groups"),
    "a group is worth its best": ("[:, -2:]", "[:, -1:]", "groups"),
    "the bias does not choose": (OF_CHOICE, "score", "yarn"),
    "shares that do not sum up": ("if config.norm_topk_prob", "if False", "groups"),
    "no shared experts": ('mlp(weights.of("shared_experts"), x)', "np.zeros_like(x)", "groups"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_formulas_shows(mistake):
    right, wrong, name = MISTAKES[mistake]
    logits = expected(mistaken(oracle, right, wrong), v32_model(name), prompt(name, LENGTH))
    assert distance(logits, by_formula(name)) > WRONG
