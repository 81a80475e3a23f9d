"""A model in memory is named by all that it computes with; one from files keeps what it read."""

import copy
import functools
import json
import shutil
from collections import OrderedDict, defaultdict
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from stratakv.core.errors import ConfigError
from stratakv.core.model_identity import ModelIdentity
from stratakv.engine.huggingface.model import load_model, wrap
from stratakv.engine.huggingface.model_facts import read_facts
from stratakv.engine.huggingface.module_identity import module_identity
from stratakv.engine.huggingface.own_memory import own_weights
from stratakv.engine.huggingface.precision import computed_on, releases
from stratakv.engine.in_c import IN_C
from tests.fixtures.models import (
    FAMILIES,
    MODULE_STATE,
    changed_model,
    model_to_give_away,
    tiny_model,
)
from tests.fixtures.tiny_configs import CONFIGS

USUAL = (*FAMILIES, "qwen3_moe", "mamba2", "gpt2")


def identity(model):
    return module_identity(model, "float32")


@pytest.mark.parametrize(
    ("family", "dtype"), [("gemma3", torch.bfloat16), ("qwen3_next", torch.float32)]
)
def test_every_tensor_in_memory_decides_it(family, dtype):
    model = model_to_give_away(family).to(dtype)
    before = identity(model)
    assert identity(model_to_give_away(family).to(dtype)) == before
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert any("inv_freq" in name for name, _ in tensors)  # which is in no checkpoint
    found, changes = {before}, 0
    for _, tensor in tensors:
        data = tensor.data.view(torch.uint8) if tensor.dim() else tensor.data.view(1)
        last = tuple(size - 1 for size in data.shape)
        for place in {(0,) * data.dim(), tuple(at // 2 for at in last), last}:
            changes += 1
            kept = data[place].clone()
            data[place] = kept ^ 1 if data.dtype == torch.uint8 else kept + 1
            found.add(identity(model))
            data[place] = kept
    assert len(found) == 1 + changes
    assert identity(model) == before


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3_next", "mamba2", "nemotron_h"])
def test_who_is_adopted_again_has_its_name(family):
    model = model_to_give_away(family)
    first = wrap(model).fingerprint
    assert wrap(model).fingerprint == first == wrap(model_to_give_away(family)).fingerprint
    layer = model.get_decoder().layers[0]
    layer.forward = functools.partial(layer.forward)
    assert wrap(model).fingerprint != first


def test_numbers_that_modules_hold_decide_it():
    found = {identity(tiny_model("llama"))}
    for name, value in (("scaling", 0.5), ("is_causal", False)):
        model = model_to_give_away("llama")
        setattr(model.model.layers[1].self_attn, name, value)
        found.add(identity(model))
    model = model_to_give_away("llama")
    model.model.norm.variance_epsilon *= 2
    found.add(identity(model))
    model = model_to_give_away("llama")
    model.model.rotary_emb.attention_scaling = 2.0
    found.add(identity(model))
    model = model_to_give_away("llama")
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5.0}
    found.add(identity(model))
    model = model_to_give_away("llama")
    model.model.layers[0].mlp.extra = torch.zeros(3)
    found.add(identity(model))
    assert len(found) == 7


def noted(factor):
    held = OrderedDict(a=1)
    held.factor = factor
    return held


VALUES = {
    "NumPy number": (np.float32(0.4), np.float32(0.9)),
    "NumPy array": (np.zeros(3000), np.eye(1, 3000, 1500)[0]),
    "tensors in a list": ([torch.zeros(2)], [torch.ones(2)]),
    "tensor in a dict in a tuple": (({"a": torch.zeros(1)},), ({"a": torch.ones(1)},)),
    "set": ({1, 2, 3}, {1, 2, 4}),
    "modules in a list": ([torch.nn.LayerNorm(4)], [torch.nn.LayerNorm(4, eps=1.0)]),
    "function": (functional.relu, functional.gelu),
    "partial": (partial(functional.elu, alpha=1.0), partial(functional.elu, alpha=2.0)),
    "config": (LlamaConfig(), LlamaConfig(rms_norm_eps=0.5)),
    "torch.dtype": (torch.float32, torch.bfloat16),
    "attribute of a dict": (noted(1.0), noted(2.0)),
    "method": (torch.nn.LayerNorm(4).forward, torch.nn.LayerNorm(4, eps=1.0).forward),
}


@pytest.mark.parametrize("name", ["extra", "_extra"])
@pytest.mark.parametrize("case", VALUES)
def test_what_a_module_holds_decides_it(case, name):
    found = set()
    for value in VALUES[case]:
        model = model_to_give_away("llama")
        setattr(model.model.layers[1].self_attn, name, value)
        found |= {identity(model), identity(copy.deepcopy(model))}
    assert len(found) == 2


def test_what_python_has_set_on_a_tensor_decides_it():
    found = {identity(tiny_model("llama"))}
    for factor in (1.0, 1.0, 2.0):
        model = model_to_give_away("llama")
        model.model.norm.weight.factor = factor
        found.add(identity(model))
    assert len(found) == 3


def test_the_order_of_a_set_decides_nothing():
    found = set()
    for words in (["a", "b", "i", "q"], ["q", "i", "b", "a"]):
        model = model_to_give_away("llama")
        model.extra = set()
        for word in words:
            model.extra.add(word)
        found.add(identity(model))
    assert len(found) == 1


class Weighted(dict):
    """With an attribute that decides."""


class Sevens(list):
    def __getitem__(self, at):
        return 7


class OwnConfig(LlamaConfig):
    @property
    def factor(self):
        return 7


def of_a_config_of_its_own(model):
    model.config.__class__ = OwnConfig


class Mine(torch.nn.Linear):
    """Code that the identity cannot tell."""


def another_forward(model):
    forward = model.model.norm.forward
    model.model.norm.forward = lambda states: 2 * forward(states)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.model.layers[0].register_forward_hook(lambda *_: None),
        lambda model: model.model.layers[0].register_forward_pre_hook(lambda *_: None),
        another_forward,
        lambda model: setattr(model.model.norm, "scale", lambda: 2),
        lambda model: setattr(model.model.norm, "scale", object()),
        lambda model: setattr(model.model.norm, "scale", [object()]),
        lambda model: setattr(model.model.norm, "scale", np.array([object()])),
        lambda model: setattr(model, "lm_head", Mine(16, 512)),
        lambda model: setattr(model.model.norm, "scale", Weighted(factor=1)),
        lambda model: setattr(model.model.norm, "scale", Sevens([1])),
        lambda model: setattr(model.model.norm, "scale", defaultdict(int)),
        lambda model: setattr(model.model.norm.weight, "factor", object()),
        of_a_config_of_its_own,
    ],
)
def test_a_model_that_cannot_be_described_is_like_no_other(change, caplog):
    model = model_to_give_away("llama")
    change(model)
    assert identity(model) != identity(model)
    assert "does not cover ['" in caplog.text


