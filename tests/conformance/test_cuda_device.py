"""An engine as ``--device cuda`` assembles it, over a driver that is late at random: hits equal
recomputation. Attention is torch's here, for Triton's interpreter is slow (``test_triton_engine``).
"""

import pytest
import torch
from transformers import PreTrainedModel

from stratakv.assembly import cuda, devices
from stratakv.assembly.cuda import Gpu, device_over, pools_on
from stratakv.assembly.device import CPU
from stratakv.assembly.devices import device_of
from stratakv.assembly.models import build_engine
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.engine.huggingface.model import load_model, wrap
from stratakv.engine.verify.report import Way
from stratakv.testing.hit_equals_recompute import HitEqualsRecompute
from stratakv.testing.specs import small_spec
from tests.engines import greedy, run, tokens_of
from tests.fake_cuda import FakeCuda
from tests.fake_graphs import FakeGraphs
from tests.fixtures.models import (
    model_to_give_away,
    random_prompt,
    reference_greedy,
    tiny_model,
)
from tests.late_gpu import AT, late_gpu

LEFT_OUT = {
    Way.STORAGE, Way.STORAGE_TURN, Way.STORAGE_BATCHED, Way.RESTART, Way.BATCHED, Way.HOST_BATCHED,
}  # fmt: skip
"""As of ``test_second_device``."""


class TestAGpu(HitEqualsRecompute):
    ways = tuple(way for way in Way if way not in LEFT_OUT)

    def device(self):
        device, self.driver = late_gpu()
        return device

    @pytest.fixture(scope="class")
    @classmethod
    def report(cls):
        suite = cls()
        yield suite.verified()
        held = [stream.held for stream in suite.driver.streams]
        assert any(held), "no stream was ever held"
        assert not suite.driver.registered, "host memory stays pinned"
        suite.driver.close()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
class TestAGpuThatReplaysDecodeSteps(TestAGpu):
    def device(self):
        self.graphs = FakeGraphs()
        device, self.driver = late_gpu(graphs=lambda: self.graphs, max_bs=2)
        return device


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v4"])
def test_settings_become_an_engine_on_it(family):
    """A share of what is free beside the model; batches, states and live pages."""
    device, driver = late_gpu(seed=3)
    config = EngineConfig(
        device="cuda", device_memory="0.003", host_memory="1MiB", max_running=2, step_tokens=64
    )
    parts = build_engine(wrap(model_to_give_away(family)), config, device)
    assert 1 << 20 < parts.table.device_bytes <= 0.003 * (1 << 30)
    try:
        prompts = [random_prompt(seed, 300 + 7 * seed) for seed in range(3)]
        wanted = [reference_greedy(tiny_model(family), prompt, 4)[0] for prompt in prompts]
        for name in ("first", "second"):
            asked = [greedy(f"{name} {at}", prompt, 4) for at, prompt in enumerate(prompts)]
            out = run(parts, *asked)
            assert [tokens_of(out[prompt.id]) for prompt in asked] == wanted
        parts.engine.check()
    finally:
        parts.close()
        driver.close()


def test_pools_that_do_not_fit_are_refused_with_figures(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    spec, there = small_spec([], page_tokens=4), torch.device("cuda", 1)
    here = Gpu(at=there, driver=None, trials=full, free=lambda: 4096, idle=full)
    monkeypatch.setattr(cuda, "TensorPools", full)
    message = r"^--device-memory: the tier takes .* of cuda:1, and 4 KiB are free; allowed is less"
    with pytest.raises(ConfigError, match=message):
        pools_on(here, spec, [3])


def test_pools_that_leave_no_room_to_try_copies_are_refused_with_figures():
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    made = FakeCuda(0, device=None)
    device = device_over(
        lambda: Gpu(at=AT, driver=made, trials=full, free=lambda: 2 << 20, idle=lambda: None), AT
    )
    config = EngineConfig(device="cuda", device_memory="1MiB", max_running=2, step_tokens=64)
    message = r"^--device-memory: .* tried at start with 32 MiB of cpu .*, and 2 MiB are free; all"
    with pytest.raises(ConfigError, match=message):
        build_engine(wrap(model_to_give_away("llama")), config, device)
    made.close()


def test_a_model_that_does_not_fit_is_refused_with_figures(monkeypatch, tmp_path):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model_to_give_away("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(PreTrainedModel, "to", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda at: (4096 * at.index, 1 << 30))
    message = r"^MODEL: its weights take \d.*, and 4 KiB of cuda:1 are free; allowed is a smaller"
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, device=torch.device("cuda", 1))


def test_settings_choose_it_without_taking_the_gpu(monkeypatch):
    monkeypatch.setattr(devices, "own_gpu", lambda _: 1)
    device = device_of(EngineConfig(device="cuda"))
    assert (device.at, device.steps_at_once) == (torch.device("cuda", 1), 2)
    assert device_of(EngineConfig()) is CPU
