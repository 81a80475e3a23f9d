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
from stratakv.engine.attention.dense_kernels import DenseKernels
from stratakv.engine.huggingface import attention
from stratakv.engine.huggingface.model import load_model, wrap
from tests.fixtures.models import FAMILIES, model_to_give_away, tiny_model
from tests.fixtures.runner_host import Host
from tests.fixtures.schedules import assert_same, ragged_schedule, references

PAGED = [(family, page) for family in FAMILIES for page in (16, 64)]
PAGED += [("llama", 1), ("gemma3", 1)]


@pytest.mark.parametrize(("family", "page_tokens"), PAGED)
def test_a_ragged_schedule_gives_the_models_own_logits(family, page_tokens):
    ragged_schedule(Host(wrap(model_to_give_away(family)), page_tokens), references(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_gathered_pages_give_the_models_own_logits(family):
    dense = DenseKernels(torch.device("cpu"), torch.float32)
    host = Host(wrap(model_to_give_away(family)), 16, kernels=dense)
    ragged_schedule(host, references(family))


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
    """A gate that puts what a layer keeps on its pages only when it is waited for."""

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


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "qwen3_next"])
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
    with pytest.raises(ConfigError, match=r"MODEL .*nowhere"):
        load_model(tmp_path / "nowhere")
    encoder = BertModel(BertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1))
    encoder.save_pretrained(tmp_path / "encoder")
    with pytest.raises(ConfigError, match=r"^MODEL .*/encoder: model type 'bert' is not known"):
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
