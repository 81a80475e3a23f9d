"""Which pages get a host copy, and when. Owns the policies, a closed union.

Pure; must not touch the tree.
"""

from dataclasses import dataclass
from typing import TypeAlias, assert_never

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class WriteThrough:
    """Every page, as soon as it is inserted: device eviction then never has to wait."""


@dataclass(frozen=True, slots=True)
class NoBackup:
    """There is no host tier: an evicted page is recomputed."""


WritePolicy: TypeAlias = WriteThrough | NoBackup


def worth_backup(policy: WritePolicy, hits: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Which of the freshly inserted pages to back up now, given how often each was used."""
    match policy:
        case WriteThrough():
            return np.ones(len(hits), np.bool_)
        case NoBackup():
            return np.zeros(len(hits), np.bool_)
        case _:
            assert_never(policy)