def test_nor_can_one_whose_class_somebody_has_changed(monkeypatch):
    model = model_to_give_away("llama")
    kind = type(model.model.norm)
    assert identity(model) == identity(model)
    monkeypatch.setattr(kind, "forward", functools.wraps(kind.forward)(lambda _, states: states))
    assert identity(model) != identity(model)


def test_a_list_that_holds_itself_is_described():
    found = set()
    for number in (1, 1, 2):
        model = model_to_give_away("llama")
        model.extra = [number]
        model.extra.append(model.extra)
        found.add(identity(model))
    assert len(found) == 2


@pytest.mark.parametrize(
    "family",
    [
        "llama", "gpt2", "gemma3", "gemma4_text", "gpt_oss", "mixtral", "phimoe", "lfm2_moe",
        "mamba2", "zamba2", "nemotron_h", "qwen3_next", "deepseek_v3", "recurrent_gemma",
    ],
)  # fmt: skip
def test_a_family_built_twice_is_one_model(family):
    assert identity(changed_model(family)) == identity(tiny_model(family))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_that_was_saved_is_the_same_model(family, tmp_path):
    model = model_to_give_away(family)
    before = identity(model)
    model.save_pretrained(tmp_path)
    assert identity(model) == before


def test_where_a_model_came_from_and_whether_it_trains_decides_nothing():
    model = model_to_give_away("llama").train()
    model.name_or_path = model.config.name_or_path = "elsewhere"
    assert identity(model) == identity(tiny_model("llama"))


@pytest.fixture
def saved(tmp_path):
    model_to_give_away("gemma3").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_that_is_written_under_a_running_model_changes_nothing(saved, dtype):
    model = load_model(saved, dtype).module
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    file = saved / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:  # in place: whoever has it mapped sees it
        stream.seek(8 + int.from_bytes(stream.read(8), "little"))
        stream.write(b"\x11" * (size - stream.tell()))
    for name, tensor in model.state_dict().items():
        assert tensor.equal(before[name]), name


