"""An attachment goes from one state to the next as its table says; and whatever comes in whatever
order, a store that was opened is used by nobody else, and closed once."""

from itertools import product
from random import Random

import pytest

from stratakv.core.errors import ConfigError, StorageError
from stratakv.engine.attachment import (
    TABLE,
    AttachmentReport,
    AttachmentState,
    Outcome,
    StorageCall,
    Verb,
    after,
)
from stratakv.engine.storage_control import BackgroundStores, StorageControl

LIVES = [
    [Verb.OPEN, Outcome.OPENED, Verb.ATTACH, Verb.DETACH, Outcome.DRAINED, Outcome.CLOSED],
    [Verb.OPEN, Outcome.OPENED, Verb.CANCEL],
    [Verb.OPEN, Verb.CANCEL],
    [Verb.OPEN, Outcome.REFUSED, Verb.CANCEL],
    [Verb.OPEN, Outcome.FAILED, Verb.CANCEL],
    [Outcome.GIVEN, Verb.DETACH, Verb.RESUME, Verb.CLEAR, Verb.DETACH, Verb.DETACH, Outcome.DRAINED,
     Outcome.CLOSED],
]  # fmt: skip


@pytest.mark.parametrize("events", LIVES)
def test_every_life_ends_where_it_began(events):
    state = AttachmentState.DETACHED
    for event in events:
        assert after(state, Verb.LOOK) is state
        state = after(state, event)
    assert state is AttachmentState.DETACHED


def test_every_state_and_every_event_is_part_of_some_life():
    lived = {state for state, _ in TABLE} | set(TABLE.values())
    assert lived == set(AttachmentState)
    assert {event for _, event in TABLE} == {*Verb, *Outcome}


def test_all_else_is_a_fault():
    pairs = [pair for pair in product(AttachmentState, (*Verb, *Outcome)) if pair not in TABLE]
    assert len(pairs) > 60
    for state, event in pairs:
        with pytest.raises(AssertionError, match=state.value):
            after(state, event)


def test_only_what_is_attached_is_drained_resumed_or_cleared():
    for verb in (Verb.DETACH, Verb.RESUME, Verb.CLEAR):
        assert {state for state, event in TABLE if event is verb} == {
            AttachmentState.ATTACHED, AttachmentState.DRAINING,
        }  # fmt: skip


@pytest.mark.parametrize("report", [
    AttachmentReport(AttachmentState.OPENED),
    AttachmentReport(AttachmentState.FAILED, "no answer at redis://host: it said  'no'"),
    AttachmentReport(AttachmentState.ATTACHED, done=False),
])  # fmt: skip
def test_a_report_reaches_other_ranks_as_it_is(report):
    assert AttachmentReport.unpack(report.pack()) == report


def test_a_password_does_not_show_in_a_call():
    assert "secret" not in repr(StorageCall(Verb.OPEN, url="redis://:secret@host"))


# -- the control ---------------------------------------------------------------------------------


class Worker:
    def __init__(self):
        self.closed = 0

    def close(self, timeout_s):
        assert timeout_s > 0
        self.closed += 1
        return True


class Store:
    def __init__(self):
        self.worker = Worker()


class Tier:
    """``busy``: how often a detach has to be asked for."""

    def __init__(self, random):
        self.worker, self.leaving, self._random = None, False, random

    def attach(self, worker):
        assert self.worker is None
        assert not worker.closed
        self.worker, self.leaving = worker, False

    def detach(self, *, force=False):
        assert self.worker is not None
        self.leaving = True
        if not force and self._random.random() < 0.5:
            return None
        worker, self.worker = self.worker, None
        return worker

    def keep(self):
        self.leaving = False

    def clear(self):
        return self._random.random() < 0.5


class House:
    """What runs beside the engine does so when ``stir`` lets it."""

    def __init__(self, seed):
        self.random = Random(seed)
        self.beside, self.opened = [], []
        self.tier = Tier(self.random)
        self.control = StorageControl(self.tier, BackgroundStores(self.open, self.beside.append))
        self.state = AttachmentState.DETACHED

    def open(self, url):
        match self.random.randrange(5):
            case 0:
                raise ConfigError(f"{url} is not allowed")
            case 1:
                raise StorageError(f"{url} does not answer")
            case 2:
                raise KeyError(url)
        self.opened.append(Store())
        return self.opened[-1]

    def stir(self):
        while self.beside and self.random.random() < 0.7:
            self.beside.pop(0)()

    def call(self, verb):
        report = self.control.call(StorageCall(verb, url=URL, force=self.random.random() < 0.3))
        assert "secret" not in report.why
        assert bool(report.why) == (
            report.state in {AttachmentState.REFUSED, AttachmentState.FAILED}
        )
        self.state = report.state
        return report

    def check(self):
        used = [store for store in self.opened if store.worker is self.tier.worker]
        assert len(used) == (self.state in {AttachmentState.ATTACHED, AttachmentState.DRAINING})
        assert (
            self.tier.leaving == (self.state is AttachmentState.DRAINING)
            or self.tier.worker is None
        )
        assert self.control.store is (used[0] if used else None)
        assert all(store.worker.closed <= 1 for store in self.opened)
        assert not any(store.worker.closed for store in used)


URL = "redis://:secret@host/0"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_asked_a_store_is_used_or_closed_once(seed):
    house, seen = House(seed), set()
    for _ in range(300):
        house.stir()
        legal = [verb for verb in Verb if (house.state, verb) in TABLE]
        if house.state in {AttachmentState.OPENING, AttachmentState.CLOSING}:
            legal = [Verb.LOOK]  # what has ended meanwhile, a look says
            if house.state is AttachmentState.OPENING and house.random.random() < 0.2:
                legal = [Verb.CANCEL]
        house.call(house.random.choice(legal))
        house.check()
        seen.add(house.state)
    assert seen == set(AttachmentState)
    house.control.close(0.0)
    while house.beside:
        house.beside.pop(0)()
    left = [store for store in house.opened if not store.worker.closed]
    assert [store.worker for store in left] == [house.tier.worker] * bool(left)
