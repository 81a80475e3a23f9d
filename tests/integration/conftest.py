"""What many servers of the tests serve. Owns the directory; a file may have one of its own."""

from pathlib import Path

import pytest

from tests.fixtures.models import tiny_model
from tests.serving import train_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A small model that attends through windows and to everything, and a tokenizer."""
    path = train_tokenizer(tmp_path_factory.mktemp("model"))
    tiny_model("gemma3").save_pretrained(path)
    return path
