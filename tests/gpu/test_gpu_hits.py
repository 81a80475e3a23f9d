"""A hit equals a recomputation on a GPU, in float32, for each family."""

import pytest
import torch

from stratakv.assembly.cuda import cuda_device
from stratakv.assembly.models import build_engine
from stratakv.core.config import EngineConfig
from stratakv.engine.model import wrap
from stratakv.engine.verify_report import Way
from stratakv.testing.hit_equals_recompute import HitEqualsRecompute
from tests.engines import greedy, run, tokens_of
from tests.fixtures.bounds import bound_of
from tests.fixtures.models import model_to_give_away, random_prompt

LEFT_OUT = {
    Way.STORAGE, Way.STORAGE_TURN, Way.STORAGE_BATCHED, Way.RESTART, Way.BATCHED, Way.HOST_BATCHED,
}  # fmt: skip
"""As of ``tests/conformance/test_second_device.py``."""
EXACT = (
    "llama", "qwen3", "gemma3", "gpt_oss", "qwen3_next", "mamba2", "deepseek_v3", "deepseek_v4",
)  # fmt: skip
AT = torch.device("cuda", 0)


class Hits(HitEqualsRecompute):
    ways = tuple(way for way in Way if way not in LEFT_OUT)
    family = "llama"

    def model(self):
        return wrap(model_to_give_away(self.family).to(AT))

    def device(self):
        return cuda_device(0)


for _family in EXACT:
    globals()[f"Test{_family.title().replace('_', '')}"] = type(
        "Hits", (Hits,), {"family": _family, "bound": bound_of(_family)}
    )
del Hits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_hit_in_fewer_bits_chooses_the_tokens_of_the_first_answer(family, dtype):
    """From the device, and after others have driven it to the host."""
    config = EngineConfig(
        device="cuda", device_memory="3MiB", host_memory="64MiB", max_running=2, step_tokens=256
    )
    model = wrap(model_to_give_away(family).to(AT, dtype))
    parts = build_engine(model, config, cuda_device(0))
    try:
        answers = []
        for name in ("computed", "device", "host"):
            (out,) = run(parts, greedy(name, random_prompt(1, 300), 1)).values()
            answers.append(tokens_of(out))
            cached = out[0].cached
            assert (cached.device + cached.host > 0) is (name != "computed")
            if name == "device":
                for seed in range(2, 12):
                    run(parts, greedy(f"other {seed}", random_prompt(seed, 500), 1))
        assert answers[1:] == answers[:1] * 2
        parts.engine.check()
    finally:
        parts.close()
