"""The names of pages in storage. Owns the step from a page's key to its object's."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import GroupId, PageIds, PageKey
from stratakv.storage.backend import ObjectKey

_NAMED: Final = partial(tuple.__new__, ObjectKey)


class HostBytes(Protocol):
    """The host arena of one group."""

    def views(self, pages: PageIds) -> list[memoryview]:
        """The bytes of each page, writable, ``page_bytes`` long; no copies."""
        ...


def of_pages(
    keys: Sequence[PageKey], groups: npt.NDArray[np.int64], pages: npt.NDArray[np.int64]
) -> list[ObjectKey]:
    """Object i is page ``pages[i]`` of the prefix ``keys``, in group ``groups[i]``."""
    return _named(map(keys.__getitem__, pages.tolist()), groups.tolist())


def of_group(keys: Sequence[PageKey], group: GroupId) -> list[ObjectKey]:
    """The pages ``keys`` of one group."""
    return _named(keys, repeat(group))


def _named(pages: Iterable[PageKey], groups: Iterable[int]) -> list[ObjectKey]:
    """One name per page; a loop in C, for a long prompt has thousands."""
    return list(map(_NAMED, zip(pages, groups, repeat(0), strict=False)))
