"""Adapters in the engine: hit == recompute with PEFT's own model as the oracle, by every path.

Requests of three adapters and of none share steps. Pages that nobody owns are NaN.
"""

from contextlib import contextmanager

import pytest
import torch

from stratakv.assembly.models import build_engine
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.engine.huggingface.lora_hooks import Adapters
from stratakv.engine.huggingface.model import with_adapters, wrap
from stratakv.spec.derive import spec_of
from tests.engines import (
    RecordingRunner,
    drain,
    evict_device,
    greedy,
    kept_out,
    on_device,
    on_host,
    small_engine,
    tokens_of,
)
from tests.fixtures.bounds import ADAPTED
from tests.fixtures.lora import edit_config, peft_oracle, save_adapter
from tests.fixtures.models import (
    FAMILIES,
    model_to_give_away,
    random_prompt,
    reference_greedy,
    tiny_model,
)

PAGE = 16
PROMPT = 150
END = 144
OUTPUT = 4
NAMES = ("", "a", "b", "c")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def directories(family, tmp_path_factory):
    """Other modules, ranks, scales and layers."""
    path = tmp_path_factory.mktemp("adapters")
    return {
        "a": save_adapter(path / "a", family, 1),
        "b": save_adapter(
            path / "b", family, 2, target_modules=["q_proj", "v_proj"], r=3, use_rslora=True
        ),
        "c": save_adapter(
            path / "c", family, 3, target_modules=["k_proj", "o_proj"], lora_alpha=20,
            layers_to_transform=[1, 3],
        ),
    }  # fmt: skip


@pytest.fixture(scope="module")
def model(family, directories):
    torch.set_num_threads(1)
    return with_adapters(wrap(model_to_give_away(family)), directories)


class Lab:
    """An engine whose every answer is compared with PEFT's model without a cache."""

    def __init__(self, family, directories, parts):
        self.parts = parts
        self.spec = parts.spec
        self.recorder = RecordingRunner(parts)
        self.worst = 0.0
        self._oracles = {name: peft_oracle(family, path) for name, path in directories.items()}
        self._oracles[""] = tiny_model(family)
        self._asked = {}

    def submit(self, name, tokens, adapter, count=OUTPUT, salt=""):
        self._asked[name] = (tokens, adapter)
        self.parts.engine.submit(greedy(name, tokens, count, salt, adapter))

    def drain(self, before=()):
        """Serve all to the end and compare; what each was cached, by name. ``before``: outputs of
        steps that were made already."""
        outputs = {name: [] for name in self._asked}
        for output in [*before, *drain(self.parts)]:
            outputs[output.request].append(output)
        cached = {}
        for name, mine in outputs.items():
            self._compare(name, tokens_of(mine))
            cached[name] = mine[0].cached
        self._asked.clear()
        return cached

    def ask(self, tokens, adapter, salt=""):
        self.submit("one", tokens, adapter, salt=salt)
        return self.drain()["one"]

    def _compare(self, name, found):
        tokens, adapter = self._asked[name]
        expected, logits = reference_greedy(self._oracles[adapter], tokens, len(found))
        mine = torch.stack(self.recorder.logits.pop(name))
        error = ((mine - logits).abs().max() / logits.abs().max()).item()
        self.worst = max(self.worst, error)
        assert found == expected, f"{name}: tokens differ; logits by {error:.1e}"
        assert error <= ADAPTED, f"{name}: logits differ by {error:.1e}"


