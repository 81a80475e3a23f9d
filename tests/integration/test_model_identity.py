"""Two checkpoints never share a page, on any tier, however little they differ in."""

from pathlib import Path

import pytest
import torch

from stratakv.core.config import EngineConfig
from stratakv.engine.model import HuggingFaceModel, load_model, wrap
from stratakv.spec.derive import spec_of
from tests.engines import drain, greedy, small_engine, tokens_of
from tests.fixtures.models import model_to_give_away, reference_greedy
from tests.storage_cases import PATIENT, attach, file_url

ROWS = range(2, 42)
"""Tokens whose embeddings differ."""
TOKENS = [ROWS[at * 7 % len(ROWS)] for at in range(100)]
END = 96


def original(rows: int = 0):
    """A llama, untied; ``rows`` of its embedding are others."""
    model = model_to_give_away("llama")
    model.model.embed_tokens.weight.data[ROWS[0] : ROWS[0] + rows] += 0.5
    return model


def answered(model: HuggingFaceModel, store: Path) -> tuple[list[int], int]:
    """Its answer, and how many tokens of the prompt the store gave."""
    config = EngineConfig(
        page_tokens=16, max_running=4, max_model_len=512, chunk_tokens=48, step_tokens=96,
        **PATIENT,
    )  # fmt: skip
    groups = len(spec_of(model.config, page_tokens=16, dtype=model.dtype).groups)
    with small_engine(model, config, (64,) * groups, (64,) * groups) as parts:
        attach(parts, file_url(store))
        parts.engine.submit(greedy("r", TOKENS, 6))
        outputs = drain(parts)
        parts.cache.settle()
        return tokens_of(outputs), outputs[0].cached.storage


@pytest.mark.parametrize("rows", [1, len(ROWS)])
@pytest.mark.parametrize("taken", ["from a directory", "from memory"])
def test_checkpoints_that_differ_in_rows_of_the_embedding_share_no_page(tmp_path, taken, rows):
    torch.set_num_threads(1)
    store = tmp_path / "store"
    store.mkdir()

    def model(rows: int) -> HuggingFaceModel:
        if taken == "from memory":
            return wrap(original(rows))
        directory = tmp_path / f"model{rows}"
        original(rows).save_pretrained(directory)
        return load_model(directory, "float32")

    wanted = [reference_greedy(original(many), TOKENS, 6)[0] for many in (0, rows)]
    assert wanted[0] != wanted[1]
    assert answered(model(0), store) == (wanted[0], 0)
    assert answered(model(rows), store) == (wanted[1], 0)
    assert answered(model(0), store) == (wanted[0], END)
    assert answered(model(rows), store) == (wanted[1], END)
