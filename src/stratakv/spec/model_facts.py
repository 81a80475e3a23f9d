"""What is known of a model before any weight is read, as a record.

Owns that record. Must not read a configuration: ``engine.huggingface.model_facts`` does.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stratakv.spec.time_steps import TimeSteps


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """``config``: the text decoder's, as plain data. ``max_positions``: longest sequence, in
    tokens, that its positions cover. ``dtype``: a key of ``DTYPE_BYTES``. ``time_steps``: bounds
    that every layer of Mamba-2 must keep to, None where there are none."""

    config: Mapping[str, object]
    max_positions: int
    vocab_size: int
    dtype: str
    time_steps: TimeSteps | None
