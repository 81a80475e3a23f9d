"""Where a page can be, and the fourteen ways in which that changes; there is no other."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from stratakv.core.ids import NodeIds
from stratakv.tree.residency import (
    ON_DEVICE,
    ON_HOST,
    ON_TIER,
    PRESENT,
    READABLE_ON_HOST,
    TIERS_OF,
    Residency,
    ResidencyColumn,
    ResidencyEvent,
    all_on_device,
    all_present,
    count_on_tier,
)

MOVES = """
    absent  inserted       device
    absent  fetched        host
    absent  saved          host
    device  fetched        both
    device  saved          both
    device  backup_begun   saving
    device  device_evicted absent
    saving  backup_done    both
    saving  backup_failed  device
    both    device_evicted host
    both    host_evicted   device
    host    inserted       both
    host    load_begun     loading
    host    host_evicted   absent
    loading load_done      both
"""
THEN = {
    (Residency[now.upper()], ResidencyEvent[event.upper()]): Residency[then.upper()]
    for now, event, then in (line.split() for line in MOVES.strip().splitlines())
}
WAYS = {
    Residency.ABSENT: (), Residency.DEVICE: (ResidencyEvent.INSERTED,),
    Residency.SAVING: (ResidencyEvent.INSERTED, ResidencyEvent.BACKUP_BEGUN),
    Residency.BOTH: (ResidencyEvent.INSERTED, ResidencyEvent.FETCHED),
    Residency.HOST: (ResidencyEvent.FETCHED,),
    Residency.LOADING: (ResidencyEvent.FETCHED, ResidencyEvent.LOAD_BEGUN),
}  # fmt: skip
Moved = Callable[[NodeIds, ResidencyEvent], None]
EVERY = [(now, event) for now in Residency for event in ResidencyEvent]


def column(*states: Residency, moved: Moved | None = None) -> ResidencyColumn:
    made = ResidencyColumn(len(states), [] if moved is None else [moved])
    for node, state in enumerate(states):
        for event in WAYS[state]:
            made.move(np.array([node]), event)
    assert made.states.tolist() == list(states)
    return made


def test_there_are_six_states_and_ten_events() -> None:
    assert [state.name for state in Residency] == [
        "ABSENT", "DEVICE", "SAVING", "BOTH", "HOST", "LOADING",
    ]  # fmt: skip
    assert len(THEN) == 15
    assert {event for _, event in THEN} == set(ResidencyEvent)


def move(it: ResidencyColumn, nodes: list[int], event: ResidencyEvent) -> None:
    if len(nodes) == 1:
        it.move_one(nodes[0], event)
    else:
        it.move(np.array(nodes), event)


@pytest.mark.parametrize(("now", "event"), EVERY, ids=lambda of: of.name.lower())
def test_a_page_moves_in_these_ways_and_no_other(now: Residency, event: ResidencyEvent) -> None:
    moves: list[tuple[list[int], ResidencyEvent]] = []
    for nodes in ([1], [0, 1], [1, 2]):
        it = column(now, now, Residency.HOST, moved=lambda of, by: moves.append((of.tolist(), by)))
        moves.clear()
        before = it.states.tolist()
        bad = [node for node in nodes if (before[node], event) not in THEN]
        if bad:
            words = f"{event.name} is illegal in {Residency(before[bad[0]]).name} (node {bad[0]})"
            with pytest.raises(AssertionError, match=re.escape(words)):
                move(it, nodes, event)
            assert not moves
            assert it.states.tolist() == before, "what is refused changes nothing"
        else:
            move(it, nodes, event)
            assert moves.pop() == (nodes, event)
            for node in nodes:
                before[node] = THEN[Residency(before[node]), event]
            assert it.states.tolist() == before


def test_nobody_else_writes_a_state() -> None:
    it = column(Residency.BOTH)
    with pytest.raises(ValueError, match="read-only"):
        it.states[0] = Residency.ABSENT


def test_each_state_owns_pages_on_these_tiers() -> None:
    """A page that is being saved has a host page that nobody can read yet; one that is being loaded
    has both, and can still be read on the host."""
    table = {
        state.name: (
            ON_DEVICE.item(state), ON_HOST.item(state), READABLE_ON_HOST.item(state),
            PRESENT.item(state), TIERS_OF[state],
        )
        for state in Residency
    }  # fmt: skip
    assert table == {
        "ABSENT": (False, False, False, False, ()),
        "DEVICE": (True, False, False, True, (0,)),
        "SAVING": (True, True, False, True, (0, 1)),
        "BOTH": (True, True, True, True, (0, 1)),
        "HOST": (False, True, True, True, (1,)),
        "LOADING": (True, True, True, True, (0, 1)),
    }
    assert ON_TIER == (ON_DEVICE, ON_HOST)
    assert {array.dtype for array in (ON_DEVICE, ON_HOST, READABLE_ON_HOST, PRESENT)} == {
        np.dtype(np.bool_)
    }


def test_states_are_counted_by_tier() -> None:
    for some in (list(Residency), [Residency.HOST] * 3, [Residency.DEVICE, Residency.BOTH], []):
        states = np.array(some, np.uint8)
        assert count_on_tier(0, states) == ON_DEVICE[states].sum()
        assert count_on_tier(1, states) == ON_HOST[states].sum()
        assert all_on_device(states) is bool(ON_DEVICE[states].all())
        assert all_present(states) is bool(PRESENT[states].all())
