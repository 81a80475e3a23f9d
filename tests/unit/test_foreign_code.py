"""Our own engine runs no code of a checkpoint, also where somebody at the terminal says yes."""

import builtins
import json
from pathlib import Path

import pytest

from stratakv.core.errors import ConfigError
from stratakv.engine.huggingface.model_facts import read_facts
from stratakv.serve.tokenizer import Tokenizer

CODE = """
from pathlib import Path
from transformers import LlamaConfig, PreTrainedTokenizerFast
Path({ran!r}).touch()
class Config(LlamaConfig):
    model_type = "foreign"
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(builtins, "input", lambda _: "y")
    path = tmp_path / "model"
    path.mkdir()
    (path / "foreign.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    names = {"AutoConfig": "foreign.Config", "AutoTokenizer": ["foreign.Tokenizer", None]}
    settings = {"model_type": "foreign", "auto_map": names, "vocab_size": 8}
    (path / "config.json").write_text(json.dumps(settings))
    (path / "model.safetensors").write_bytes(b"")
    settings = {"tokenizer_class": "Foreign", "auto_map": names}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("reads", [read_facts, Tokenizer])
def test_a_checkpoints_own_code_is_refused_and_not_run(directory, reads):
    with pytest.raises(ConfigError, match=f"MODEL {directory}: "):
        reads(directory)
    assert not Path(directory.parent, "ran").exists()
