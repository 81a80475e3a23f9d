"""Checkpoints with images or sound beside text: those that are proven as a whole are served, with
prompts of text alone, and no other one is.
"""

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from scripts.families_not_served import NOT_SERVED
from stratakv.core.errors import ConfigError
from stratakv.engine.huggingface.model import load_model, wrap
from stratakv.engine.huggingface.model_facts import facts_of
from stratakv.spec.derive import spec_of
from stratakv.spec.families import COMPOSITES
from stratakv.spec.support import refusal
from tests.fixtures.composites import composite
from tests.hit_cases import prove_composite

NEEDS_TEXT_CONFIG = "gemma4_assistant"
RENAMED = "gpt-sw3"


@pytest.mark.parametrize("model_type", COMPOSITES)
def test_a_whole_checkpoint_is_exact_from_its_directory(model_type, tmp_path):
    prove_composite(model_type, tmp_path)


def accept(config):
    """As a start of the server does, before weights are read."""
    facts = facts_of(config, "float32")
    if reason := refusal(spec_of(facts.config, page_tokens=16, dtype="float32")):
        raise ConfigError(reason)


@pytest.mark.parametrize("model_type", sorted(NOT_SERVED.keys() - {NEEDS_TEXT_CONFIG, RENAMED}))
def test_what_the_page_calls_not_served_is_refused_by_name(model_type):
    config = CONFIG_MAPPING[model_type]()
    assert config.model_type == model_type
    with pytest.raises(ConfigError, match=f"model type '{model_type}"):
        accept(config)


def test_an_unproven_whole_is_refused_though_its_text_part_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr("stratakv.spec.derive.COMPOSITES", {})
    whole = composite("gemma3", "gemma3_text")
    whole.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    for take in (lambda: load_model(tmp_path), lambda: wrap(whole)):
        with pytest.raises(ConfigError, match="'gemma3' cannot be served: at most its text part"):
            take()


def test_a_proven_whole_with_another_text_part_is_refused():
    config = CONFIG_MAPPING["got_ocr2"](text_config={"model_type": "llama"})
    with pytest.raises(ConfigError, match="'got_ocr2' cannot be served: at most its text part"):
        accept(config)


def test_the_reason_is_reported_where_a_whole_could_not_be_tried():
    with pytest.raises(ConfigError, match="'gemma3n' cannot be served as a whole: without timm"):
        accept(CONFIG_MAPPING["gemma3n"]())
