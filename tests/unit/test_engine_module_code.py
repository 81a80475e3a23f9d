"""A model whose code somebody has changed is like no other, wherever in it the change is."""

import functools

import pytest
import torch
from torch.nn import functional
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama

from stratakv.core.identity import rank_shares
from stratakv.engine.huggingface.model import load_model
from stratakv.engine.huggingface.module_code import CodeWalk
from stratakv.engine.huggingface.module_identity import module_identity
from tests.fixtures.models import model_to_give_away, tiny_model


def identity():
    return module_identity(tiny_model("llama"), "float32")


def walked(family="llama"):
    walk = CodeWalk()
    walk.model(tiny_model(family))
    return walk


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    model_to_give_away("llama").save_pretrained(path)
    return path


def kept(function):
    """With its name, as a decorator keeps it."""

    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


def other_code(function):
    def code(*args, **kwargs):
        return args

    return code.__code__


ATTENTION, NORM = modeling_llama.LlamaAttention, modeling_llama.LlamaRMSNorm
PATCHES = {
    "a function": (modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k)),
    "a wrapped one": (modeling_llama, "rotate_half", kept(modeling_llama.rotate_half)),
    "a class": (modeling_llama, "LlamaRMSNorm", type("LlamaRMSNorm", (NORM,), {"a": kept(id)})),
    "a forward": (NORM, "forward", kept(NORM.forward)),
    "how it is built": (ATTENTION, "__init__", kept(ATTENTION.__init__)),
    "what is inherited": (torch.nn.Module, "__call__", kept(torch.nn.Module.__call__)),
    "what only code names": (modeling_llama, "repeat_kv", kept(modeling_llama.repeat_kv)),
    "a function of torch": (functional, "silu", kept(functional.silu)),
    "a builtin of torch": (torch, "rsqrt", kept(torch.rsqrt)),
    "code of a function": (
        modeling_llama.rotate_half, "__code__", other_code(modeling_llama.rotate_half),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PATCHES)
def test_a_model_with_a_patched_function_is_like_no_other(case, saved, monkeypatch, caplog):
    place, name, other = PATCHES[case]
    before = load_model(saved).fingerprint, identity()
    assert (load_model(saved).fingerprint, identity()) == before
    with monkeypatch.context() as patch:
        patch.setattr(place, name, other)
        found = {load_model(saved).fingerprint, load_model(saved).fingerprint}
        found |= {identity(), identity()}
    assert len(found | set(before)) == 6
    assert "does not cover [" in caplog.text
    assert (load_model(saved).fingerprint, identity()) == before


def test_a_function_of_the_packages_in_the_place_of_another_is_another_model(saved, monkeypatch):
    before = load_model(saved).fingerprint, identity()
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_glm.apply_rotary_pos_emb)
    assert load_model(saved).fingerprint == load_model(saved).fingerprint != before[0]
    assert identity() == identity() != before[1]


def test_a_hook_of_all_modules_is_not_identified():
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert walked().foreign == ["_global_forward_hooks"]
    hook.remove()
    assert walked().foreign == []


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt_oss", "mamba2", "zamba2", "qwen3_next", "deepseek_v4"]
)
def test_an_untouched_release_is_recognised_whatever_else_the_process_has(family):
    before = walked(family)
    assert before.foreign == []
    for other in ("mixtral", "nemotron_h"):
        walked(other)
    assert walked(family).digest() == before.digest()


def test_a_rank_with_code_of_its_own_makes_all_ranks_of_one_model_new():
    mine = rank_shares.HashReport("", {0: [bytes(16)]}, own="5e")
    assert rank_shares.HashReport.of(mine.text()) == mine
