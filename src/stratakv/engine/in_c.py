"""The engine's helpers in C: whether they are here, and on how many threads they work.

Owns both. All of them are here or none is used, and nothing else chooses between C and torch, so
that a process computes with one arithmetic, which is in the identity of its pages
(``precision.computed_on``). A part's results do not depend on how work is cut.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

try:
    from stratakv.engine.attention import _row_attention
    from stratakv.engine.huggingface import _state_steps
except ImportError:  # installed without a compiler
    _found = False
else:
    _found = _row_attention is not None and _state_steps is not None
IN_C: Final = _found

PART_BYTES: Final = 1 << 20
"""Read in about twice the time that it takes to hand a part to a thread."""


def parts_of(size: int) -> int:
    """Into how many parts work is cut that reads ``size`` bytes: at most torch's threads."""
    return max(1, min(torch.get_num_threads(), size // PART_BYTES))


def cuts_of(weights: npt.NDArray[np.int64], parts: int) -> list[int]:
    """``parts`` + 1 places among units of these ``weights`` [n], about as much between any two."""
    if parts == 1:
        return [0, len(weights)]
    done = np.cumsum(weights)
    shares = done[-1] * np.arange(1, parts) / parts
    return [0, *np.searchsorted(done, shares).tolist(), len(weights)]


def spread(work: Callable[[int, int], None], cuts: Sequence[int]) -> None:
    """``work`` from each cut to the next: the first here, the others on threads of their own. It
    returns, or raises what one of them has, when all have ended."""
    others = [_pool().submit(work, *part) for part in pairwise(cuts[1:])]
    try:
        work(cuts[0], cuts[1])
    finally:
        wait(others)
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="stratakv-rows")
