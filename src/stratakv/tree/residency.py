"""Where one group's page of one node is, and every way that can change.

Owns the states: no other file assigns a ``Residency``. There is no failed load: another request may
already have matched the landing page, so everything that can fail softly is settled before
``LOAD_BEGUN`` and a failed device copy stops the process.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NodeIds

States = npt.NDArray[np.uint8]
Moved: TypeAlias = Callable[[NodeIds, "ResidencyEvent"], None]


class Residency(IntEnum):
    ABSENT = 0
    DEVICE = 1
    SAVING = 2  # device -> host copy in flight; the host page is not readable
    BOTH = 3
    HOST = 4
    LOADING = 5  # host -> device copy in flight; readers wait on the layer gate


class ResidencyEvent(IntEnum):
    INSERTED = 0  # a request's freshly computed page
    FETCHED = 1  # storage -> host landed
    BACKUP_BEGUN = 2
    BACKUP_DONE = 3
    BACKUP_FAILED = 4
    LOAD_BEGUN = 5
    LOAD_DONE = 6
    DEVICE_EVICTED = 7
    HOST_EVICTED = 8
    SAVED = 9  # another engine's page has come to the host


R, E = Residency, ResidencyEvent
TRANSITIONS: Final[dict[tuple[Residency, ResidencyEvent], Residency]] = {
    (R.ABSENT, E.INSERTED): R.DEVICE,
    (R.ABSENT, E.FETCHED): R.HOST,
    (R.ABSENT, E.SAVED): R.HOST,
    (R.DEVICE, E.FETCHED): R.BOTH,
    (R.DEVICE, E.SAVED): R.BOTH,
    (R.DEVICE, E.BACKUP_BEGUN): R.SAVING,
    (R.DEVICE, E.DEVICE_EVICTED): R.ABSENT,
    (R.SAVING, E.BACKUP_DONE): R.BOTH,
    (R.SAVING, E.BACKUP_FAILED): R.DEVICE,
    (R.BOTH, E.DEVICE_EVICTED): R.HOST,
    (R.BOTH, E.HOST_EVICTED): R.DEVICE,
    (R.HOST, E.INSERTED): R.BOTH,  # recomputed while the host copy survived
    (R.HOST, E.LOAD_BEGUN): R.LOADING,
    (R.HOST, E.HOST_EVICTED): R.ABSENT,
    (R.LOADING, E.LOAD_DONE): R.BOTH,
}

_ILLEGAL: Final = 255
_NEXT: Final = np.full((len(ResidencyEvent), len(Residency)), _ILLEGAL, np.uint8)
for (_now, _event), _then in TRANSITIONS.items():
    _NEXT[_event, _now] = _then


def _set_of(*states: Residency) -> npt.NDArray[np.bool_]:
    member = np.zeros(len(Residency), np.bool_)
    member[list(states)] = True
    return member


ON_DEVICE: Final = _set_of(R.DEVICE, R.SAVING, R.BOTH, R.LOADING)
"""Indexed by state: whether the group owns a device page there."""
ON_HOST: Final = _set_of(R.SAVING, R.BOTH, R.HOST, R.LOADING)
"""Indexed by state: whether the group owns a host page there."""
PRESENT: Final = _set_of(R.DEVICE, R.SAVING, R.BOTH, R.HOST, R.LOADING)
READABLE_ON_HOST: Final = _set_of(R.BOTH, R.HOST, R.LOADING)
"""Indexed by state: whether the host page holds the bytes."""
ON_TIER: Final = (ON_DEVICE, ON_HOST)
TIERS_OF: Final = tuple(
    tuple(tier for tier, on_tier in enumerate(ON_TIER) if on_tier[state]) for state in Residency
)
"""Indexed by state: the tiers on which the group owns a page."""
EVICTED: Final = (ResidencyEvent.DEVICE_EVICTED, ResidencyEvent.HOST_EVICTED)


_OFF_TIER: Final = tuple(
    bytes(state for state in Residency if not on_tier[state]) for on_tier in ON_TIER
)


def count_on_tier(tier: int, states: States) -> int:
    """How many of ``states`` own a page on ``tier``, at the price of one scan of a few bytes."""
    return len(states.tobytes().translate(None, _OFF_TIER[tier]))


def all_on_device(states: States) -> bool:
    return count_on_tier(0, states) == len(states)


def all_present(states: States) -> bool:
    return Residency.ABSENT not in states.tobytes()


class ResidencyColumn:
    """Residency of one group in every node; ``states`` is read-only, ``move`` the only way on.
    Each of ``moved`` is called with every move that has been made."""

    __slots__ = ("_moved", "_states", "states")

    def __init__(self, nodes: int, moved: Sequence[Moved] = ()) -> None:
        self._moved = moved
        self._states = np.zeros(nodes, np.uint8)
        self.states: States = self._states.view()
        self.states.flags.writeable = False

    def move(self, nodes: NodeIds, event: ResidencyEvent) -> None:
        """Apply ``event`` to every node; an illegal pair raises and changes nothing."""
        now = self._states[nodes]
        states = now.tobytes()
        if states and states.count(states[0]) == len(states):  # alike, as they mostly are
            alike = _NEXT.item(event, states[0])
            if alike != _ILLEGAL:
                self._states[nodes] = alike
                for moved in self._moved:
                    moved(nodes, event)
                return
        then = _NEXT[event][now]
        if _ILLEGAL in then.tobytes():
            bad = int(np.flatnonzero(then == _ILLEGAL)[0])
            raise AssertionError(
                f"{event.name} is illegal in {Residency(now[bad]).name} (node {nodes[bad]})"
            )
        self._states[nodes] = then
        for moved in self._moved:
            moved(nodes, event)

    def move_one(self, node: int, event: ResidencyEvent) -> None:
        """``move`` of a single node."""
        then = _NEXT.item(event, self._states.item(node))
        if then == _ILLEGAL:
            now = Residency(self._states.item(node))
            raise AssertionError(f"{event.name} is illegal in {now.name} (node {node})")
        self._states[node] = then
        for moved in self._moved:
            moved(np.array((node,), np.intp), event)