@pytest.fixture
def lab(family, directories, model):
    @contextmanager
    def opened(page=PAGE, plenty=256, **settings):
        config = EngineConfig(
            page_tokens=page, max_running=8, max_model_len=1024, chunk_tokens=40, step_tokens=88,
            **settings,
        )  # fmt: skip
        spec = spec_of(model.config, page_tokens=page, dtype=model.dtype)
        pages = (plenty * PAGE // page,) * len(spec.groups)
        with small_engine(model, config, pages, pages) as parts:
            yield Lab(family, directories, parts)

    return opened


def test_adapters_say_other_things(family, directories):
    """Without this, none of the tests here could fail."""
    prompt = random_prompt(1, PROMPT)
    oracles = [tiny_model(family), *(peft_oracle(family, path) for path in directories.values())]
    assert len({tuple(reference_greedy(oracle, prompt, OUTPUT)[0]) for oracle in oracles}) == 4


def test_device_hit_and_host_load_back(lab):
    prompt = random_prompt(1, PROMPT)
    with lab() as this:
        for name in NAMES:
            assert this.ask(prompt, name) == on_device(this.spec, 0), name
        for name in NAMES:
            assert this.ask(prompt, name) == on_device(this.spec, END), name
            assert this.ask(prompt, name, salt="s") == on_device(this.spec, 0), name
        evict_device(this.parts)
        for name in NAMES:
            assert this.ask(prompt, name) == on_host(this.spec, END), name
            assert this.ask(prompt, name, salt="s") == on_host(this.spec, END), name
            assert this.ask(prompt, name, salt="t") == on_device(this.spec, 0), name


def test_three_adapters_and_none_in_one_ragged_batch(lab):
    known = random_prompt(1, PROMPT)
    with lab() as this:
        this.ask(known, "a")
        this.ask(known, "")
        evict_device(this.parts)
        this.ask(known, "b")
        this.recorder.batches.clear()
        before = []
        this.submit("short", random_prompt(2, 5), "c", count=14)
        before += this.parts.engine.step()
        this.submit("fresh", random_prompt(3, 70), "", count=8)
        this.submit("one", [7], "a", count=8)
        before += this.parts.engine.step()
        this.submit("loaded", known, "a", count=6)
        this.submit("on the device", known, "b", count=6)
        this.submit("plain", known, "", count=6)
        this.submit("never seen", known, "c", count=6)
        cached = this.drain(before)
        assert cached["loaded"] == cached["plain"] == on_host(this.spec, END)
        assert cached["on the device"] == on_device(this.spec, END)
        assert cached["never seen"] == cached["fresh"] == on_device(this.spec, 0)
        mixed = [
            batch
            for batch in this.recorder.batches
            if batch.counts.max() > 1 and batch.counts.min() == 1 and batch.adapters is not None
        ]
        assert any(len(set(batch.adapters.tolist())) == 4 for batch in mixed)


def test_pages_of_one_token(family, lab):
    if family != "gemma3":
        pytest.skip("the path does not depend on the family")
    prompt = random_prompt(4, 50)
    with lab(page=1) as this:
        for name in ("a", "", "b"):
            assert this.ask(prompt, name) == on_device(this.spec, 0)
        evict_device(this.parts)
        for name in ("b", "a", ""):
            assert this.ask(prompt, name) == on_host(this.spec, len(prompt) - 1)


def test_without_a_cache_the_answers_are_the_same(lab):
    prompt = random_prompt(5, 60)
    with lab(cache="off") as this:
        for name in NAMES * 2:
            assert this.ask(prompt, name) == kept_out(this.spec)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba", "gemma4_text"])
def test_states_and_shared_layers(kind, tmp_path):
    """A step of theirs takes several calls, columns of tokens among them."""
    torch.set_num_threads(1)
    directories = {
        "a": save_adapter(tmp_path / "a", kind, 1),
        "b": save_adapter(tmp_path / "b", kind, 2, r=2),
    }
    model = with_adapters(wrap(model_to_give_away(kind)), directories)
    config = EngineConfig(
        page_tokens=PAGE, max_running=4, max_model_len=256, chunk_tokens=40, step_tokens=90,
        snapshot_tokens=PAGE,
    )  # fmt: skip
    spec = spec_of(model.config, page_tokens=PAGE, dtype=model.dtype)
    prompt = random_prompt(6, 70)
    names = ("", "a", "b")
    with small_engine(model, config, *[(64,) * len(spec.groups)] * 2) as parts:
        this = Lab(kind, directories, parts)
        for tier in ("none", "device", "host"):
            if tier == "host":
                evict_device(parts)
            for name in names:
                this.submit(name or "plain", prompt, name)
            for cached in this.drain().values():
                assert (cached.device, cached.host) == {
                    "none": (0, 0), "device": (64, 0), "host": (0, 64),
                }[tier]  # fmt: skip


def test_the_adapter_of_another_row_is_seen(lab, monkeypatch):
    """The comparison can fail: adapters of a step are given in the wrong order."""
    plain = Adapters.applied

    def turned(self, tokens):
        return plain(self, None if tokens is None else tokens[::-1].copy())

    monkeypatch.setattr(Adapters, "applied", turned)
    with lab() as this:
        this.submit("first", random_prompt(2, 9), "a")
        this.submit("second", random_prompt(3, 9), "b")
        with pytest.raises(AssertionError, match="differ"):
            this.drain()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("minicpm3", r"self_attn\.kv_b_proj does not see every token"),  # sees the whole context
        ("modernbert-decoder", r"lm_head\.dense does not see every token"),  # gives logits
    ],
)
def test_a_layer_that_sees_other_tokens_is_refused(kind, message, tmp_path):
    path = save_adapter(tmp_path / "x", kind)
    model = wrap(model_to_give_away(kind))
    before = model.module.config._attn_implementation
    with pytest.raises(ConfigError, match=rf"^--lora mine=.*{message}"):
        with_adapters(model, {"mine": path})
    assert model.module.config._attn_implementation == before
    assert not any(module._forward_pre_hooks for module in model.module.modules())


def test_a_bad_adapter_is_refused_before_pages_are_taken(
    family, directories, tmp_path, monkeypatch
):
    def taken(*_arguments):
        raise AssertionError("memory was taken")

    monkeypatch.setattr("stratakv.assembly.models.assemble", taken)
    path = save_adapter(tmp_path / "bad", family)
    edit_config(path, target_modules=["q_proj"])
    config = EngineConfig(lora=(f"a={directories['a']}", f"bad={path}"), device_memory="64MiB")
    with pytest.raises(ConfigError, match=r"^--lora bad=.*allowed is what its config targets"):
        build_engine(wrap(model_to_give_away(family)), config)
