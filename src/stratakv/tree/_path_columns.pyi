from collections.abc import Sequence
from typing import Any, Self

import numpy.typing as npt

from stratakv.core.ids import NodeIds

class PathColumns:
    def __new__(
        cls,
        hits: npt.NDArray[Any],
        pins: Sequence[npt.NDArray[Any]],
        host_pins: Sequence[npt.NDArray[Any]],
        rank: Sequence[npt.NDArray[Any]],
        need: Sequence[npt.NDArray[Any]],
        state: Sequence[npt.NDArray[Any]],
        tiers_of: bytes,
        /,
    ) -> Self: ...
    def lease(
        self,
        path: NodeIds,
        starts: list[int],
        ranks: list[Any],
        hits: int,
        evictable: list[int],
        /,
    ) -> None: ...
    def release(
        self, path: NodeIds, starts: list[int], ranks: list[Any], evictable: list[int], /
    ) -> list[int]: ...
