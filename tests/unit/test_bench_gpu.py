"""Benches of a GPU, as far as a CPU can stand in for one: what they ask, count and report."""

from dataclasses import replace

import pytest
import torch

from stratakv.assembly.device import CPU
from stratakv.bench import gpu_sparse, gpu_transfer, serve, sparse, transfer
from stratakv.bench.gpu_serve import GpuShape
from stratakv.bench.gpu_serve import run_on as serve_on
from stratakv.bench.transfer_v4 import v4_flash_spec
from stratakv.core.errors import ConfigError
from stratakv.engine.cuda import facts as cuda_facts
from stratakv.spec.budget import FILLING_PAGES
from tests.late_gpu import late_gpu
from tests.tiny_v32 import TINY_V32

TINY = GpuShape(
    hidden=64, layers=2, heads=4, key_heads=2, inner=96, vocabulary=300, dtype=torch.float32,
    prompt_tokens=512, batch=3, short_tokens=40, new_tokens=24, page_tokens=16, chunk_tokens=64,
)  # fmt: skip


def test_pages_of_both_models_are_moved_beside_one_large_copy():
    llama = gpu_transfer.llama_8b_spec()
    assert llama.groups[0].page_bytes == 8 << 20
    specs = (("llama 8B", llama), ("DeepSeek-V4-Flash", v4_flash_spec(128)))
    found = gpu_transfer.run_on(CPU, specs, plan_bytes=16 << 20, copy_bytes=1 << 20)
    for case, (name, spec) in zip(found["cases"], specs, strict=True):
        assert case["model"] == name
        assert case["bytes_moved"] >= 2 * sum(group.page_bytes for group in spec.groups)
        assert case["d2h_ratio"] > 0 < case["h2d_ratio"]


def test_rows_are_swapped_in_and_arrive():
    case = gpu_sparse.measure(torch.device("cpu"), 2, 1)
    assert case.batch == 2
    assert case.ratio == pytest.approx(case.swap_in_us / case.bare_us)


SPARSE = replace(
    gpu_sparse.SERVED, shape=TINY_V32, held=4, concurrency=(1, 12), context_tokens=343,
    answer_tokens=4, buffer_rows=24, page_tokens=8, chunk_tokens=64, laps=2,
)  # fmt: skip


@pytest.mark.parametrize("late", [False, True])
def test_decoding_is_measured_with_rows_on_the_host_and_without(late, capsys):
    device, driver = late_gpu() if late else (CPU, None)
    found = gpu_sparse.run_on(device, 1, SPARSE)
    alone, many = found["served"]
    assert (alone["concurrency"], many["concurrency"]) == (1, 12)
    assert many["resident_at_once"] <= SPARSE.held < many["offload_at_once"]
    assert min(many["ratio"], many["same_memory_ratio"]) > 0
    assert found["left_out"] == ()
    assert "contexts of 343, device pages for 4 requests" in capsys.readouterr().out
    if driver is not None:
        assert not driver.registered
        driver.close()


def test_what_would_take_too_long_is_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setattr(gpu_sparse, "SERVED_S", 0.001)
    found = gpu_sparse.run_on(CPU, 1, replace(SPARSE, concurrency=(1, 2, 4)))
    assert [case["concurrency"] for case in found["served"]] == [1]
    assert "left out, for want of time: 2, 4" in capsys.readouterr().out


def test_buffers_of_all_fit_in_what_the_device_holds():
    load = gpu_sparse.SERVED
    assert load.buffer_rows >= load.shape["index_topk"]
    each = -(-load.buffer_rows // load.page_tokens) + FILLING_PAGES + 1
    assert load.most * each <= load.held * load.pages


def test_a_model_is_asked_for_first_tokens_and_for_many(capsys):
    found = serve_on(CPU, CPU, TINY)
    assert found["decode_ratio"] == pytest.approx(
        found["decode_tok_s"] / found["transformers_tok_s"]
    )
    assert found["host_hit_ratio"] < 1
    assert found["traffic_ratio"] > 0 < found["graph_ratio"]
    assert "first token of 512" in capsys.readouterr().out
    assert replace(TINY, dtype=torch.bfloat16).token_bytes == TINY.token_bytes // 2


@pytest.mark.parametrize(
    ("run", "given"),
    [
        (transfer.run, {}),
        (sparse.run, {}),
        (serve.run, {"trace": None, "model": None}),
    ],
)
def test_each_asks_for_the_gpu_before_anything_else(run, given, monkeypatch):
    fine = cuda_facts.cuda_facts({}, 0)
    monkeypatch.setattr(cuda_facts, "cuda_facts", lambda *_: replace(fine, built_for=None))
    with pytest.raises(ConfigError, match=r"^--device cuda: torch .* without CUDA"):
        run(**given, device="cuda")


@pytest.mark.parametrize(
    ("run", "given", "flag"),
    [
        (sparse.run, {"text": "a"}, "--text"),
        (sparse.run, {"selections": "a"}, "--selections"),
        (serve.run, {"trace": "a", "model": None}, "--trace"),
        (serve.run, {"trace": None, "model": "a"}, "--model"),
    ],
)
def test_what_a_gpu_has_no_case_for_is_refused(run, given, flag):
    with pytest.raises(ConfigError, match=f"^{flag}: allowed with --device cpu$"):
        run(**given, device="cuda")
