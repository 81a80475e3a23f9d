"""An engine on a second device, assembled from another ``Device`` and nothing else."""

from dataclasses import replace

import pytest

from stratakv.assembly import sizing
from stratakv.assembly.device import CPU
from stratakv.assembly.models import build_engine
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.engine.attention.torch_pools import TensorPools
from stratakv.engine.huggingface.model import wrap
from stratakv.engine.verify.report import Way
from stratakv.testing.hit_equals_recompute import HitEqualsRecompute
from tests.engines import greedy, run, tokens_of
from tests.fixtures.models import (
    model_to_give_away,
    random_prompt,
    reference_greedy,
    tiny_model,
)
from tests.second_device import Arena, CountingTransfer, second_device

LEFT_OUT = {
    Way.STORAGE, Way.STORAGE_TURN, Way.STORAGE_BATCHED, Way.RESTART, Way.BATCHED, Way.HOST_BATCHED,
}  # fmt: skip
"""Stores know no device. Where a batch has an abort, a step that was launched before chooses a
token that nobody gets, and the suite tells tokens by their order; batches are below."""


class TestASecondDevice(HitEqualsRecompute):
    ways = tuple(way for way in Way if way not in LEFT_OUT)

    def device(self):
        device, self.close = second_device()
        return device

    @pytest.fixture(scope="class")
    @classmethod
    def report(cls):
        CountingTransfer.held = 0
        suite = cls()
        yield suite.verified()
        suite.close()
        assert CountingTransfer.held, "no copy was given anything to come after"


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v4"])
def test_settings_become_an_engine_on_it(family, monkeypatch):
    """Its tier takes no host memory, so none has to be free for it."""
    config = EngineConfig(device_memory="3MiB", host_memory="1MiB", max_running=2)
    need = sizing.free_host_bytes
    monkeypatch.setattr(sizing, "free_host_bytes", lambda: 2 << 20)
    device, close = second_device()
    with pytest.raises(
        ConfigError,
        match=r"--device-memory 3MiB: the tier takes .* MiB, and 2 MiB are free; allowed",
    ):
        build_engine(wrap(model_to_give_away(family)), config, replace(device, free=CPU.free))
    parts = build_engine(wrap(model_to_give_away(family)), config, device)
    monkeypatch.setattr(sizing, "free_host_bytes", need)
    assert isinstance(parts.pools, TensorPools)
    assert {type(arena) for arena in parts.arenas} == {Arena}
    try:
        prompts = [random_prompt(seed, 300 + 7 * seed) for seed in range(3)]
        wanted = [
            reference_greedy(tiny_model(family), prompt, 4 + seed)[0]
            for seed, prompt in enumerate(prompts)
        ]
        for name, cached in (("first", 0), ("second", 1)):
            asked = [
                greedy(f"{name} {seed}", prompt, 4 + seed) for seed, prompt in enumerate(prompts)
            ]
            out = run(parts, *asked)
            assert [tokens_of(out[prompt.id]) for prompt in asked] == wanted
            hits = [of.device + of.host > 0 for of in (out[p.id][0].cached for p in asked)]
            assert any(hits) if cached else not any(hits)
        parts.engine.check()
    finally:
        parts.close()
        close()
