"""The bounded device buffer of each request whose entries do not all stay on the device.

Owns which entry stands at which position of which request, for every selection that a step makes,
and in which order positions are given away. Must not know pages of any tier nor move bytes.

An *entry* is one row of a buffer whose home is the host: a token, or a block of compressed ones. A
*position* counts through the rows of a request's own device pages.
"""

import logging
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NONE, RowIds
from stratakv.sparse.reads import NumpyReads, Reads
from stratakv.sparse.swap_in import Planner, SwapIn, Table, empty_marks, plan_swap_in

_logger = logging.getLogger(__name__)

_fastest: Planner = plan_swap_in
try:
    from stratakv.sparse.compiled_swap_in import compiled_swap_in

    _fastest = compiled_swap_in
except ImportError:  # the log has a line where there are buffers
    pass

_reads: Reads = NumpyReads()
try:
    from stratakv.sparse.compiled_reads import CompiledReads

    _reads = CompiledReads()
except ImportError:  # as above
    pass

DEFAULT_PLANNER: Final[Planner] = _fastest
DEFAULT_READS: Final[Reads] = _reads
POSITION_BYTES: Final = 6
"""Of the tables: an int32 and an int16."""
MARK_BYTES: Final = 2
MOST_ENTRIES: Final = 32767
"""Positions are int16: half of what a buffer costs beside its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotBufferShape:
    """A buffer of ``entries``, whole pages of ``page_rows``; a step selects ``top_k`` at most."""

    entries: int
    page_rows: int
    top_k: int

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.entries <= MOST_ENTRIES:
            raise ValueError(
                f"a buffer of {self.entries} entries: allowed is {self.top_k} (top-k) to "
                f"{MOST_ENTRIES}"
            )
        if self.entries % self.page_rows:
            raise ValueError(
                f"a buffer of {self.entries} entries: allowed are multiples of {self.page_rows}"
            )

    @property
    def pages(self) -> int:
        return self.entries // self.page_rows


class HotBuffers:
    """Buffers of ``rows`` requests, for ``plans`` selections a step: one for each set of layers
    that share theirs. No request has more than ``most_entries`` entries."""

    def __init__(
        self,
        shape: HotBufferShape,
        plans: int,
        rows: int,
        most_entries: int,
        planner: Planner = DEFAULT_PLANNER,
        reads: Reads = DEFAULT_READS,
    ) -> None:
        if planner is plan_swap_in and planner is DEFAULT_PLANNER:  # else it was asked for
            what = "stratakv.sparse._swap_in is not built"
            _logger.warning("%s: plans are made in NumPy, more slowly", what)
        self.shape = shape
        self._planner, self.reads = planner, reads
        self._resident = np.full((plans, rows, shape.entries), NONE, np.int32)
        self._lru = np.empty((plans, rows, shape.entries), np.int16)
        self._lru[:] = np.arange(shape.entries, dtype=np.int16)
        self._marks = empty_marks(rows, most_entries)

    @property
    def resident(self) -> Table:
        """int32 [plans, rows, positions]: the entry at each position; NONE where there is none."""
        return self._resident

    @property
    def lru(self) -> npt.NDArray[np.int16]:
        """int16 [plans, rows, positions]: a permutation of positions, least recently used first."""
        return self._lru

    @staticmethod
    def bytes_of(entries: int, plans: int, rows: int, most_entries: int) -> int:
        """``table_bytes`` of such buffers, before they are made."""
        return plans * rows * entries * POSITION_BYTES + rows * (most_entries + 1) * MARK_BYTES

    @property
    def table_bytes(self) -> int:
        """What all of this takes beside the bytes of the entries."""
        return self._resident.nbytes + self._lru.nbytes + self._marks.nbytes

    def swap_in(self, plan: int, rows: RowIds, selection: Table) -> SwapIn:
        """Plan a step's selection [R, K] for requests ``rows``, each once, and keep its outcome:
        from now on the tables say what is true once its misses are copied."""
        resident, lru = self._resident[plan], self._lru[plan]
        swap = self._planner(rows, selection, resident, lru, self._marks)
        self.reads.keep(rows, swap, resident, lru)
        return swap

    def clear(self, row: int) -> None:
        """Nothing of a request is in its buffer."""
        self._resident[:, row] = NONE
        self._lru[:, row] = np.arange(self.shape.entries, dtype=np.int16)
