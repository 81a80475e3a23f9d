"""What a verification has found: a verdict for every way that a prefix can come. Owns the records,
no judgement; torch-free.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Way(Enum):
    """How a prompt's prefix came."""

    COMPUTED = "computed"
    CUT = "computed in other chunks"
    DEVICE = "on the device"
    TURN = "a turn that goes on from an answer"
    BATCHED = "beside others, of which one is aborted"
    RETRACTED = "after a retraction"
    HOST = "from the host"
    STORAGE = "from storage"
    RESTART = "from storage after a restart"


@dataclass(frozen=True, slots=True)
class Exact:
    """``error``: the largest difference of two logits, in parts of the largest logit."""

    error: float


@dataclass(frozen=True, slots=True)
class Differs:
    """``prompt``: number of the first that differs, of ``Way.CUT`` of the chunk size; ``token``: of
    its answer's first token that does, None where the answer is right and other pages were reused
    than should have been."""

    prompt: int
    token: int | None
    error: float
    what: str


@dataclass(frozen=True, slots=True)
class NotRun:
    why: str


Verdict: TypeAlias = Exact | Differs | NotRun


@dataclass(frozen=True, slots=True, kw_only=True)
class WayResult:
    """``computed_s``, ``hit_s``: until the first tokens, over all prompts, without a cache and this
    way; equal sets of prompts, 0 where nothing ran."""

    way: Way
    verdict: Verdict
    computed_s: float = 0.0
    hit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class VerifyReport:
    results: tuple[WayResult, ...]

    def __getitem__(self, way: Way) -> WayResult:
        return next(result for result in self.results if result.way is way)

    @property
    def exact(self) -> bool:
        """Nothing that ran differs."""
        return not any(isinstance(result.verdict, Differs) for result in self.results)
