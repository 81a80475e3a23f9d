from stratakv.core.ids import RowIds
from stratakv.sparse.swap_in import Marks, MissMask, Order, Table

def plan_into(
    rows: RowIds,
    selection: Table,
    resident: Table,
    lru: Order,
    marks: Marks,
    positions: Table,
    missed: MissMask,
    after: Order,
    /,
) -> None: ...
