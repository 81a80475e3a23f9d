"""Our own DeepSeek-V3.2 on our pages, against Hugging Face's module at batch 1: the same logits.

Pages are handed out in random order and everything that no request has written is NaN. Prompts are
chosen so that rounding changes no selection (``prompt``); ties are tested by themselves.
"""

import numpy as np
import pytest
import torch

from stratakv.core.ids import LayerId
from stratakv.engine.attention import scratch_limit, step_plan
from stratakv.engine.deepseek import common_topk, v32_runner
from stratakv.engine.huggingface.model import load_model, wrap
from tests.fixtures.deepseek_v32 import (
    CONFIGS,
    SURE,
    all_logits,
    prompt,
    smallest_gap,
    v32_model,
    wrapped,
)
from tests.fixtures.models import TOLERANCE
from tests.fixtures.runner_host import Host
from tests.fixtures.schedules import assert_same

LONG, LENGTHS = 70, (97, 45, 70)
NAMES = pytest.mark.parametrize("name", CONFIGS)
NAMES_AND_PAGES = pytest.mark.parametrize(
    ("name", "page_tokens"),
    [*((name, 16) for name in CONFIGS), ("groups", 1), ("groups", 64), ("glm", 1), ("glm", 64)],
)


def differ(mine, theirs):
    """So far apart that no rounding can have done it."""
    return (mine - theirs).abs().max() > 1000 * TOLERANCE * theirs.abs().max()


def prefilled(name, page_tokens, tokens, *cuts):
    """A host that has computed ``tokens`` in chunks, its row, and the last chunk's logits."""
    host = Host(wrapped(name), page_tokens)
    row, start = host.open(), 0
    for cut in (*cuts, len(tokens)):
        logits = host.run((row, tokens[start:cut]))
        start = cut
    return host, row, logits[0]


# --- the fixtures have teeth ---------------------------------------------------------------------


@NAMES
def test_no_prompt_has_a_tie_at_the_last_rank(name):
    for seed, length in enumerate(LENGTHS):
        assert smallest_gap(v32_model(name), prompt(name, length, seed)) >= SURE
    assert v32_model(name).config.index_topk < min(LENGTHS) or name == "all dense"
    assert v32_model(name).config.index_topk < LONG


@NAMES
@pytest.mark.parametrize("wrong", [-1, 1])
def test_one_token_more_or_less_selected_would_show(name, wrong):
    tokens = prompt(name, LONG)
    host = Host(wrapped(name), 16)
    for layer in host.runner.model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.topk += wrong
    if host.runner.model.model.layers[0].self_attn.indexer.topk == 0:
        pytest.skip("nothing would be selected")
    assert differ(host.run((host.open(), tokens))[0], all_logits(v32_model(name), tokens)[-1])


# --- equal to Hugging Face's ---------------------------------------------------------------------


@NAMES_AND_PAGES
def test_every_prompt_length_gives_hugging_faces_logits(name, page_tokens):
    tokens = prompt(name, LONG)
    wanted = all_logits(v32_model(name), tokens)
    host = Host(wrapped(name), page_tokens)
    topk = v32_model(name).config.index_topk
    for length in sorted({1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, LONG, topk, topk + 1}):
        row = host.open()
        assert_same(host.run((row, tokens[:length]))[0], wanted[length - 1])
        host.close(row)


@NAMES_AND_PAGES
def test_decode_one_by_one_gives_every_positions_logits(name, page_tokens):
    tokens = prompt(name, LONG)
    wanted = all_logits(v32_model(name), tokens)
    host = Host(wrapped(name), page_tokens)
    row = host.open()
    for position, token in enumerate(tokens):
        assert_same(host.run((row, [token]))[0], wanted[position])


@NAMES
def test_any_chunking_is_one_chunk(name):
    tokens = prompt(name, LONG)
    wanted = all_logits(v32_model(name), tokens)[-1]
    random = np.random.default_rng(5)
    cuts = [(1,), (16,), (17, 18, 48), (31, 64), (69,), tuple(range(7, LONG, 7))]
    cuts += [tuple(sorted({*random.integers(1, LONG, n).tolist()})) for n in (2, 5, 9)]
    for some in cuts:
        assert_same(prefilled(name, 16, tokens, *some)[2], wanted)


@NAMES
def test_blocks_of_queries_change_nothing(name, monkeypatch):
    monkeypatch.setattr(step_plan, "BLOCK_QUERIES", 8)
    monkeypatch.setattr(step_plan, "MIN_QUERIES", 3)
    monkeypatch.setattr(step_plan, "BLOCK_PAIRS", 200)
    tokens = prompt(name, LONG)
    wanted = all_logits(v32_model(name), tokens)[-1]
    assert_same(prefilled(name, 16, tokens)[2], wanted)
    assert_same(prefilled(name, 16, tokens, 20, 49)[2], wanted)


