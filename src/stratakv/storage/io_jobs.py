"""What the I/O worker is asked and what it answers: two closed unions. Owns the records.

Jobs and their answers are counted apart by kind, because ranks agree on counts per kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import TicketId
from stratakv.storage.backend import Everything, ObjectKey, ReadStatus, WriteStatus


class Kind(IntEnum):  # an Enum's hash is slow, and each step looks at every kind
    QUERY = auto()
    FETCH = auto()
    STORE = auto()
    TOUCH = auto()
    REMOVE = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """Which of these objects are there."""

    keys: Sequence[ObjectKey]


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """Read object i into ``into[i]``. The buffers are the job's until its answer is taken."""

    keys: Sequence[ObjectKey]
    into: Sequence[memoryview]


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Write ``pages[i]`` as object i, the head of a chain first. The buffers are the job's until
    its answer is taken, and nobody may change them."""

    keys: Sequence[ObjectKey]
    pages: Sequence[memoryview]


@dataclass(frozen=True, slots=True, eq=False)
class Touch:
    """Record a use, deepest page first."""

    keys: Sequence[ObjectKey]


@dataclass(frozen=True, slots=True, eq=False)
class Remove:
    """Forget objects. ``Everything`` counts for one page and is one batch."""

    keys: Sequence[ObjectKey] | Everything


Job: TypeAlias = Query | Fetch | Store | Touch | Remove


class Ending(Enum):
    """How a job ended. Only DONE means that every key was tried."""

    DONE = auto()
    CANCELLED = auto()  # by ``cancel`` or ``close``, before the rest was begun
    FAILED = auto()  # the backend failed; the rest was not tried
    OFF = auto()  # the backend failed lately and is left alone: the rest was not tried


@dataclass(frozen=True, slots=True, eq=False)
class Queried:
    """``present``: bool [n]; False where it was not asked, or the store does not have it."""

    ticket: TicketId
    ending: Ending
    present: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """``statuses`` of the first keys; those behind them were not tried."""

    ticket: TicketId
    ending: Ending
    statuses: Sequence[ReadStatus]


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """``statuses`` of the first keys; those behind them were not tried."""

    ticket: TicketId
    ending: Ending
    statuses: Sequence[WriteStatus]


@dataclass(frozen=True, slots=True, eq=False)
class Touched:
    ticket: TicketId
    ending: Ending


@dataclass(frozen=True, slots=True, eq=False)
class Removed:
    """``removed``: how many were there, of those that were tried."""

    ticket: TicketId
    ending: Ending
    removed: int


Answer: TypeAlias = Queried | Fetched | Stored | Touched | Removed


def pages_of(job: Job) -> int:
    return 1 if isinstance(job.keys, Everything) else len(job.keys)


def kind_of(job: Job) -> Kind:
    match job:
        case Query():
            return Kind.QUERY
        case Fetch():
            return Kind.FETCH
        case Store():
            return Kind.STORE
        case Touch():
            return Kind.TOUCH
        case Remove():
            return Kind.REMOVE
        case _:
            assert_never(job)
