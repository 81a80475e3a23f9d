"""What a verification has found: a verdict for every way that a prefix can come. Owns the records,
no judgement; torch-free.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias


class Way(Enum):
    """How a prompt's prefix came."""

    COMPUTED = "computed"
    CUT = "computed in other chunks"
    DEVICE = "on the device"
    TURN = "a turn that goes on from an answer"
    BATCHED = "beside others, of which one is aborted"
    RETRACTED = "after a retraction"
    HOST = "from the host"
    HOST_TURN = "a turn that goes on from the host"
    HOST_BATCHED = "beside others, from the host"
    STORAGE = "from storage"
    STORAGE_TURN = "a turn that goes on from storage"
    STORAGE_BATCHED = "beside others, from storage"
    RESTART = "from storage after a restart"


_PLACES: Final = {
    Way.COMPUTED: ("none", "prefill"),
    Way.CUT: ("none", "other chunks"),
    Way.DEVICE: ("device", "decode"),
    Way.TURN: ("device", "chunked prefill"),
    Way.BATCHED: ("device", "batch"),
    Way.RETRACTED: ("host", "retraction"),
    Way.HOST: ("host", "decode"),
    Way.HOST_TURN: ("host", "chunked prefill"),
    Way.HOST_BATCHED: ("host", "batch"),
    Way.STORAGE: ("storage", "decode"),
    Way.STORAGE_TURN: ("storage", "chunked prefill"),
    Way.STORAGE_BATCHED: ("storage", "batch"),
    Way.RESTART: ("storage", "restart"),
}
"""Of each way the tier that pages come from, and what follows them."""
_TIMED: Final = ("decode", "chunked prefill", "restart")


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

    @property
    def tier(self) -> str:
        """Where pages came from; "none": nowhere."""
        return _PLACES[self.way][0]

    @property
    def path(self) -> str:
        """What computed the rest."""
        return _PLACES[self.way][1]

    @property
    def saved_s(self) -> float | None:
        """Until first tokens; None where nothing ran, or a prompt shares steps with others."""
        ran = self.tier != "none" and self.path in _TIMED and not isinstance(self.verdict, NotRun)
        return self.computed_s - self.hit_s if ran else None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    results: tuple[WayResult, ...]

    def __getitem__(self, way: Way) -> WayResult:
        return next(result for result in self.results if result.way is way)

    @property
    def exact(self) -> bool:
        """Nothing that ran differs."""
        return not any(isinstance(result.verdict, Differs) for result in self.results)
