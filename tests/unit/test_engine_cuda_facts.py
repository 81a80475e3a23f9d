from dataclasses import replace

import pytest

from stratakv.assembly.devices import device_of
from stratakv.cli import main
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.engine.cuda import facts
from stratakv.engine.cuda.facts import CudaFacts, cuda_refusal, own_gpu

FINE = CudaFacts(
    torch_version="2.13.0+cu130",
    built_for="13.0",
    gpus=2,
    visible=None,
    index=1,
    name="NVIDIA H100",
    capability=(9, 0),
    has_triton=True,
)


def test_what_computes_well_is_not_refused():
    assert cuda_refusal(FINE) is None
    assert cuda_refusal(replace(FINE, capability=(8, 0))) is None
    assert cuda_refusal(replace(FINE, capability=(12, 0))) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"torch_version": "2.13.0+cpu", "built_for": None, "gpus": 0, "has_triton": False},
            "torch 2.13.0+cpu is built without CUDA; allowed is --device cpu",
        ),
        ({"gpus": 0}, "no GPU is visible; allowed is"),
        ({"gpus": 0, "visible": ""}, "no GPU is visible (CUDA_VISIBLE_DEVICES=); allowed is"),
        ({"gpus": 2, "index": 3}, "2 of 4 GPUs are visible; allowed is --device cpu, or a GPU for"),
        (
            {"capability": (7, 5), "name": "Tesla T4"},
            "Tesla T4 has compute capability 7.5; allowed is 8.0 and more",
        ),
        ({"has_triton": False}, "Triton is not installed; allowed after: pip install"),
    ],
)
def test_each_lack_has_a_sentence_of_its_own(changed, reason):
    assert cuda_refusal(replace(FINE, **changed)).startswith(reason)


def test_each_rank_of_a_machine_has_a_gpu_of_its_own(monkeypatch):
    asked = []

    def looked(environ, index):
        asked.append(index)
        return replace(FINE, index=index)

    monkeypatch.setattr(facts, "cuda_facts", looked)
    assert (own_gpu({}), own_gpu({"LOCAL_RANK": "1"})) == (0, 1)
    assert asked == [0, 1]
    with pytest.raises(ConfigError, match=r"^--device cuda: 2 of 8 GPUs are visible"):
        own_gpu({"LOCAL_RANK": "7"})


def test_this_machine_is_asked_before_a_model_is_read(monkeypatch, capsys):
    monkeypatch.setattr(facts, "cuda_facts", lambda *_: replace(FINE, gpus=0, index=0))
    with pytest.raises(ConfigError, match=r"^--device cuda: no GPU is visible"):
        device_of(EngineConfig(device="cuda"))
    assert main(["serve", "models/demo", "--device", "cuda", "--port", "0"]) == 2
    assert "--device cuda: no GPU is visible" in capsys.readouterr().err
