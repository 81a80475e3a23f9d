"""Identifiers and units. Imports nothing from the project.

Owns the vocabulary: every id that crosses a room has a type here. Must not hold behaviour.
"""

from typing import Final, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

LayerId = NewType("LayerId", int)
"""Index of a model layer."""
GroupId = NewType("GroupId", int)
"""Index of a cache group in its ``CacheSpec``; group 0 is the anchor."""
"""Row of one tree node (one page of one prefix)."""
RequestId = NewType("RequestId", str)
PrefetchId = NewType("PrefetchId", int)
"""What one request asks of storage, however many attempts that takes."""
TicketId = NewType("TicketId", int)
"""One submitted copy; counts up per transfer engine."""
PageKey = NewType("PageKey", bytes)
"""Chained SHA-256 of a prefix that ends at a page boundary; 32 bytes."""

PageIds: TypeAlias = npt.NDArray[np.int32]
"""Page ids of one group on one tier, shape [n]."""
NodeIds: TypeAlias = npt.NDArray[np.intp]
"""Tree rows, shape [n]; of NumPy's own index type, because they index columns: with int32 each such
operation on a few rows takes three to five times as long."""
TokenIds: TypeAlias = npt.NDArray[np.int32]
"""Token ids, shape [n]; int32 from the tokenizer to the hash."""
RowIds: TypeAlias = npt.NDArray[np.int32]
"""Block-table rows, one per running request, shape [n]."""

NONE: Final = -1
"""No page, no node."""
