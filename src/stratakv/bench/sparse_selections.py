"""Selections of a sparse model, step by step, and what the best buffers would make of them.

Owns made-up selections, those that were recorded, and two yardsticks: the plainest LRU, and a
buffer that knows the future. Must not know production tables.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.errors import ConfigError
from stratakv.sparse.hot_buffer import MOST_ENTRIES

Selections: TypeAlias = npt.NDArray[np.int32]
"""int32 [steps, K]: entries that each step selects, each once; -1 for none."""

BLOCK: Final = 64
NEWEST: Final = 64  # or a quarter of a selection
ZIPF: Final = 1.1
"""Of made-up selections: neighbours are as popular as each other, a block's popularity falls with
its rank, and the newest entries are always selected."""
MOST: Final = 1 << 24
"""Entries of a context: the planner has a mark of each."""
_ALLOWED: Final = f"allowed is a .npy file of int32 [steps, top-k], -1 for none, below {MOST}"
_NEVER: Final = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionTraffic:
    """One request with ``entries`` of context, which grows by one a step. A step keeps all but
    ``drift`` of the selection before and draws the rest anew: by popularity, or all alike where
    ``uniform``, the worst that can be."""

    entries: int
    top_k: int
    drift: float
    uniform: bool = False
    seed: int = 0


def generate_selections(traffic: SelectionTraffic, steps: int) -> Selections:
    """The same for the same ``traffic``."""
    rng = np.random.default_rng(traffic.seed)
    most = traffic.entries + steps
    weight: npt.NDArray[np.float64] = np.ones(most)
    if not traffic.uniform:
        rank = rng.permutation(-(-most // BLOCK)) + 1.0
        weight = np.repeat(rank**-ZIPF, BLOCK)[:most].astype(np.float64)
    newest = min(NEWEST, traffic.top_k // 4)
    selected = np.zeros(most, np.bool_)
    selected[_draw(rng, weight[: traffic.entries], traffic.top_k)] = True
    out = np.empty((steps, traffic.top_k), np.int32)
    for step in range(steps):
        end = traffic.entries + step + 1
        out[step] = rng.permutation(np.flatnonzero(selected))
        dropped = rng.permutation(out[step])[: round(traffic.drift * traffic.top_k)]
        selected[dropped] = False
        selected[max(0, end - newest) : end] = True
        over = int(np.count_nonzero(selected)) - traffic.top_k
        if over > 0:
            kept = np.flatnonzero(selected[: end - newest])
            selected[rng.choice(kept, over, replace=False)] = False
        # What was dropped may be drawn again, as a model may want again what it passed over once.
        open_weight = np.where(selected[:end], 0.0, weight[:end])
        selected[_draw(rng, open_weight, max(0, -over))] = True
    return out


def _draw(
    rng: np.random.Generator, weight: npt.NDArray[np.float64], count: int
) -> npt.NDArray[np.intp]:
    """``count`` different places, heavy ones first: the smallest of exponential variables."""
    with np.errstate(divide="ignore"):
        arrival = rng.exponential(size=len(weight)) / weight
    return np.argpartition(arrival, count)[:count]


def read_selections(path: Path) -> Selections:
    """As NumPy saves them; ConfigError for what are no selections."""
    try:
        read = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--selections {path}: {error}; {_ALLOWED}") from error
    plain = isinstance(read, np.ndarray) and read.dtype == np.int32 and read.ndim == 2
    if not plain or not read.size or int(read.min()) < -1 or not 0 <= int(read.max()) < MOST:
        raise ConfigError(f"--selections {path}: {_ALLOWED}")
    if read.shape[1] > MOST_ENTRIES:
        raise ConfigError(
            f"--selections {path}: top-k {read.shape[1]}; allowed is {MOST_ENTRIES} at most"
        )
    return read


def lru_misses(selections: Selections, buffer: int) -> npt.NDArray[np.int64]:
    """int64 [steps]: what the plainest LRU of ``buffer`` entries copies in each step."""
    last_use = np.full(int(selections.max()) + 1, -1, np.int64)
    cached = np.zeros(len(last_use), np.bool_)
    misses = np.empty(len(selections), np.int64)
    for step, selection in enumerate(selections):
        wanted = selection[selection >= 0]
        misses[step] = np.count_nonzero(~cached[wanted])
        cached[wanted] = True
        last_use[wanted] = step
        _evict(cached, last_use, buffer)
    return misses


def clairvoyant_misses(selections: Selections, buffer: int) -> npt.NDArray[np.int64]:
    """The same of a buffer that gives up what is used last in the future: none has fewer."""
    next_use = _next_uses(selections)
    soon = np.full(int(selections.max()) + 1, -_NEVER, np.int64)
    cached = np.zeros(len(soon), np.bool_)
    misses = np.empty(len(selections), np.int64)
    for step, selection in enumerate(selections):
        wanted = selection >= 0
        misses[step] = np.count_nonzero(~cached[selection[wanted]])
        cached[selection[wanted]] = True
        # What this step reads stays until it has; then only its next use counts.
        soon[selection[wanted]] = 1
        _evict(cached, soon, buffer)
        soon[selection[wanted]] = -next_use[step][wanted]
    return misses


def _evict(cached: npt.NDArray[np.bool_], worth: npt.NDArray[np.int64], buffer: int) -> None:
    """Those of least worth go until ``buffer`` are left."""
    held = np.flatnonzero(cached)
    over = len(held) - buffer
    if over > 0:
        cached[held[np.argpartition(worth[held], over - 1)[:over]]] = False


def _next_uses(selections: Selections) -> npt.NDArray[np.int64]:
    """int64 [steps, K]: the next step that selects the same entry."""
    next_use = np.full(int(selections.max()) + 2, _NEVER, np.int64)  # the last one for -1
    out = np.empty(selections.shape, np.int64)
    for step in range(len(selections) - 1, -1, -1):
        out[step] = next_use[selections[step]]
        next_use[selections[step]] = step
    return out