def moved(module, directory):
    """``module`` with its weights in memory; which of them were cloned."""
    cloned, real = [], torch.Tensor.clone
    with pytest.MonkeyPatch.context() as patch, ModelIdentity(directory) as identity:
        patch.setattr(torch.Tensor, "clone", lambda self: cloned.append(self.shape) or real(self))
        own_weights(module, identity)
        identity.finish()
    return cloned


def test_only_what_lies_in_a_file_is_moved(saved, tmp_path):
    """A view within a tensor, a transposed one, one that was written to, and one of a file that the
    identity does not know."""
    module = torch.nn.Linear(3, 3)
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.ones(2, 2)}, other)
    name = "model.layers.0.self_attn.q_proj.weight"
    with safe_open(saved / "model.safetensors", "pt") as file, safe_open(other, "pt") as strange:
        whole = file.get_tensor(name)
        module.register_buffer("whole", whole)
        module.register_buffer("part", whole[3:7, 1:])
        module.register_buffer("turned", whole.T)
        module.register_buffer("strange", strange.get_tensor("a"))
    buffers = dict(module.named_buffers())
    values = {name: tensor.clone() for name, tensor in buffers.items()}
    strides = {name: tensor.stride() for name, tensor in buffers.items()}
    places = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    assert moved(module, saved) == [torch.Size([2, 2])]
    for name, tensor in module.state_dict().items():
        assert (tensor.data_ptr() != places[name]) == (name in values)
    for name, value in values.items():
        assert buffers[name].equal(value)
        assert buffers[name].stride() == strides[name]


def test_what_was_written_to_is_not_taken_from_its_file(saved):
    module = torch.nn.Module()
    with safe_open(saved / "model.safetensors", "pt") as file:
        module.register_buffer("mapped", file.get_tensor("model.norm.weight"))
    module.mapped[0] = 77.0  # in a page of our own: the file does not have it
    value = module.mapped.clone()
    assert moved(module, saved) == [value.shape]
    assert module.mapped.equal(value)


class RecordedRanks:
    """The other ranks, who hear what this one says."""

    rank = 0

    def __init__(self):
        self.texts = []

    def gather(self, text):
        self.texts.append(json.loads(text)[0])
        return [text]


def test_the_other_ranks_learn_of_one_that_has_no_memory_for_a_copy(saved, monkeypatch):
    module = torch.nn.Module()
    with safe_open(saved / "model.safetensors", "pt") as file:
        module.register_buffer("mapped", file.get_tensor("model.norm.weight"))
    module.mapped[0] = 77.0

    def full(self):
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    monkeypatch.setattr(torch.Tensor, "clone", full)
    others = RecordedRanks()
    with (
        ModelIdentity(saved, others) as identity,
        pytest.raises(ConfigError, match=r"^MODEL .*/model: no memory for its weights: Default"),
    ):
        own_weights(module, identity)
    assert [text[:5] for text in others.texts] == ["", "MODEL"]


def test_the_other_ranks_learn_of_one_whose_model_does_not_load(tmp_path):
    tiny_model("llama").model.save_pretrained(tmp_path)
    others = RecordedRanks()
    with pytest.raises(ConfigError, match="lack lm_head") as refused:
        load_model(tmp_path, identity=ModelIdentity(tmp_path, others))
    assert others.texts == ["", str(refused.value)]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, torch.float32) for family in USUAL]
    + [(family, torch.bfloat16) for family in USUAL]  # converted: nothing is left in a file
    + [
        pytest.param(family, torch.float32, marks=pytest.mark.long)
        for family in sorted(CONFIGS.keys() - {*USUAL, *MODULE_STATE})
    ],
)
def test_a_model_has_the_weights_that_hugging_face_loads(tmp_path, family, dtype):
    model_to_give_away(family).save_pretrained(tmp_path)
    ours = load_model(tmp_path, str(dtype).removeprefix("torch.")).module
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    found, wanted = tensors_of(ours), tensors_of(theirs)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].equal(tensor), name


