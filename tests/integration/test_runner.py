"""Unmodified Hugging Face models on our pages, against their own cache: the same logits.

Pages are handed out in random order, returned as soon as the rule lets go of them, and everything
that no request owns is NaN.
"""

import shutil

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from stratakv.core.errors import ConfigError
from stratakv.core.ids import LayerId
from stratakv.engine import attention
from stratakv.engine.batch import StepBatch
from stratakv.engine.model import load_model, wrap
from stratakv.engine.runner import ModelRunner
from stratakv.memory.block_table import BlockTable
from stratakv.memory.device_pools import DevicePools
from stratakv.spec.derive import spec_of
from stratakv.spec.retention import needed
from tests.fixtures.models import (
    FAMILIES,
    TOLERANCE,
    model_to_give_away,
    random_prompt,
    reference_greedy,
    tiny_model,
)

PAGED = [(family, page) for family in FAMILIES for page in (16, 64)]
PAGED += [("llama", 1), ("gemma3", 1)]
LENGTHS = (150, 45, 97)
NEW = 11


class Host:
    """The least that a runner needs around it: pages for every request, poison for the rest."""

    def __init__(self, model, page_tokens, tokens=512):
        self.page_tokens = page_tokens
        self.spec = spec_of(model.config, page_tokens=page_tokens, dtype=model.dtype)
        pages = tokens // page_tokens
        self.pools = DevicePools(self.spec, [pages] * len(self.spec.groups), torch.device("cpu"))
        self.tables = BlockTable(len(self.spec.groups), 4, pages)
        random = np.random.default_rng(0)
        self.free = [list(random.permutation(pages)) for _ in self.spec.groups]
        for group in self.spec.groups:
            self.pools.poison(group.id, np.arange(pages, dtype=np.int32))
        self.runner = ModelRunner(model, self.spec, self.pools, self.tables)
        self.computed = {}

    def open(self):
        row = self.tables.open_row()
        self.computed[row] = 0
        return row

    def run(self, *chunks, gate=None, sampled=None):
        """chunks: (row, tokens) -> logits [S, vocab]; a chunk of one token comes first."""
        rows = np.array([row for row, _ in chunks], np.int32)
        counts = np.array([len(tokens) for _, tokens in chunks], np.int32)
        starts = np.array([self.computed[row] for row in rows], np.int32)
        for row, count in zip(rows, counts, strict=True):
            self.reserve(row, self.computed[row] + count)
        batch = StepBatch(
            rows=rows,
            starts=starts,
            counts=counts,
            tokens=np.concatenate([tokens for _, tokens in chunks]).astype(np.int32),
            sampled=np.ones(len(rows), bool) if sampled is None else np.array(sampled),
            gate=gate,
        )
        logits = self.runner.forward(batch)
        for row, count in zip(rows, counts, strict=True):
            self.computed[row] += count
            self.release_unneeded(row)
        return logits

    def reserve(self, row, end):
        for group in self.spec.groups:
            table = self.tables.pages(group.id)[row]
            first = self.computed[row] // self.page_tokens
            for page_index in range(first, -(-end // self.page_tokens)):
                if table[page_index] < 0:
                    table[page_index] = self.free[group.id].pop()

    def release_unneeded(self, row):
        for group in self.spec.groups:
            table = self.tables.pages(group.id)[row]
            kept = needed(group.retention, self.computed[row], self.page_tokens)
            gone = [i for i in range(kept.start) if table[i] >= 0]
            pages = table[gone].copy()
            self.pools.poison(group.id, pages)
            self.free[group.id] = [*pages, *self.free[group.id]]
            table[gone] = -1


def references(family):
    """Prompts and their greedy tokens and logits, from Hugging Face's own cache."""
    model = tiny_model(family)
    prompts = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    return [(prompt, *reference_greedy(model, prompt, NEW)) for prompt in prompts]


def assert_same(mine, theirs):
    assert mine.dtype == torch.float32
    assert mine.isfinite().all()
    assert (mine - theirs).abs().max() <= TOLERANCE * theirs.abs().max()
    assert mine.argmax(-1).equal(theirs.argmax(-1))


def ragged_schedule(host, wanted):
    """Chunks, joins and decode in one batch; every logit that a token is taken from is checked."""
    rows = [host.open() for _ in wanted]
    texts = [[*prompt, *tokens] for prompt, tokens, _ in wanted]

    def step(*spans):
        chunks = [(rows[r], texts[r][first:last]) for r, first, last in spans]
        sampled = [last >= LENGTHS[r] for r, _, last in spans]
        logits = host.run(*chunks, sampled=sampled)
        assert len(logits) == sum(sampled)
        ends = [(r, last) for r, _, last in spans if last >= LENGTHS[r]]
        for at, (r, last) in enumerate(ends):
            assert_same(logits[at], wanted[r][2][last - LENGTHS[r]])

    step((0, 0, 60))
    step((0, 60, 150), (1, 0, 20))
    step((0, 150, 151), (1, 20, 45), (2, 0, 16))
    step((0, 151, 152), (1, 45, 46), (2, 16, 80))
    step((1, 46, 47), (0, 152, 153), (2, 80, 97))
    for t in range(NEW - 4):
        step((2, 97 + t, 98 + t), (0, 153 + t, 154 + t), (1, 47 + t, 48 + t))
    # Several tokens on top of a decoded context, as a verifier or a second turn brings them.
    step((2, 97 + NEW - 4, 97 + NEW - 1))


@pytest.mark.parametrize(("family", "page_tokens"), PAGED)
def test_a_ragged_schedule_gives_the_models_own_logits(family, page_tokens):
    ragged_schedule(Host(wrap(model_to_give_away(family)), page_tokens), references(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_gathered_pages_give_the_models_own_logits(family, monkeypatch):
    monkeypatch.setattr(attention, "reads_rows", lambda query, layer: False)
    ragged_schedule(Host(wrap(model_to_give_away(family)), 16), references(family))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_the_float32_logits(dtype):
    model = wrap(model_to_give_away("gemma3").to(dtype))
    host = Host(model, 16)
    row = host.open()
    (prompt, tokens, logits), *_ = references("gemma3")
    host.run((row, prompt[:70]))
    mine = torch.cat([host.run((row, prompt[70:])), host.run((row, tokens[:1]))])
    assert mine.dtype == torch.float32
    assert (mine - logits[:2]).abs().max() < 0.1 * logits.abs().max()


class LateLoad:
    """A gate that puts a layer's keys and values on their pages only when it is waited for."""

    def __init__(self, host, saved):
        self.host, self.saved, self.waited = host, saved, []

    def wait(self, layer):
        self.waited.append(layer)
        for group, buffer in buffers(self.host.spec, layer):
            self.host.pools.layer(group.id, buffer.name, layer)[:] = self.saved[
                group.id, buffer.name, layer
            ]


def buffers(spec, layer):
    return [(g, b) for g in spec.groups for b in g.buffers if layer in b.layers]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_layer_touches_its_pages_only_after_its_gate(family):
    host = Host(wrap(model_to_give_away(family)), 16)
    row, layers = host.open(), tiny_model(family).config.num_hidden_layers
    (prompt, _, logits), *_ = references(family)
    host.run((row, prompt[:96]))
    saved = {
        (group.id, buffer.name, layer): host.pools.layer(group.id, buffer.name, layer).clone()
        for layer in map(LayerId, range(layers))
        for group, buffer in buffers(host.spec, layer)
    }
    for group in host.spec.groups:
        host.pools.poison(group.id, np.arange(host.pools.pages[group.id], dtype=np.int32))
    gate = LateLoad(host, saved)
    assert_same(host.run((row, prompt[96:]), gate=gate)[0], logits[0])
    assert gate.waited == list(range(layers))


def test_a_step_without_sampled_rows_gives_no_logits():
    host = Host(wrap(model_to_give_away("llama")), 16)
    logits = host.run((host.open(), [1, 2, 3]), sampled=[False])
    assert logits.shape == (0, 512)


def test_taking_a_model_over_leaves_other_holders_of_its_config_alone():
    model = model_to_give_away("llama")
    config = model.config
    wrapped = wrap(model)
    assert config._attn_implementation == "eager"
    assert wrapped.module.config._attn_implementation == attention.ATTENTION


@pytest.fixture
def saved_model(tmp_path):
    tiny_model("gemma3").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_directory_loads_as_the_same_model(saved_model):
    model = load_model(saved_model, "float32")
    assert (model.dtype, model.max_positions, model.vocab_size) == ("float32", 4096, 512)
    assert model.config["sliding_window"] == 40
    ragged_schedule(Host(model, 16), references("gemma3"))


def test_auto_takes_the_dtype_of_the_weights(tmp_path):
    model_to_give_away("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype == "bfloat16"


def test_stop_tokens_come_from_the_generation_config(saved_model):
    assert load_model(saved_model).eos_ids == ()
    (saved_model / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_model(saved_model).eos_ids == (7, 9)
    (saved_model / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert load_model(saved_model).eos_ids == (5,)


def test_what_cannot_be_served_is_refused_by_name(saved_model, tmp_path):
    with pytest.raises(ConfigError, match=r"--dtype int8.*float32"):
        load_model(saved_model, "int8")
    with pytest.raises(ConfigError, match=r"--model .*nowhere"):
        load_model(tmp_path / "nowhere")
    encoder = BertModel(BertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1))
    encoder.save_pretrained(tmp_path / "encoder")
    with pytest.raises(ConfigError, match=r"--model .*encoder"):
        load_model(tmp_path / "encoder")
    headless = tmp_path / "headless"
    tiny_model("llama").model.save_pretrained(headless)
    with pytest.raises(ConfigError, match=r"lack lm_head"):
        load_model(headless)
    (saved_model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        load_model(saved_model)


def test_the_fingerprint_names_weights_config_and_dtype(saved_model, tmp_path):
    prints = {
        load_model(saved_model, "float32").fingerprint,
        load_model(saved_model, "bfloat16").fingerprint,
    }
    shutil.copytree(saved_model, tmp_path / "copy")
    assert load_model(tmp_path / "copy", "float32").fingerprint in prints
    for layer in (0, 3):
        model = model_to_give_away("gemma3")
        model.model.layers[layer].mlp.up_proj.weight.data[80:] *= 1.01
        model.save_pretrained(tmp_path / f"tuned{layer}")
        prints.add(load_model(tmp_path / f"tuned{layer}", "float32").fingerprint)
    text = (tmp_path / "copy" / "config.json").read_text()
    (tmp_path / "copy" / "config.json").write_text(text.replace("10000", "20000"))
    prints.add(load_model(tmp_path / "copy", "float32").fingerprint)
    assert len(prints) == 5
    one, other = model_to_give_away("llama"), model_to_give_away("llama")
    assert wrap(one).fingerprint == wrap(model_to_give_away("llama")).fingerprint
    other.model.layers[2].self_attn.k_proj.weight.data *= 1.01
    assert wrap(other).fingerprint != wrap(model_to_give_away("llama")).fingerprint
