"""How one step's batch becomes calls of the model.

Owns the split. Attention takes any packed batch in one call; states take only equal chunks side by
side, and all of them or none with a state before. Torch-free; must not know layers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.engine.batch import Int32s, StepBatch

Places: TypeAlias = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class ForwardCall:
    """One forward of the model over some of a step's requests.

    places: of its requests in the step's batch, [n]. height: rows of its token ids; 1 if they are
    packed, n if the chunks are equal and lie side by side. again: an earlier call of this step has
    written these requests' states. scored: of the step's packed tokens, those of this call whose
    logits are wanted beside the sampled ones, in its order; None where the step has none.
    """

    batch: StepBatch
    places: Places
    height: int
    again: bool
    scored: Places | None = None


Split: TypeAlias = Callable[[StepBatch], list[ForwardCall]]


def packed(batch: StepBatch) -> list[ForwardCall]:
    """One call: no layer has a state."""
    places = np.arange(len(batch.rows))
    return [ForwardCall(batch, places, height=1, again=False, scored=_scored(batch))]


def side_by_side(batch: StepBatch) -> list[ForwardCall]:
    """One call for the decoding rows, and one for all chunks of each length, those that begin at
    token 0 apart."""
    if batch.counts.max() == 1 and batch.starts.min() > 0:
        places = np.arange(len(batch.rows))
        height, scored = len(places), _scored(batch)
        return [ForwardCall(batch, places, height=height, again=False, scored=scored)]
    return [
        _part(batch, places, 0, int(batch.counts[places[0]]))
        for places in _alike(batch, np.arange(len(batch.rows)))
    ]


def token_by_token(batch: StepBatch) -> list[ForwardCall]:
    """Whole chunks where no state is yet; everything else one token a call, all requests at once.

    For models whose Hugging Face code goes wrong when several tokens meet a state.
    """
    first = batch.starts == 0
    whole = [
        _part(batch, places, 0, int(batch.counts[places[0]]))
        for places in _alike(batch, np.flatnonzero(first))
    ]
    left = np.where(first, 0, batch.counts)
    return whole + [_part(batch, np.flatnonzero(left > at), at, 1) for at in range(left.max())]


def _alike(batch: StepBatch, places: Places) -> Iterator[Places]:
    """Those of ``places`` whose chunks have one length, and all a state before them or none."""
    kinds = batch.counts[places].astype(np.int64) * 2 + (batch.starts[places] == 0)
    for kind in np.unique(kinds):
        yield places[kinds == kind]


def _part(batch: StepBatch, places: Places, at: int, count: int) -> ForwardCall:
    """Tokens [at, at + count) of each of the chunks at ``places``."""
    offsets = np.cumsum(batch.counts) - batch.counts
    wanted = offsets[places, None] + at + np.arange(count)
    counts: Int32s = batch.counts[places]
    wanted = wanted.ravel()
    marked = None if batch.scored is None else batch.scored[wanted]
    part = StepBatch(
        rows=batch.rows[places],
        starts=batch.starts[places] + np.int32(at),
        counts=np.full_like(counts, count),
        tokens=batch.tokens[wanted],
        sampled=batch.sampled[places] & (counts == at + count),
        gate=batch.gate,
        scored=marked,
        newest=batch.newest,
    )
    scored = None if marked is None else wanted[marked]
    return ForwardCall(part, places, height=len(places), again=at > 0, scored=scored)


def _scored(batch: StepBatch) -> Places | None:
    return None if batch.scored is None else np.flatnonzero(batch.scored)
