import numpy as np
import numpy.typing as npt

from stratakv.core.ids import RowIds
from stratakv.sparse.reads import EntryIds, Hidden
from stratakv.sparse.swap_in import MissMask, Order, Table

def away_into(
    host: Table,
    rows: RowIds,
    entries: EntryIds,
    hidden: Hidden | None,
    selection: Table,
    page_rows: int,
    /,
) -> None: ...
def place_into(
    host: Table,
    buffer: Table,
    rows: RowIds,
    selection: Table,
    positions: Table,
    missed: MissMask,
    found: EntryIds,
    copies: npt.NDArray[np.int32],
    page_rows: int,
    /,
) -> int: ...
def keep_into(
    rows: RowIds,
    selection: Table,
    positions: Table,
    missed: MissMask,
    after: Order,
    resident: Table,
    lru: Order,
    /,
) -> None: ...
