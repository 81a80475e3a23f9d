"""The copier in plain torch: what an installation without a compiler uses, and the second opinion
on the one in C. Owns the choice of words that rows are moved as.
"""

from typing import Final

import numpy as np
import torch

from stratakv.core.ids import PageIds
from stratakv.transfer.copier import Route

_WORDS: Final = (torch.int64, torch.int32, torch.int16, torch.uint8)


class TorchCopier:
    """One index operation per segment; IndexError for ids outside the pools.

    Rows are moved as the widest integers that divide them: index operations on uint8 are 79 times
    slower than on int64.
    """

    def gather(self, route: Route, device: PageIds, host: PageIds) -> None:
        with torch.inference_mode():
            rows, columns = _index(device), _index(host)
            for pool, arena in _ends(route):
                arena.index_copy_(0, columns, pool.index_select(0, rows))

    def scatter(self, route: Route, device: PageIds, host: PageIds) -> None:
        with torch.inference_mode():
            rows, columns = _index(device), _index(host)
            for pool, arena in _ends(route):
                pool.index_copy_(0, rows, arena.index_select(0, columns))


def _index(pages: PageIds) -> torch.Tensor:
    return torch.from_numpy(pages.astype(np.int64))


def _ends(route: Route) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Both ends of each segment as [pages, words] views of one integer type."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for segment, pool in zip(route.segments, route.device, strict=True):
        # The stride of the arena and the base of the pool are multiples of 64 already.
        divides = segment.offset_bytes | segment.bytes | int(pool.storage_offset())
        word = next(word for word in _WORDS if divides % word.itemsize == 0)
        stop = segment.offset_bytes + segment.bytes
        arena = route.arena[:, segment.offset_bytes : stop]
        pairs.append((pool.view(word), arena.view(word)))
    return pairs
