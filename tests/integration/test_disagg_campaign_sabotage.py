"""The campaign of hand-offs that are given up sees who breaks its rules, one bug at a time."""

from dataclasses import replace

import pytest

from stratakv.disagg.decode_role import DecodeRole
from stratakv.disagg.messages import Reserve
from stratakv.disagg.peers import MessageReceived
from stratakv.disagg.prefill_role import PrefillRole
from stratakv.disagg.transport import Disconnected, Lost
from stratakv.engine.roles import ChunkComputed, PartSent, TransferFailed
from stratakv.testing.hand_off import HandOffSide
from stratakv.testing.transport_faults import TransportFaults
from stratakv.tiers import progress
from tests.hand_off_campaign import SimLink, campaign
from tests.pairs import RULES
from tests.transport_pairs import LIMITS, P

LATE = TransportFaults(late=12, delay=2, parts=4)


@pytest.fixture(autouse=True)
def nobody_sleeps(monkeypatch):
    monkeypatch.setattr(progress, "POLL_S", 0.0)
    monkeypatch.setattr(progress, "PAUSE_POLLS", 1)


class FreesAtAbort(DecodeRole):
    """Believes that nobody writes what it has given up."""

    given_up = ()

    def left(self, prompt):
        super().left(prompt)
        self.given_up = (*self.given_up, TransferFailed(prompt.id, "given up"))

    def poll(self):
        found, self.given_up = [*super().poll(), *self.given_up], ()
        return found


class ReportsPartsAtOnce(PrefillRole):
    """Believes that what it has posted is written."""

    posted = ()

    def computed(self, request, computed, pages):
        given = []

        def counted():
            given.append(pages())
            return given[-1]

        phase = super().computed(request, computed, counted)
        if isinstance(computed, ChunkComputed) and given:
            self.posted = (*self.posted, PartSent(request.id))
        return phase

    def poll(self):
        found = [event for event in super().poll() if not isinstance(event, PartSent)]
        found, self.posted = [*found, *self.posted], ()
        return found


class Around:
    def __init__(self, peers):
        self._peers = peers

    def __getattr__(self, name):
        return getattr(self._peers, name)


class Forgetful(Around):
    """Words of whatever attempt are taken for the last one's of that session."""

    def __init__(self, peers):
        super().__init__(peers)
        self._last = {}

    def send(self, peer, message):
        if isinstance(message, Reserve):
            self._last[message.attempt.session] = message.attempt
        return self._peers.send(peer, message)

    def poll(self):
        return [
            replace(event, message=replace(event.message, attempt=last))
            if isinstance(event, MessageReceived)
            and (last := self._last.get(event.message.attempt.session))
            else event
            for event in self._peers.poll()
        ]


class Fenceless(Around):
    """A peer that is lost counts as behind its fence."""

    def poll(self):
        found = []
        for event in self._peers.poll():
            match event:
                case Lost(peer):
                    found += [event, Disconnected(peer)]
                case Disconnected():
                    pass
                case _:
                    found.append(event)
        return found


def decode_of(link, role=DecodeRole, peers=None):
    at = HandOffSide.DECODE
    link.roles[at] = role(peers or link.peers[at], lambda _: P, LIMITS, link.clock)


def frees_leased_pages_at_an_abort(link):
    decode_of(link, FreesAtAbort)


def frees_a_row_that_is_read(link):
    at = HandOffSide.PREFILL
    link.roles[at] = ReportsPartsAtOnce(link.peers[at], LIMITS, link.clock)


def believes_words_of_an_attempt_that_is_over(link):
    decode_of(link, peers=Forgetful(link.peers[HandOffSide.DECODE]))


def takes_a_lost_peer_for_a_fence(link):
    decode_of(link, peers=Fenceless(link.peers[HandOffSide.DECODE]))


@pytest.mark.parametrize(
    ("bug", "first"),
    [
        (frees_leased_pages_at_an_abort, 1),
        (frees_a_row_that_is_read, 1),
        (believes_words_of_an_attempt_that_is_over, 6),
        (takes_a_lost_peer_for_a_fence, 30),
    ],
)
def test_who_breaks_a_rule_is_seen(bug, first):
    """``first``: a seed that sees it; where the walk has changed, one of the next ones does."""
    for seed in range(first, first + 40):
        link = SimLink(seed, LATE)
        bug(link)
        try:
            campaign(RULES["window"], seed, 14, link)
        except AssertionError:
            return
    pytest.fail("nobody has seen it")
