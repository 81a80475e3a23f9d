"""Which families the "hit == recompute" tests go through: those that people run in `make test`, and
all that the engine accepts in `make test-long`.
"""

from typing import Final

import pytest

from scripts.family_table import exact, spec
from stratakv.spec.retention import KeepBoundary

NAMED: Final = (
    "bamba", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "exaone4",
    "falcon_h1", "falcon_mamba", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss",
    "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm3", "llama", "llama4_text", "mamba",
    "mamba2", "mimo_v2_flash", "minimax_m2", "ministral", "mistral", "nemotron_h", "olmo3",
    "olmo_hybrid", "qwen3", "qwen3_5_text", "qwen3_next",
)  # fmt: skip


def case(family: str) -> object:
    return family if family in NAMED else pytest.param(family, marks=pytest.mark.long)


def stateful(family: str) -> bool:
    """Whether it keeps snapshots; what lives with a request alone is none."""
    return any(isinstance(group.retention, KeepBoundary) for group in spec(family).groups)


every_family = pytest.mark.parametrize("family", [case(family) for family in exact()])
every_state_family = pytest.mark.parametrize(
    "family", [case(family) for family in exact() if stateful(family)]
)
every_long_family = pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.long) for family in exact()]
)
