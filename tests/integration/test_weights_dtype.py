"""A model whose config.json names no dtype: a server is sized for one, and again for what its
weights turn out to be. Over the functions of ``stratakv serve``."""

from dataclasses import replace

import pytest
import torch

from stratakv.assembly.device import CPU
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.serve.wiring import build_service, check_service
from tests.engines import greedy, run, tokens_of
from tests.fixtures.models import model_to_give_away, save_without_dtype
from tests.serving import train_tokenizer

CONFIG = EngineConfig(
    page_tokens=16, device_memory="1MiB", host_memory="1MiB", max_model_len=256, max_running=4,
    step_tokens=64, chunk_tokens=32, reserve_tokens=16,
)  # fmt: skip
PROMPT = [n * 7 % 400 for n in range(100)]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def directory(tmp_path_factory, dtype):
    torch.set_num_threads(1)
    path = train_tokenizer(tmp_path_factory.mktemp(dtype))
    save_without_dtype(model_to_give_away("llama").to(getattr(torch, dtype)), path)
    return path


def served(directory, config):
    return build_service(directory, config, ServerConfig())[1]


def answered(parts, name):
    (outputs,) = run(parts, greedy(name, PROMPT, 4)).values()
    return tokens_of(outputs), outputs[0].cached.device


def test_it_is_sized_for_what_its_weights_are(directory, dtype):
    first = check_service(directory, CONFIG, ServerConfig(), CPU)
    parts = served(directory, CONFIG)
    try:
        (buffer, _) = parts.spec.groups[0].buffers
        assert (parts.model.dtype, buffer.dtype) == (dtype, dtype)
        assert parts.plan.device[0] == first.device[0] * (2 if dtype == "bfloat16" else 1)
        assert parts.table.device_bytes <= 1 << 20
        answer, cached = answered(parts, "computed")
        assert cached == 0
        assert answered(parts, "found") == (answer, 96)
        parts.engine.check()
    finally:
        parts.close()
    named = served(directory, replace(CONFIG, dtype=dtype))
    try:
        assert named.plan == parts.plan
        assert answered(named, "named")[0] == answer
    finally:
        named.close()


def test_with_storage_it_has_to_be_named(directory, dtype, tmp_path):
    """The store was opened for pages of another size."""
    config = replace(CONFIG, storage=f"file://{tmp_path}/store?quota=64MiB")
    if dtype == "float32":  # as was supposed
        served(directory, config).close()
        return
    wanted = r"--dtype auto: config.json names none.*allowed with --storage and --tp is --dtype b"
    with pytest.raises(ConfigError, match=wanted):
        served(directory, config)
    parts = served(directory, replace(config, dtype=dtype))
    try:
        assert parts.engine.storage_stats() is not None
    finally:
        parts.close()
