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


KINDS: Final = (
    "cohere2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "falcon_h1", "gemma3_text",
    "gemma3n_text", "gpt_oss", "jamba", "kimi_linear", "lfm2", "llama", "llama4_text", "mamba2",
    "mimo_v2_flash", "nemotron_h", "olmo_hybrid", "qwen3_next",
)  # fmt: skip
"""Of ``NAMED``, one of each way to remember; for tests that cost more, and that no layer's own
arithmetic but what is kept of it can fail."""


def case(family: str, among: tuple[str, ...] = NAMED) -> object:
    return family if family in among else pytest.param(family, marks=pytest.mark.long)


def stateful(family: str) -> bool:
    """Whether it keeps snapshots; what lives with a request alone is none."""
    return any(isinstance(group.retention, KeepBoundary) for group in spec(family).groups)


every_state_kind = pytest.mark.parametrize(
    "family", [case(family, KINDS) for family in exact() if stateful(family)]
)
every_long_family = pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.long) for family in exact()]
)