def tensors_of(module):
    return dict(module.named_parameters()) | dict(module.named_buffers())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "adapter_config.json").write_text("{}"), "adapter_config.json in it"),
        (
            lambda path: shutil.copy(
                path / "model.safetensors", path / "shard-00001-model-00001-of-00002.safetensors"
            ),
            "distributed checkpoint",
        ),
        (
            lambda path: (path / "config.json").write_text(
                json.dumps(
                    json.loads((path / "config.json").read_text())
                    | {"transformers_weights": "other.safetensors"}
                )
            ),
            "names files of weights",
        ),
    ],
)
def test_weights_that_the_identity_would_not_see_are_refused(saved, spoil, message):
    spoil(saved)
    with pytest.raises(ConfigError, match=rf"^MODEL .*/model: .*{message}.*; allowed is "):
        read_facts(saved)


@pytest.mark.parametrize("which", [0, 1])
def test_another_release_is_another_model(saved, monkeypatch, which):
    before, held = load_model(saved).fingerprint, identity(tiny_model("llama"))
    assert load_model(saved).fingerprint == before
    others = [f"{name} 99" if at == which else name for at, name in enumerate(releases())]
    monkeypatch.setattr("stratakv.engine.huggingface.model.releases", lambda: others)
    monkeypatch.setattr("stratakv.engine.huggingface.module_identity.releases", lambda: others)
    assert load_model(saved).fingerprint != before
    assert identity(tiny_model("llama")) != held


def test_another_revision_of_our_own_arithmetic_is_another_model(saved, monkeypatch):
    before, held = load_model(saved).fingerprint, identity(tiny_model("llama"))
    for reader in ("core.model_identity", "engine.huggingface.module_identity"):
        monkeypatch.setattr(f"stratakv.{reader}.REVISION", b"another")
    assert load_model(saved).fingerprint != before
    assert identity(tiny_model("llama")) != held


@contextmanager
def setting(place, name, value):
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


@contextmanager
def of_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def medium():
    """It sets what others set too: none of which must stay."""
    places = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)
    with ExitStack() as undo:
        for place in places:
            undo.enter_context(setting(place, "fp32_precision", place.fp32_precision))
        undo.callback(torch.set_float32_matmul_precision, "highest")
        torch.set_float32_matmul_precision("medium")
        yield


@contextmanager
def in_environment(name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


MODES = {
    "all products": lambda: setting(torch.backends, "fp32_precision", "tf32"),
    "oneDNN's": lambda: setting(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "oneDNN's by its environment": lambda: in_environment("ONEDNN_DEFAULT_FPMATH_MODE", "BF16"),
    "by the old name": lambda: in_environment("DNNL_DEFAULT_FPMATH_MODE", "ANY"),
    "by the old call": medium,
    "sums": lambda: setting(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "dtype": lambda: of_dtype(torch.float64),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_of_less_precision_is_another_model(saved, mode):
    before = load_model(saved).fingerprint, identity(tiny_model("llama"))
    with MODES[mode]():
        found = load_model(saved).fingerprint, identity(tiny_model("llama"))
    assert found[0] != before[0]
    assert found[1] != before[1]
    assert (load_model(saved).fingerprint, identity(tiny_model("llama"))) == before


def test_a_gpu_is_another_model_than_a_cpu_and_than_one_of_another_generation(saved, monkeypatch):
    before, held = load_model(saved).fingerprint, identity(tiny_model("llama"))
    seen = {before, held}
    for capability in ((9, 0), (8, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, it=capability: it)
        there = computed_on(torch.device("cuda", 0), torch.float32)
        for reader in ("model", "module_identity"):
            asks = f"stratakv.engine.huggingface.{reader}.computed_on"
            monkeypatch.setattr(asks, lambda *_, it=there: it)
        seen |= {load_model(saved).fingerprint, identity(tiny_model("llama"))}
    assert len(seen) == 6


@pytest.mark.skipif(not IN_C, reason="there was no compiler")
def test_float32_that_attends_in_c_is_another_model_than_torchs_and_no_other_dtype_is(
    saved, monkeypatch
):
    before = load_model(saved).fingerprint, identity(tiny_model("llama"))
    half = load_model(saved, "bfloat16").fingerprint
    monkeypatch.setattr("stratakv.engine.huggingface.precision.IN_C", False)
    found = load_model(saved).fingerprint, identity(tiny_model("llama"))
    assert found[0] != before[0]
    assert found[1] != before[1]
    assert load_model(saved, "bfloat16").fingerprint == half
    assert computed_on(torch.device("cpu"), torch.float32) == ()
