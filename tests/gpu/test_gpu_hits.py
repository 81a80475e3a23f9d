"""A hit equals a recomputation on a GPU, for each family in float32, and in fewer bits: within what
two batch shapes without a cache differ by on the same GPU, as ``stratakv verify`` has it."""

from uuid import uuid4

import torch

from stratakv.assembly.cuda import cuda_device
from stratakv.core.clock import MonotonicClock
from stratakv.engine.huggingface.model import wrap
from stratakv.engine.verify.claims import Settings, Verifier, cut_sizes
from stratakv.engine.verify.report import Way
from stratakv.engine.verify.rounding import bound_beside, compare_rounded, measure_rounding
from stratakv.serve.verify_model import MOST_ROUNDING
from stratakv.spec.derive import spec_of
from stratakv.testing.hit_engine import PAGE_TOKENS
from stratakv.testing.hit_equals_recompute import HitEqualsRecompute, prompts
from tests.fixtures.models import model_to_give_away

LEFT_OUT = {
    Way.STORAGE, Way.STORAGE_TURN, Way.STORAGE_BATCHED, Way.RESTART, Way.BATCHED, Way.HOST_BATCHED,
}  # fmt: skip
"""As of ``tests/conformance/test_second_device.py``."""
EXACT = (
    "llama", "qwen3", "gemma3", "gpt_oss", "qwen3_next", "mamba2", "deepseek_v3", "deepseek_v4",
)  # fmt: skip
FEWER_BITS = ("llama", "gemma3")
AT = torch.device("cuda", 0)


class Hits(HitEqualsRecompute):
    ways = tuple(way for way in Way if way not in LEFT_OUT)
    family = "llama"
    dtype = torch.float32

    def model(self):
        return wrap(model_to_give_away(self.family).to(AT, self.dtype))

    def device(self):
        return cuda_device(0)

    def verified(self):
        model = self.model()
        asked = prompts(model.vocab_size, self.lengths)
        spec = spec_of(model.config, page_tokens=PAGE_TOKENS, dtype=model.dtype)
        cuts = cut_sizes(spec, model.config, max(self.lengths))
        start, salt = self.start(model), f"hits {uuid4()}"
        loose = Settings(bound=1.0, salt=salt, cuts=cuts)
        rounding = measure_rounding(start, asked, loose, MonotonicClock())
        assert rounding <= MOST_ROUNDING, "a wrong page would not stand out"
        settings = Settings(bound=bound_beside(rounding), salt=salt, cuts=cuts)
        return Verifier(start, asked, settings, judge=compare_rounded).run(self.ways)


CASES = [(family, torch.float32) for family in EXACT] + [
    (family, dtype) for family in FEWER_BITS for dtype in (torch.bfloat16, torch.float16)
]
for _family, _dtype in CASES:
    _name = f"{_family} {_dtype}".replace("torch.", "").title().replace("_", "").replace(" ", "")
    globals()[f"Test{_name}"] = type("Hits", (Hits,), {"family": _family, "dtype": _dtype})
del Hits
