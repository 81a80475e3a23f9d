"""Why tokens that were cached were computed all the same: each under one reason, on one tier.

Owns the reasons of the device and the host, and the sum over all tiers: hits and losses of a
request are what the cache knew of its prompt. Pure.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.policy.prefetch_reasons import Reason, Tally

Bools: TypeAlias = npt.NDArray[np.bool_]
Codes: TypeAlias = npt.NDArray[np.intp]


class LossCause(Enum):
    """Tier where the token's page of the anchor lay, or, of a load that was not made, whence; and
    reason."""

    DEVICE_EVICTED = "device", "evicted"  # it left the device, and the host had no copy of it
    HOST_EVICTED = "host", "evicted"  # its last copy left the host
    DEVICE_WINDOW_INCOMPLETE = "device", "window_incomplete"  # another group lacks pages it needs
    HOST_WINDOW_INCOMPLETE = "host", "window_incomplete"
    DEVICE_STATE_MISSING = "device", "state_missing"  # all that is missing is a state there
    HOST_STATE_MISSING = "host", "state_missing"
    DEVICE_LAST_TOKEN = "device", "last_token"  # the page of the token that is always computed
    HOST_LAST_TOKEN = "host", "last_token"
    HOST_BELOW_THRESHOLD = "host", "below_threshold"  # too little to be worth a load
    HOST_DEVICE_CAPACITY = "host", "device_capacity"  # no pages on the device to load it to
    DEVICE_RETRACTED = "device", "retracted"  # computed once, and the host could not keep it
    DEVICE_ABORTED = "device", "aborted"  # the request left before its turn
    HOST_ABORTED = "host", "aborted"

    @property
    def tier(self) -> str:
        return self.value[0]

    @property
    def reason(self) -> str:
        return self.value[1]


Cause: TypeAlias = LossCause | Reason
"""``Reason``: of what storage had."""
CAUSES: Final[tuple[Cause, ...]] = (*LossCause, *Reason)
_CODE: Final = {cause: code for code, cause in enumerate(CAUSES)}
_STATE_MISSING: Final = (LossCause.DEVICE_STATE_MISSING, LossCause.HOST_STATE_MISSING)
_WINDOW_INCOMPLETE: Final = (LossCause.DEVICE_WINDOW_INCOMPLETE, LossCause.HOST_WINDOW_INCOMPLETE)
_LAST_TOKEN: Final = (LossCause.DEVICE_LAST_TOKEN, LossCause.HOST_LAST_TOKEN)
_ABORTED: Final = (LossCause.DEVICE_ABORTED, LossCause.HOST_ABORTED)


def label(cause: Cause) -> tuple[str, str]:
    """Tier and reason, for a log."""
    if isinstance(cause, LossCause):
        return cause.tier, cause.reason
    return "storage", cause.name.lower()


class Declined(Enum):
    """Why a prefix was not loaded that a load would have made usable."""

    BELOW_THRESHOLD = LossCause.HOST_BELOW_THRESHOLD
    DEVICE_CAPACITY = LossCause.HOST_DEVICE_CAPACITY


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What the tree knew of a prompt when its request's turn came; ends are in pages.

    ``usable``: with a load; ``anchor``: as far as the anchor goes, neither beyond the last end that
    leaves a token to compute. ``whole``: the same with the page of that token, and ``device``: as
    much of that as lies on the device. ``states_only``: nothing but states is missing at
    ``anchor``. ``gone``: of the pages behind ``anchor`` that were there once and could have been
    used, whether the last copy was the host's; [n].
    """

    usable: int
    anchor: int
    whole: int
    device: int
    states_only: bool
    gone: Bools


NOTHING_KNOWN: Final = Known(0, 0, 0, 0, states_only=False, gone=np.zeros(0, np.bool_))


@dataclass(frozen=True, slots=True)
class Bill:
    """Of one request, in pages: ``hits`` and all of ``lost`` are ``known``."""

    known: int
    hits: int
    lost: tuple[tuple[Cause, int], ...]


def bill(known: Known, hit: int, declined: Declined, storage: Tally | None) -> Bill:
    """Of a request that was admitted on ``hit`` pages. The last obstacle counts: what came, or lay,
    on the host was not loaded; what storage had and did not bring, it lost; only then is a page
    missing because it is missing."""
    end = max(hit, known.whole, known.anchor + len(known.gone), _end(storage))
    why = _evicted(known, end)
    missing = _STATE_MISSING if known.states_only else _WINDOW_INCOMPLETE
    _paint(why, known.usable, known.anchor, known.device, missing)
    _paint_storage(why, storage)
    why[hit : known.usable] = _CODE[declined.value]
    _paint(why, known.anchor, known.whole, known.device, _LAST_TOKEN)
    return _sum(why, hit)


def bill_aborted(known: Known, storage: Tally | None) -> Bill:
    """Of a request that left before its turn: nothing was a hit."""
    why = _evicted(known, max(known.whole, _end(storage)))
    _paint_storage(why, storage)
    _paint(why, 0, known.whole, known.device, _ABORTED)
    return _sum(why, 0)


def _end(storage: Tally | None) -> int:
    return storage.base + storage.found if storage is not None else 0


def _evicted(known: Known, end: int) -> Codes:
    """Causes of the pages up to ``end``, as if all had left the tree. One of which it does not know
    how was on the device alone: what a request waits for is held on the host."""
    why = np.full(end, _CODE[LossCause.DEVICE_EVICTED], np.intp)
    why[known.anchor :][: len(known.gone)][known.gone[: end - known.anchor]] = _CODE[
        LossCause.HOST_EVICTED
    ]
    return why


def _paint(
    why: Codes, start: int, end: int, device: int, lost: tuple[LossCause, LossCause]
) -> None:
    on_device, on_host = lost
    why[start:end] = _CODE[on_host]
    why[start : max(start, min(end, device))] = _CODE[on_device]


def _paint_storage(why: Codes, storage: Tally | None) -> None:
    if storage is None:
        return
    end = _end(storage)
    for reason, pages in storage.lost:  # from the deepest up
        why[end - pages : end] = _CODE[reason]
        end -= pages


def _sum(why: Codes, hit: int) -> Bill:
    pages = np.bincount(why[hit:], minlength=len(CAUSES)).tolist()
    lost = tuple((cause, count) for cause, count in zip(CAUSES, pages, strict=True) if count)
    return Bill(len(why), hit, lost)
