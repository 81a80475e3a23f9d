"""Two checkpoints never share a page, on any tier, however little they differ in."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.llama import modeling_llama

from stratakv.core.config import EngineConfig
from stratakv.engine.huggingface.model import HuggingFaceModel, load_model, wrap
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
        parts.cache.progress.settle()
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


def unturned(q, k, *_, **__):
    return q, k


@pytest.mark.parametrize("taken", ["from a directory", "from memory"])
def test_a_model_whose_rope_somebody_has_patched_takes_no_page(tmp_path, monkeypatch, taken):
    store, directory = tmp_path / "store", tmp_path / "model"
    store.mkdir()
    original().save_pretrained(directory)

    def model() -> HuggingFaceModel:
        return wrap(original()) if taken == "from memory" else load_model(directory, "float32")

    first = answered(model(), store)[0]
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", unturned)
        wanted = reference_greedy(original(), TOKENS, 6)[0]
        assert wanted != first
        assert [answered(model(), store) for _ in range(2)] == [(wanted, 0)] * 2
    assert answered(model(), store) == (first, END)


def test_a_checkpoint_that_was_edited_in_place_takes_no_page(tmp_path):
    """Its digests are known from the load before, and no longer true."""
    store, directory = tmp_path / "store", tmp_path / "model"
    store.mkdir()
    original().save_pretrained(directory)
    wanted = [reference_greedy(original(many), TOKENS, 6)[0] for many in (0, 1)]
    file = directory / "model.safetensors"
    old = file.stat().st_mtime_ns - 10**10
    os.utime(file, ns=(old, old))
    assert answered(load_model(directory, "float32"), store) == (wanted[0], 0)
    assert answered(load_model(directory, "float32"), store) == (wanted[0], END)
    tensors = load_file(file)
    name = "model.embed_tokens.weight"
    row = original(1).state_dict()[name][ROWS[0]].numpy().tobytes()
    raw = file.read_bytes()
    at = raw.index(tensors[name][ROWS[0]].numpy().tobytes())
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(row)
    os.utime(file, ns=(old, old))
    assert answered(load_model(directory, "float32"), store) == (wanted[1], 0)