@NAMES
@pytest.mark.parametrize("scratch_bytes", [1, 40_000])
def test_pieces_change_nothing(name, scratch_bytes, monkeypatch):
    """One query over as many keys as are selected, and a few of either."""
    monkeypatch.setattr(scratch_limit, "SCRATCH_BYTES", scratch_bytes)
    texts = [prompt(name, length, seed) for seed, length in enumerate(LENGTHS)]
    wanted = [all_logits(v32_model(name), text) for text in texts]
    host = Host(wrapped(name), 16)
    rows = [host.open() for _ in texts]
    for row, text in zip(rows, texts, strict=True):
        host.run((row, text[:-2]))
    for back in (2, 1):
        logits = host.run(*((row, [text[-back]]) for row, text in zip(rows, texts, strict=True)))
        for found, text, all_wanted in zip(logits, texts, wanted, strict=True):
            assert_same(found, all_wanted[len(text) - back])


def ragged(host, texts):
    """Chunks, joins and decode in one batch; yields (request, tokens computed, logits)."""
    rows = [host.open() for _ in texts]
    at = [0] * len(texts)
    plan = [{0: 40}, {0: 41, 1: 20}, {0: 42, 1: 44, 2: 16}, {0: 43, 1: 45, 2: 60}, {2: 61, 0: 96}]
    plan += [{2: 62, 0: 97}, *({2: end} for end in range(63, 71))]
    for ends in plan:
        step = sorted(ends.items(), key=lambda item: item[1] - at[item[0]] > 1)
        logits = host.run(*((rows[r], texts[r][at[r] : end]) for r, end in step))
        for (r, end), found in zip(step, logits, strict=True):
            at[r] = end
            yield r, end, found


@NAMES
def test_a_ragged_batch_gives_each_request_its_own_logits(name):
    texts = [prompt(name, length, seed) for seed, length in enumerate(LENGTHS)]
    wanted = [all_logits(v32_model(name), text) for text in texts]
    for r, end, found in ragged(Host(wrapped(name), 16), texts):
        assert_same(found, wanted[r][end - 1])


@NAMES
@pytest.mark.parametrize(
    ("bucket_bytes", "lengths"), [(0, (5, 70, 33, 48)), (10**9, (5, 70, 33, 48)), (0, (50, 50, 50))]
)
def test_decoding_side_by_side_is_decoding_alone(name, bucket_bytes, lengths, monkeypatch):
    """In buckets by length, all padded to the longest, and all of one length."""
    monkeypatch.setattr(v32_runner, "BUCKET_BYTES", bucket_bytes)
    texts = [prompt(name, length, seed) for seed, length in enumerate(lengths)]
    wanted = [all_logits(v32_model(name), text) for text in texts]
    host, other = Host(wrapped(name), 16), Host(wrapped(name), 16)
    rows, alone = [[some.open() for _ in texts] for some in (host, other)]
    for some, opened in ((host, rows), (other, alone)):
        for row, text in zip(opened, texts, strict=True):
            some.run((row, text[:-3]))
    for back in (3, 2, 1):
        lasts = [[text[-back]] for text in texts]
        logits = host.run(*zip(rows, lasts, strict=True))
        one_by_one = [other.run(pair)[0] for pair in zip(alone, lasts, strict=True)]
        wants = [
            all_wanted[len(text) - back] for text, all_wanted in zip(texts, wanted, strict=True)
        ]
        for found, single, want in zip(logits, one_by_one, wants, strict=True):
            assert_same(found, want)
            assert_same(found, single)


def test_a_row_that_is_not_sampled_gives_no_logits():
    host = Host(wrapped("small"), 16)
    rows = [host.open(), host.open()]
    logits = host.run((rows[0], [1]), (rows[1], [1, 2, 3]), sampled=[False, True])
    assert logits.shape == (1, 256)
    assert host.run((rows[0], [5]), sampled=[False]).shape == (0, 256)


# --- pages ---------------------------------------------------------------------------------------


@NAMES
@pytest.mark.parametrize("buffer", ["latent", "index_k"])
def test_another_requests_page_would_show(name, buffer):
    """In either sidecar alone, of any layer."""
    texts = [prompt(name, LONG), prompt(name, 97, seed=1)]
    wanted = all_logits(v32_model(name), texts[0])[-1]
    host = Host(wrapped(name), 16)
    rows = [host.open(), host.open()]
    for row, text in zip(rows, texts, strict=True):
        host.run((row, text[:69]))
    mine, other = (host.tables.pages(0)[row, 1] for row in rows)
    raw = host.pools.raw(0, buffer)
    raw[:, mine] = raw[:, other].copy()
    assert differ(host.run((rows[0], texts[0][69:]))[0], wanted)


