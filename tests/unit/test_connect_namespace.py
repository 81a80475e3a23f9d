"""Which bytes of a model directory are in the names of another engine's pages."""

import json

import pytest
import torch
from safetensors.torch import save_file

from stratakv.connect.namespace import identify_weights, processing_field
from stratakv.core.errors import ConfigError


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    return tmp_path


def test_weights_that_hugging_faces_loader_leaves_out_are_in_a_name(model):
    """vLLM takes ``consolidated*.safetensors`` where there are any, else all there are."""
    for name in ("extra.safetensors", "consolidated.safetensors"):
        seen = {identify_weights(model)}
        for value in (1, 2):
            save_file({"b": torch.full((2,), value)}, model / name)
            seen.add(identify_weights(model))
        assert len(seen) == 3


def test_shards_beside_a_whole_file_are_in_a_name(model):
    shard, index = "model-00001-of-00001.safetensors", model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    seen = set()
    for value in (1, 2):
        save_file({"a": torch.full((2,), value)}, model / shard)
        seen.add(identify_weights(model))
    index.write_text(json.dumps({"weight_map": {"b": shard}}))
    assert len({*seen, identify_weights(model)}) == 3


def test_a_name_is_the_same_again(model):
    save_file({"b": torch.ones(2)}, model / "extra.safetensors")
    assert identify_weights(model) == identify_weights(model)


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
)
def test_what_becomes_of_an_image_is_in_a_name(model, name):
    """An engine's block hash has the image as it was sent."""
    seen = {identify_weights(model)}
    for mean in (0.5, 0.4):
        (model / name).write_text(json.dumps({"image_mean": [mean]}))
        seen.add(identify_weights(model))
    assert len(seen) == 3


def test_what_becomes_of_an_image_by_a_tokenizer_of_its_own_is_in_a_name(model, tmp_path):
    """Mistral's tokenizers bring it."""
    other, name = tmp_path / "tokenizer", str(tmp_path / "tokenizer")
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    plain = processing_field("--tokenizer", str(model), str(model))
    assert processing_field("--tokenizer", name, str(model)) == plain, "tokens decide no page"
    seen = [plain]
    for size in (1024, 1540):
        (other / "tekken.json").write_text(json.dumps({"image": {"max_image_size": size}}))
        seen.append(processing_field("--tokenizer", name, str(model)))
    assert len({one["processing"] for one in seen}) == 3
    (other / "tekken.json").unlink()
    (other / "tekken.json").mkdir()
    with pytest.raises(ConfigError, match=r"--tokenizer .*: tekken\.json cannot be read"):
        processing_field("--tokenizer", name, str(model))


def test_weights_that_cannot_be_read_are_refused(model):
    (model / "extra.safetensors").mkdir()
    with pytest.raises(ConfigError, match="weights cannot be read"):
        identify_weights(model)


@pytest.mark.parametrize("key", ["processor_class", "auto_map"])
def test_a_tokenizer_that_names_the_processor_of_images_is_in_a_name(model, key):
    """Where no other file says which class prepares an image, this one does."""
    file, seen = model / "tokenizer_config.json", {identify_weights(model)}
    file.write_text(json.dumps({"chat_template": "a", "auto_map": {"AutoTokenizer": "a.A"}}))
    seen.add(identify_weights(model))
    assert len(seen) == 1, "what makes tokens decides no page"
    for name in ("processing_a.A", "processing_b.B"):
        named = {"processor_class": name, "auto_map": {"AutoProcessor": name}}[key]
        file.write_text(json.dumps({key: named}))
        seen.add(identify_weights(model))
        file.write_text(json.dumps({key: named, "chat_template": "b"}))
        seen.add(identify_weights(model))
    file.write_text("no JSON")
    seen.add(identify_weights(model))
    assert len(seen) == 4


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json", "processing.py"])
def test_a_processor_beside_a_tokenizer_of_its_own_is_in_a_name(model, tmp_path_factory, name):
    """SGLang takes class, type and code from there."""
    other, seen = tmp_path_factory.mktemp("tokenizer"), []
    for one in ("A", "B"):
        seen.append(processing_field("--tokenizer-path", str(other), str(model)))
        (other / name).write_text(json.dumps({"processor_class": one}))
    seen.append(processing_field("--tokenizer-path", str(other), str(model)))
    assert len({one["processing"] for one in seen}) == 3
