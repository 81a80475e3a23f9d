"""Adapters beside a model, against PEFT itself: the same logits for every kind of config it saves,
for every token its own adapter, and a refusal by name for what is not served."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch

from stratakv.core.errors import ConfigError
from stratakv.engine.huggingface.adapters import check_directories, load_adapters
from stratakv.engine.huggingface.lora_hooks import Adapters
from tests.fixtures.bounds import ADAPTED
from tests.fixtures.lora import (
    CONFIG,
    WEIGHTS,
    edit_config,
    edit_weights,
    peft_oracle,
    save_adapter,
)
from tests.fixtures.models import (
    FAMILIES,
    model_to_give_away,
    random_prompt,
    tiny_model,
)

KINDS = {
    "all linear": {},
    "a list": {"target_modules": ["q_proj", "v_proj"]},
    "a regex": {"target_modules": r".*layers\.[02]\.self_attn\.[ko]_proj"},
    "whole paths": {
        "target_modules": ["model.layers.1.self_attn.o_proj", "layers.0.self_attn.q_proj"],
        "layers_to_transform": [0],
    },
    "excluded": {
        "target_modules": ["q_proj", "k_proj"], "exclude_modules": ["layers.2.self_attn.q_proj"],
    },
    "rank stabilized": {"r": 6, "lora_alpha": 5, "use_rslora": True},
    "some layers": {"target_modules": ["k_proj", "o_proj"], "layers_to_transform": [1, 3]},
    "layers of a list": {
        "target_modules": ["k_proj"], "layers_to_transform": 2, "layers_pattern": "layers",
    },
    "patterns": {
        "target_modules": ["q_proj", "o_proj"],
        "rank_pattern": {"q_proj": 2, r"layers\.1\.self_attn\.o_proj": 7},
        "alpha_pattern": {"o_proj": 3, r"^model\.layers\.0\.self_attn\.q_proj": 11},
    },
    "trained": {"target_modules": ["q_proj"], "lora_dropout": 0.1, "init_lora_weights": "gaussian"},
}  # fmt: skip


def loaded(family, **directories):
    """A model that is ours alone, and its adapters."""
    torch.set_num_threads(1)
    model = model_to_give_away(family)
    found = load_adapters(model, model.get_output_embeddings(), directories)
    return model, Adapters(model, found)


@torch.no_grad()
def logits(model, ids):
    return model(input_ids=torch.tensor(ids), use_cache=False).logits


def assert_same(mine, theirs):
    assert (mine - theirs).abs().max() <= ADAPTED * theirs.abs().max()
    assert mine.argmax(-1).equal(theirs.argmax(-1))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapters")
    return {
        "a": save_adapter(path / "a", "llama", 1),
        "b": save_adapter(path / "b", "llama", 2, target_modules=["v_proj", "up_proj"], r=3),
    }


@pytest.fixture
def adapter(tmp_path, two):
    """A copy to spoil."""
    return shutil.copytree(two["a"], tmp_path / "spoilt")


# -- the arithmetic --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_peft(family, kind, tmp_path):
    path = save_adapter(tmp_path / "x", family, 5, **KINDS[kind])
    model, adapters = loaded(family, x=path)
    ids = [random_prompt(1, 33)]
    with adapters.applied(np.zeros(33, np.int32)):
        mine = logits(model, ids)
    assert_same(mine, logits(peft_oracle(family, path), ids))
    plain = logits(tiny_model(family), ids)
    assert (mine - plain).abs().max() > 1e-2 * plain.abs().max()


@pytest.mark.parametrize("shape", [(4, 9), (4, 1)])
def test_every_row_has_its_own_adapter(two, shape):
    model, adapters = loaded("llama", **two)
    ids = np.array(random_prompt(2, shape[0] * shape[1])).reshape(shape).tolist()
    rows = np.array([1, -1, 0, 1], np.int32)
    with adapters.applied(np.repeat(rows, shape[1])):
        mine = logits(model, ids)
    oracles = [tiny_model("llama"), *(peft_oracle("llama", path) for path in two.values())]
    for row, adapter in enumerate(rows.tolist()):
        assert_same(mine[row], logits(oracles[adapter + 1], ids)[row])


def test_the_tokens_of_one_row_may_have_several_adapters(two):
    """A packed step: what no attention mixes, layer 0's queries, shows each token's adapter."""
    model, adapters = loaded("llama", **two)
    ids = [random_prompt(3, 12)]
    tokens = np.array([0, 0, 1, -1, 1, 0, -1, -1, 0, 1, 1, 0], np.int32)

    def values(of):
        seen = []
        handle = of.model.layers[0].self_attn.v_proj.register_forward_hook(
            lambda _module, _inputs, output: seen.append(output[0])
        )
        logits(of, ids)
        handle.remove()
        return seen[0]

    with adapters.applied(tokens):
        mine = values(model)
    oracles = [tiny_model("llama"), *(peft_oracle("llama", path) for path in two.values())]
    wanted = torch.stack([values(oracles[a + 1])[i] for i, a in enumerate(tokens.tolist())])
    assert_same(mine, wanted)


def test_a_call_without_adapters_meets_no_hook(two):
    model, adapters = loaded("llama", **two)
    ids = [random_prompt(4, 8)]
    plain = logits(tiny_model("llama"), ids)
    with adapters.applied(np.zeros(8, np.int32)):
        logits(model, ids)
    assert logits(model, ids).equal(plain)  # outside of any block
    for none in (None, np.full(8, -1, np.int32)):
        with adapters.applied(none):
            assert not any(module._forward_hooks for module in model.modules())
            assert logits(model, ids).equal(plain)


def test_tokens_that_a_layer_does_not_see_are_an_error(two):
    model, adapters = loaded("llama", **two)
    with adapters.applied(np.zeros(9, np.int32)), pytest.raises(AssertionError, match="sees other"):
        logits(model, [random_prompt(4, 8)])


def test_weights_lie_in_the_models_dtype(two):
    model = model_to_give_away("llama").to(torch.bfloat16)
    (found,) = load_adapters(model, model.get_output_embeddings(), {"a": two["a"]})
    assert {w.down.dtype for w in found.weights.values()} == {torch.bfloat16}
    adapters = Adapters(model, [found])
    ids = [random_prompt(4, 8)]
    with adapters.applied(np.zeros(8, np.int32)):
        mine = logits(model, ids).float()
    wanted = logits(peft_oracle("llama", two["a"]), ids)
    assert (mine - wanted).abs().max() < 0.1 * wanted.abs().max()


# -- digests ---------------------------------------------------------------------------------------


def digest(path, name="x"):
    return loaded("llama", **{name: path})[1].digests[name]


def test_one_weight_decides_the_digest(two, adapter):
    assert digest(adapter) == digest(two["a"], "another name")

    def change(tensors):
        key = max(tensors)
        tensors[key][-1, -1] += 1e-6
        return tensors

    edit_weights(adapter, change)
    assert digest(adapter) != digest(two["a"])


def test_every_tensor_of_an_adapter_decides_the_digest(two, adapter):
    """By its first, middle and last byte."""
    file = adapter / WEIGHTS
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    ends = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    found = {digest(two["a"])}
    places = [at for begin, end in ends for at in (begin, (begin + end) // 2, end - 1)]
    for at in places:
        other = bytearray(data)
        other[start + at] ^= 1
        file.write_bytes(other)
        found.add(digest(adapter))
    assert len(found) == 1 + len(places)


def test_a_file_that_is_written_under_a_running_adapter_changes_nothing(adapter):
    model = model_to_give_away("llama")
    (found,) = load_adapters(model, None, {"a": adapter})
    kept = {path: (w.down.clone(), w.up.clone()) for path, w in found.weights.items()}
    file = adapter / WEIGHTS
    with file.open("r+b") as stream:
        size = file.stat().st_size
        stream.seek(8 + int.from_bytes(stream.read(8), "little"))
        stream.write(b"\x11" * (size - stream.tell()))
    for path, weights in found.weights.items():
        assert (weights.down.equal(kept[path][0]), weights.up.equal(kept[path][1])) == (True, True)


@pytest.mark.parametrize(
    "fields", [{"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}]
)
def test_what_scales_the_weights_decides_the_digest(two, adapter, fields):
    assert digest(edit_config(adapter, **fields)) != digest(two["a"])


def test_where_the_weights_go_decides_the_digest(tmp_path):
    """The same tensors on other layers."""
    first = save_adapter(tmp_path / "a", "llama", target_modules=["layers.0.self_attn.q_proj"])
    second = save_adapter(tmp_path / "b", "llama", target_modules=["layers.1.self_attn.q_proj"])
    assert (first / WEIGHTS).stat().st_size == (second / WEIGHTS).stat().st_size
    assert digest(first) != digest(second)


def test_what_only_trains_decides_nothing(two, adapter):
    assert digest(edit_config(adapter, lora_dropout=0.5, revision="x")) == digest(two["a"])


def test_one_adapter_under_two_names_lies_in_memory_once(two, adapter):
    model = model_to_give_away("llama")
    one, other = load_adapters(model, None, {"one": two["a"], "other": adapter})
    assert (one.name, other.name) == ("one", "other")
    assert one.weights is other.weights


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3: allowed is LORA"),
        ({"peft_type": None}, "peft_type None: allowed is LORA"),
        ({"task_type": "SEQ_CLS"}, "task_type SEQ_CLS: allowed is CAUSAL_LM"),
        ({"use_dora": True}, "use_dora is not served"),
        ({"lora_bias": True}, "lora_bias is not served"),
        ({"bias": "all"}, "bias all: allowed is none"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not served"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is not served"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is not served"),
        ({"target_parameters": ["experts.down"]}, "target_parameters is not served"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is not served"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is not served"),
        ({"use_qalora": True}, "use_qalora is not served"),
        ({"of_next_year": 1}, "of_next_year is not served"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa: it belongs to changed base"),
        ({"r": 0}, "r 0: allowed is 1 and more"),
        ({"r": "8"}, "r '8': allowed is 1 and more"),
        ({"lora_alpha": "x"}, "lora_alpha 'x': allowed is a finite number"),
        ({"rank_pattern": [1]}, "rank_pattern [1]: allowed is an object"),
        ({"rank_pattern": {"(": 1}}, "no regular expression"),
        ({"target_modules": "("}, "no regular expression"),
        ({"target_modules": None}, "target_modules None: allowed are strings"),
        ({"target_modules": [1]}, "target_modules [1]: allowed are strings"),
        ({"layers_to_transform": "1"}, "layers_to_transform '1': allowed are layer numbers"),
    ],
)
def test_a_config_that_is_not_served(adapter, fields, message):
    edit_config(adapter, **fields)
    with pytest.raises(ConfigError) as caught:
        check_directories({"mine": adapter})
    assert str(caught.value).startswith(f"--lora mine={adapter}: ")
    assert message in str(caught.value)


def test_files_that_are_missing_or_spoilt(adapter, tmp_path):
    def refusal(path=adapter, *, load=False):
        with pytest.raises(ConfigError, match=r"^--lora mine=") as caught:
            loaded("llama", mine=path) if load else check_directories({"mine": path})
        return str(caught.value)

    assert "allowed is a directory with a PEFT adapter_config.json" in refusal(tmp_path / "nowhere")
    (adapter / WEIGHTS).write_bytes(b"spoilt")
    assert "adapter_model.safetensors cannot be read" in refusal(load=True)
    (adapter / WEIGHTS).unlink()
    assert "no adapter_model.safetensors; allowed is a directory with one" in refusal()
    (adapter / CONFIG).write_text("[1]")
    assert "adapter_config.json: allowed is a JSON object" in refusal()
    (adapter / CONFIG).write_text("{")
    assert "adapter_config.json cannot be read" in refusal()


def without(part):
    return lambda tensors: {key: t for key, t in tensors.items() if part not in key}


def renamed(old, new):
    return lambda tensors: {key.replace(old, new): t for key, t in tensors.items()}


def added(key):
    return lambda tensors: tensors | {key: torch.ones(2, 2)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("layers.3"), "no weights for model.layers.3.mlp.down_proj and 6 more; allowed"),
        (without("k_proj.lora_B"), "one factor for model.layers.0.self_attn.k_proj and 3"),
        (lambda _: {}, "adapter_model.safetensors is empty"),
        (renamed("layers.3", "layers.30"), "the model has no model.layers.30.mlp.down_proj and 6"),
        (renamed("layers.3.mlp", "layers.3.input_layernorm"), "the model has no"),
        (renamed("layers.3.mlp.up_proj", "layers.3.mlp"), "is LlamaMLP: allowed is nn.Linear"),
        (renamed("layers.3.mlp.up_proj", "norm"), "is LlamaRMSNorm: allowed is nn.Linear"),
        (renamed("model.layers.3.mlp.up_proj", "lm_head"), "lm_head is the output layer"),
        (added("base_model.model.model.embed_tokens.lora_embedding_A"), "allowed are factors"),
        (added("base_model.model.x.lora_magnitude_vector"), "allowed are factors of linear layers"),
        (lambda t: {k: v[:-1] if "lora_A" in k else v for k, v in t.items()}, "has factors (3, "),
        (lambda t: {k: v[:-1] if "lora_B" in k else v for k, v in t.items()}, "allowed are ((4, "),
        (lambda t: {k: v.to(torch.int8) for k, v in t.items()}, "allowed are floats"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_the_model(adapter, change, message):
    edit_weights(adapter, change)
    with pytest.raises(ConfigError) as caught:
        loaded("llama", mine=adapter)
    assert str(caught.value).startswith(f"--lora mine={adapter}: ")
    assert message in str(caught.value)


def test_weights_that_the_config_does_not_name(adapter):
    edit_config(adapter, target_modules=["q_proj"])
    with pytest.raises(
        ConfigError,
        match=r"weights for model\.layers\.0\.mlp\.down_proj and 23 more: allowed is what",
    ):
        loaded("llama", mine=adapter)


def test_a_layer_of_an_expert_is_refused(adapter):
    """It sees some tokens, in an order of its own."""
    model = model_to_give_away("llama")
    block = model.model.layers[3].mlp
    block.experts = torch.nn.ModuleList([copy.deepcopy(block.up_proj)])
    edit_weights(adapter, renamed("layers.3.mlp.up_proj", "layers.3.mlp.experts.0"))
    with pytest.raises(ConfigError, match=r"experts\.0 is of an expert"):
        load_adapters(model, None, {"mine": adapter})


def test_all_linear_leaves_out_what_is_excluded(adapter, two):
    edit_weights(adapter, without("k_proj"))
    edit_config(adapter, target_modules="all-linear", exclude_modules=["k_proj"])
    assert digest(adapter) != digest(two["a"])
    edit_config(adapter, exclude_modules=None)
    with pytest.raises(ConfigError, match=r"no weights for .*k_proj and 3 more"):
        digest(adapter)


def test_an_adapter_of_another_model(two, tmp_path):
    with pytest.raises(ConfigError, match=r"has factors|was made for this model"):
        loaded("gemma3", mine=two["a"])
    other = save_adapter(tmp_path / "g", "gemma3", target_modules=["q_proj"])
    with pytest.raises(ConfigError, match=r"the model has no model\.layers\.4"):
        loaded("llama", mine=other)