@NAMES
def test_two_requests_with_swapped_pages_would_show(name):
    texts = [prompt(name, LONG), prompt(name, 97, seed=1)]
    host = Host(wrapped(name), 16)
    rows = [host.open(), host.open()]
    for row, text in zip(rows, texts, strict=True):
        host.run((row, text[:69]))
    table = host.tables.pages(0)
    table[rows, 2] = table[rows[::-1], 2]
    found = host.run(*((row, text[69:70]) for row, text in zip(rows, texts, strict=True)))
    for mine, text in zip(found, texts, strict=True):
        assert differ(mine, all_logits(v32_model(name), text)[69])


class LateLoad:
    """A gate that puts what a layer keeps on its pages only when it is waited for."""

    def __init__(self, host):
        self.host, self.waited = host, []
        self.raw = {b.name: host.pools.raw(0, b.name) for b in host.spec.groups[0].buffers}
        self.saved = {name: raw.copy() for name, raw in self.raw.items()}
        for raw in self.raw.values():
            raw.fill(0xFF)

    def wait(self, layer):
        self.waited.append(layer)
        for buffer in self.host.spec.groups[0].buffers:
            if layer in buffer.layers:
                at = buffer.layers.index(layer)
                self.raw[buffer.name][at] = self.saved[buffer.name][at]


@pytest.mark.parametrize("name", ["small", "glm"])
@pytest.mark.parametrize("count", [1, 6])
def test_a_layer_touches_its_pages_only_after_its_gate(name, count):
    tokens = prompt(name, LONG)
    host = Host(wrapped(name), 16)
    row = host.open()
    host.run((row, tokens[:-count]))
    gate = LateLoad(host)
    found = host.run((row, tokens[-count:]), gate=gate)
    assert_same(found[0], all_logits(v32_model(name), tokens)[-1])
    layers = v32_model(name).config.num_hidden_layers
    assert gate.waited == [LayerId(layer) for layer in range(layers)]


# --- ties ----------------------------------------------------------------------------------------


def all_tied(name):
    """Every key of an indexer is the same, and no rotation tells them apart: all scores of a query
    are equal."""
    model = wrapped(name)
    for layer in model.module.model.layers:
        indexer = layer.self_attn.indexer
        indexer.wk.weight.zero_()
        indexer.k_norm.bias[: indexer.qk_rope_head_dim] = 0
    return model


def influence(name, cuts):
    """Which of 60 tokens the last token's logits depend on, computed in chunks."""
    tokens = prompt(name, LONG)[:60]

    def last(some):
        host = Host(all_tied(name), 16)
        row, start = host.open(), 0
        for cut in (*cuts, len(some)):
            logits = host.run((row, some[start:cut]))
            start = cut
        return logits[0]

    def changed(at):
        return [*tokens[:at], (tokens[at] + 1) % 256, *tokens[at + 1 :]]

    base = last(tokens)
    return [at for at in range(0, 60, 3) if differ(last(changed(at)), base)]


@pytest.mark.parametrize("cuts", [(), (59,), (20, 40)])
def test_of_equal_scores_the_lowest_positions_are_selected(cuts):
    assert CONFIGS["groups"]["index_topk"] == 17
    assert influence("groups", cuts) == [0, 3, 6, 9, 12, 15]


lowest_first = common_topk.highest_indices


def last_first(scores, k):
    return scores.shape[-1] - 1 - lowest_first(scores.flip(-1), k)


def test_another_tie_rule_would_show(monkeypatch):
    monkeypatch.setattr(common_topk, "highest_indices", last_first)
    assert influence("groups", ()) != [0, 3, 6, 9, 12, 15]


# --- loading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["groups", "yarn", "glm"])
def test_a_directory_loads_as_the_same_model(name, tmp_path):
    v32_model(name).save_pretrained(tmp_path)
    tokens = prompt(name, LONG)
    host = Host(load_model(tmp_path, "float32"), 16)
    logits = host.run((host.open(), tokens))
    assert_same(logits[0], all_logits(v32_model(name), tokens)[-1])


def test_half_precision_stays_near_the_float32_logits():
    """As long as everything is selected: in bfloat16 near scores tie."""
    tokens = prompt("all dense", LONG)[:48]
    host = Host(wrap(wrapped("all dense").module.to(torch.bfloat16)), 16)
    row = host.open()
    found = [
        host.run((row, tokens[:40])),
        host.run((row, tokens[40:47])),
        host.run((row, [tokens[47]])),
    ]
    wanted = all_logits(v32_model("all dense"), tokens)[[39, 46, 47]]
    assert found[0].dtype == torch.float32
    assert (torch.cat(found) - wanted).abs().max() < 0.1 * wanted.abs().max()
