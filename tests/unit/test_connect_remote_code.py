"""Code that a checkpoint names and does not bring is in no name: it may be exchanged."""

import json

import pytest

from stratakv.connect.namespace import identify_weights, processing_field
from stratakv.core.errors import ConfigError
from tests.fixtures import fake_sglang
from tests.unit.test_connect_doctor import released, verdicts
from tests.unit.test_connect_vllm import checkpoint

pytestmark = pytest.mark.usefixtures("no_toolkit")
ELSEWHERE = {"auto_map": {"AutoModel": "org/repo--modeling_a.A"}}
REFUSED = "auto_map AutoModel org/repo--modeling_a.A is code that does not lie beside the model"


@pytest.fixture
def model(tmp_path):
    return checkpoint(tmp_path / "model")


@pytest.fixture
def storage(tmp_path):
    return f"file://{tmp_path}/store?quota=16MiB"


FILES = (
    "config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "image_processor/config.json",
)  # fmt: skip


def write(directory, name, settings):
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(settings))


@pytest.mark.parametrize("name", FILES)
def test_code_elsewhere_is_refused_wherever_it_is_named(model, tmp_path, name):
    write(model, name, ELSEWHERE)
    with pytest.raises(ConfigError) as refused:
        identify_weights(model)
    assert str(refused.value) == (
        f"MODEL {model}: {name}: {REFUSED}, and may be exchanged; allowed is a copy beside it, "
        "named without --, or no such entry in auto_map"
    )
    with pytest.raises(ConfigError, match=f"^--tokenizer {model}: {name}: {REFUSED}"):
        processing_field("--tokenizer", str(model), "another")


@pytest.mark.parametrize("name", FILES[:4])
def test_the_same_code_beside_the_model_is_in_its_name(model, name):
    write(model, name, {"auto_map": {"AutoModel": "modeling_a.A"}})
    seen = set()
    for text in ("one = 1", "one = 2"):
        (model / "modeling_a.py").write_text(text)
        seen.add(identify_weights(model))
    assert len(seen) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"auto_map": {"AutoTokenizer": [None, "org/repo--a.A"]}},
        {"auto_map": ["a.A", "org/repo--a.A"]},
        {"auto_map": "org/repo--a.A"},
        {"auto_map": {"AutoImageProcessor": {"torchvision": "org/repo--a.A"}}},
        {"auto_map": {"AutoModel": "/elsewhere/modeling_a.A"}},
        {"vision_config": {"auto_map": {"AutoModel": "org/repo--a.A"}}},
        {"parts": [{"auto_map": {"AutoModel": "org/repo--a.A"}}]},
    ],
    ids=str,
)
def test_it_is_seen_in_every_form(model, settings):
    write(model, "processor_config.json", settings)
    with pytest.raises(ConfigError, match=r"processor_config\.json: auto_map .* is code"):
        identify_weights(model)


@pytest.mark.parametrize(
    "text", ['{"stop": "a--b", "auto_map": null}', "no JSON", "[" * 100_000, '{"auto_map": {}}']
)
def test_what_names_no_code_is_taken(model, text):
    (model / "tokenizer_config.json").write_text(text)
    identify_weights(model)


def test_the_doctor_says_so(monkeypatch, model, storage, tmp_path):
    released(monkeypatch, "0.32.0")
    assert verdicts(model, storage)["model"][0] == "fine"
    other = checkpoint(tmp_path / "other")
    write(other, "preprocessor_config.json", ELSEWHERE)
    verdict, text = verdicts(other, storage)["model"]
    assert (verdict, REFUSED in text) == ("bad", True)


@pytest.mark.parametrize("flag", ["--tokenizer", "--hf-config-path", "--speculative-config"])
def test_the_doctor_looks_at_directories_of_vllms_flags(
    monkeypatch, model, storage, tmp_path, flag
):
    released(monkeypatch, "0.32.0")
    other = checkpoint(tmp_path / "other")
    given = json.dumps({"model": str(other)}) if flag == "--speculative-config" else str(other)
    assert verdicts(model, storage, flags=(flag, given))["flags"][0] == "fine"
    write(other, "config.json", ELSEWHERE)
    verdict, text = verdicts(model, storage, flags=(flag, given))["flags"]
    assert (verdict, text.startswith(flag), REFUSED in text) == ("bad", True, True)


@pytest.mark.parametrize(
    "flag", ["--tokenizer-path", "--json-model-override-args", "--speculative-draft-model-path"]
)
def test_the_doctor_looks_at_directories_of_sglangs_flags(
    monkeypatch, model, storage, tmp_path, flag
):
    fake_sglang.install(monkeypatch, fake_sglang.arguments(model))
    other = checkpoint(tmp_path / "other")
    write(other, "config.json", ELSEWHERE)
    given = json.dumps(ELSEWHERE) if flag.startswith("--json") else str(other)
    found = verdicts(model, storage, engine="sglang", flags=(flag, given))
    verdict, text = found["flags"]
    assert (verdict, text.startswith(flag), REFUSED in text) == ("bad", True, True)
    given = "{}" if flag.startswith("--json") else str(model)
    found = verdicts(model, storage, engine="sglang", flags=(flag, given))
    assert found["flags"][0] == "fine"
