"""The sequences of admitted requests: what each holds, and what it may still take.

Owns the records and the bookkeeping between block-table rows and the page budget. Must not touch
the tree.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.cache.records import CacheUse
from stratakv.core.ids import GroupId, PageIds, RowIds
from stratakv.core.page_keys import PageHasher
from stratakv.memory.block_table import BlockTable
from stratakv.policy.admission import Demand, PageBudget, Pages
from stratakv.spec.groups import CacheSpec
from stratakv.tree.lease import DeviceLease, HostHold, Lease

Int64s: TypeAlias = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class SequenceState:
    """What an admitted request holds; ends are in pages.

    ``prompt``: tokens that it knew when it came. ``continued``: end of what it matched.
    ``checkpoints``, ``milestones``: ends of its prompt still to be kept. ``at_once``: the most
    tokens that it computes before they are committed. ``use``: a sequence that does not use all of
    the cache is *apart*: what it computes stays its own, and its lease where it was admitted.
    ``rolling``: end of its latest checkpoint beyond the prompt, 0 if none. ``duplicates``: group,
    page indices and pages of its own whose place in the tree another request's load is filling.
    """

    prefix: PageHasher
    lease: DeviceLease
    demand: Demand
    prompt: int
    continued: int
    checkpoints: list[int]
    milestones: list[int]
    at_once: int
    use: CacheUse = CacheUse.ALL
    rolling: int = 0
    duplicates: list[tuple[GroupId, Int64s, PageIds]] = field(
        default_factory=list[tuple[GroupId, Int64s, PageIds]], init=False
    )

    def computes(self, tokens: int) -> None:
        """So many at once from now on."""
        self.at_once = tokens

    def roll(self, end: int) -> None:
        """Its latest checkpoint beyond the prompt is at ``end``."""
        self.rolling = end

    @property
    def apart(self) -> bool:
        return self.use is not CacheUse.ALL

    @property
    def stores(self) -> bool:
        """Whether it leaves pages for those who come after."""
        return CacheUse.STORE in self.use

    @property
    def receives(self) -> bool:
        """Whether another engine writes to its pages."""
        return any(self.demand.fixed)


class SequenceStates:
    """SequenceStates by row of the block table. ``totals``: device pages of every group; ``host``:
    host pages of those that have their home there."""

    def __init__(
        self,
        spec: CacheSpec,
        tables: BlockTable,
        totals: Sequence[int],
        host: Sequence[int] = (),
    ) -> None:
        self.budget = PageBudget(spec, totals, host)
        self._tables = tables
        self._sequences: dict[int, SequenceState] = {}
        # Booked, and not yet taken.
        self._left = [np.zeros(tables.rows, np.int64) for _ in range(len(self.budget))]

    def __contains__(self, row: int) -> bool:
        return row in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, row: int) -> SequenceState:
        return self._sequences[row]

    def items(self) -> Iterator[tuple[int, SequenceState]]:
        yield from self._sequences.items()

    def columns(self) -> Iterator[tuple[str, Int64s]]:
        """Every array by name, for those who compare two of these."""
        yield from ((f"booked of group {at}", column) for at, column in enumerate(self._left))

    def open(self, row: int, sequence: SequenceState) -> None:
        self._sequences[row] = sequence
        self.budget.book(sequence.demand)
        for group, pages in enumerate(sequence.demand.growth):
            self._left[group][row] = pages

    def grow(self, rows: RowIds, group: GroupId, pages: npt.NDArray[np.integer]) -> None:
        """Distinct ``rows`` take ``pages`` each; what goes beyond their limits is nobody's."""
        left = self._left[group]
        used = np.minimum(left[rows], pages)
        left[rows] -= used
        self.budget.grown(group, int(used.sum()))

    def rebook(self, row: int, group: int, pages: int, most: int) -> None:
        """The request at ``row`` may take ``pages`` more of a group that keeps all, and comes to
        hold ``most`` at once."""
        sequence = self._sequences[row]
        left = [int(column[row]) for column in self._left]
        self.budget.settle(sequence.demand, left)
        left[group] = pages
        self._left[group][row] = pages
        sequence.demand = sequence.demand.limited(left, group, most)
        self.budget.book(sequence.demand)

    def give_back(self, row: int, group: int, pages: int, most: int) -> None:
        """The request at ``row`` has ``pages`` less, and may take them again: ``most`` in all."""
        left = self._left[group]
        back = max(0, min(pages, most - left.item(row)))
        left[row] += back
        self.budget.grown(group, -back)

    def left(self, row: int, group: int) -> int:
        """Pages that are booked for a request and that it has not taken."""
        return self._left[group].item(row)

    def decodes(self, row: int, peak: Pages) -> None:
        """The prompt of the request at ``row`` is computed: it holds at most ``peak`` pages of each
        group from now on."""
        sequence = self._sequences[row]
        sequence.demand = self.budget.decodes(sequence.demand, peak)

    def check(self, leases: Iterable[Lease]) -> None:
        """AssertionError unless every lease of a request that runs, and every row, has its
        sequence."""
        admitted = {sequence.lease for sequence in self._sequences.values()}
        assert admitted == {one for one in leases if not isinstance(one, HostHold)}, "a lease leaks"
        assert self._tables.taken == len(admitted), "a row is nobody's"

    def close(self, row: int) -> SequenceState:
        sequence = self._sequences.pop(row)
        self.budget.settle(sequence.demand, [int(column[row]) for column in self._left])
        self._tables.close_row(row)
        return sequence
