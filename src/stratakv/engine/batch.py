"""One step's work. Owns the plain records between scheduler, runner and loop; torch-free."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import RowIds, TokenIds
from stratakv.engine.grammars import TokenMasks
from stratakv.engine.logits_processors import LogitsProcessors
from stratakv.transfer.engine import LayerGate

Int32s = npt.NDArray[np.int32]


class ChosenTokens(Protocol):
    """What launched steps choose, on the device."""

    def of(self, rows: RowIds) -> object:
        """The newest token of each row, a tensor int64 [n]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """R requests' chunks, packed; decoding rows (count 1) come first.

    rows: block-table row of each, int32 [R]. starts: tokens already computed, int32 [R]. counts:
    tokens to compute now, int32 [R], sum T. tokens: packed input ids, int32 [T]. sampled: whether
    the last token of the chunk is the request's last, so that its logits are wanted, bool [R].
    adapters: number of each request's adapter, or NONE, int32 [R]; None if no request has one.
    scored: which tokens' logits are wanted beside those, bool [T]; None: of none.
    newest: what a token that is NONE becomes; None: all are known.
    """

    rows: RowIds
    starts: Int32s
    counts: Int32s
    tokens: TokenIds
    sampled: npt.NDArray[np.bool_]
    gate: LayerGate | None
    adapters: Int32s | None = None
    scored: npt.NDArray[np.bool_] | None = None
    newest: ChosenTokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptTargets:
    """Prompt tokens whose log-probabilities are wanted: the token after each that is scored, int32
    [K], and how many alternatives beside it."""

    tokens: TokenIds
    top: Int32s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingBatch:
    """Sampling of S rows, column by column; ``positions`` (index of the token to be chosen in its
    request) and ``seeds`` make a request's randomness independent of its batch. ``processors``:
    None if no row wants its logits changed; ``masks``: None if no row is bound to a grammar;
    ``targets``: of what is scored beside the S rows, None: nothing."""

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.int32]  # alternatives wanted per row, -1: none
    min_p: npt.NDArray[np.float32]
    processors: LogitsProcessors | None = None
    masks: TokenMasks | None = None
    targets: PromptTargets | None = None

    def only(self, rows: npt.NDArray[np.intp]) -> "SamplingBatch":
        """Some of the rows, in increasing order, without what is scored beside them."""
        return SamplingBatch(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            seeds=self.seeds[rows],
            positions=self.positions[rows],
            logprobs=self.logprobs[rows],
            min_p=self.min_p[rows],
            processors=None if self.processors is None else self.processors.only(rows),
            masks=None if self.masks is None else self.masks.only(rows),
        )
