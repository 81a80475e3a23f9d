"""What a peer invents, or sends too much of, is bounded, and costs nobody else anything; an honest
one is far below every limit."""

from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from stratakv.cache.footprint import TransferPages
from stratakv.cache.records import CacheUse
from stratakv.core.clock import ManualClock
from stratakv.core.errors import TransportError
from stratakv.disagg.deadlines import HandOffLimits, bounded, session_name
from stratakv.disagg.joining import (
    JoinRefused,
    PeerJoiner,
    decode_call,
    encode_call,
    join,
)
from stratakv.disagg.messages import Abort, Attempt, Ended, PartWritten, Reserve, decode, encode
from stratakv.disagg.page_places import pages_of
from stratakv.disagg.peer_limits import MOST_PEERS, NAME_CHARS, REASON_CHARS, PeerLimits
from stratakv.disagg.peers import MessageReceived, Peers
from stratakv.disagg.prefill_role import PrefillRole
from stratakv.disagg.ranked_joining import RankedJoiner
from stratakv.disagg.recompute import Recompute
from stratakv.disagg.rests import MOST, Rests
from stratakv.disagg.session import FailureCause, SessionState
from stratakv.disagg.transport import Disconnected, PeerId
from stratakv.engine.request import SamplingParams
from stratakv.memory.device_pools import DevicePools
from stratakv.testing.hand_off import HandOffSide
from stratakv.testing.patience import wait_until
from tests.engines import expected_tokens, greedy, token_spec
from tests.fixtures.transports import open_loopback
from tests.pairs import PROMPT
from tests.transport_pairs import D, Link, P, settle, tokens_over, until

PREFILL, DECODE = HandOffSide
SPEC = token_spec(4)
PAGES = 40


class Liar:
    """A prefill side's role, and the links of peers of it that send what a test has them send."""

    def __init__(self, undo, limits, peers=("bad",)):
        self.clock = ManualClock()
        self.here = self._peers(undo)
        self.role = PrefillRole(self.here, HandOffLimits(peer=limits), self.clock)
        self.there = {}
        for name in map(PeerId, peers):
            one = self.there[name] = self._peers(undo)
            ours, theirs = self.here.introduce(name), one.introduce(P)
            one.meet(P, ours)
            self.here.meet(name, theirs)
        self.received = {name: [] for name in self.there}

    def _peers(self, undo):
        found = Peers()
        found.open(SPEC, DevicePools(SPEC, (PAGES,)), b"model", open_loopback)
        undo.callback(found.close)
        return found

    def send(self, message, peer="bad"):
        assert self.there[PeerId(peer)].send(P, message) is not None

    def step(self):
        self.role.poll()
        for name, one in self.there.items():
            events = [event for event in one.poll() if isinstance(event, MessageReceived)]
            self.received[name] += [event.message for event in events]

    def answers(self, count, peer="bad"):
        """Its first ``count`` messages."""

        def come():
            self.step()
            return len(self.received[PeerId(peer)]) >= count

        wait_until(come, f"{count} messages")
        assert all(isinstance(one, Ended) for one in self.received[PeerId(peer)])
        return [one.attempt.session for one in self.received[PeerId(peer)]]

    def waiting(self):
        return self.role.stats().states[SessionState.WAITING_FOR_INPUT]


@pytest.fixture
def opened():
    with ExitStack() as undo:
        yield lambda limits, *peers: Liar(undo, limits, peers or ("bad",))


def reserve(name, first=0, count=1, again=None):
    """Of ``count`` pages; its session is of a request that nobody brings."""
    pages = TransferPages(4 * count, (pages_of(0, 0, range(first, first + count)),))
    return Reserve(Attempt(name, 1), "ab", pages, again)


def test_requests_that_nobody_brings_are_bounded_for_each_peer(opened):
    liar = opened(PeerLimits(sessions=3), "bad", "good")
    for n in range(10):
        liar.send(reserve(f"{n}", n))
    assert liar.answers(7) == [f"{n}" for n in range(3, 10)]
    assert "3 are allowed" in liar.received["bad"][0].reason
    assert liar.role.stats().failed[FailureCause.REFUSED] == 7
    liar.send(reserve("another", 20), "good")
    wait_until(lambda: liar.step() or liar.waiting() == 4, "another peer's")
    liar.send(Abort(Attempt("0", 1), reserved=True, reason="it left"))
    liar.send(reserve("next"))
    wait_until(lambda: liar.step() or len(liar.received["bad"]) == 8, "the end of one")
    wait_until(lambda: liar.step() or liar.waiting() == 4, "the one that takes its place")
    liar.clock.advance(301)
    liar.step()
    assert liar.waiting() == 0
    assert liar.answers(11)[8:] == ["1", "2", "next"]
    liar.send(reserve("later"))
    wait_until(lambda: liar.step() or liar.waiting() == 1, "one that was asked for later")


def test_what_a_peer_names_in_them_is_bounded(opened):
    """Pages, and tokens that it sends back."""
    tokens = np.arange(9, dtype=np.int32)
    sampling = SamplingParams(max_tokens=1)
    again = Recompute(
        tokens=tokens, sampling=sampling, salt="", adapter="", priority=0, use=CacheUse.ALL
    )
    liar = opened(PeerLimits(numbers=20))
    liar.send(reserve("a", 0, 12))
    liar.send(reserve("b", 12, 9))
    liar.send(reserve("c", 12, 3, replace(again)))
    liar.send(reserve("d", 12, 8))
    assert liar.answers(2) == ["b", "c"]
    assert [found.reason for found in liar.received["bad"]] == [
        "bad has named 21 pages and tokens; 20 are allowed",
        "bad has named 24 pages and tokens; 20 are allowed",
    ]
    assert liar.waiting() == 2


def test_a_peer_that_is_lost_frees_what_it_had(opened):
    liar = opened(PeerLimits(sessions=1))
    liar.send(reserve("a"))
    wait_until(lambda: liar.step() or liar.waiting() == 1, "it")
    liar.here.disconnect(PeerId("bad"))
    liar.step()
    assert not len(liar.role)


def test_names_that_a_peer_gives_up_are_bounded(opened):
    liar = opened(PeerLimits(ended=3))
    for n in range(10):
        liar.send(Abort(Attempt(f"{n}", 1), reserved=False, reason="it left"))
    liar.send(reserve("last"))
    wait_until(lambda: liar.step() or liar.waiting() == 1, "what came after them")
    assert len(liar.role) == 3 + 1


# -- parts ---------------------------------------------------------------------------------------


def test_a_peer_cannot_hold_pages_by_words_alone():
    """Each part gives the rest its time anew; there are no more of them than pages."""
    link = Link()
    with tokens_over(link, chunk_tokens=4) as pair:
        assert pair.run(greedy("honest", PROMPT[:60], 2)) == [expected_tokens(PROMPT[:60], 2)]
        pair.decode.engine.submit(greedy("r", [3, *PROMPT[:30]], 2))
        pair.out[DECODE]["r"] = []
        until(pair, lambda: link.roles[DECODE].lease_counts().leased[0], "its pages")
        pages = link.roles[DECODE].lease_counts().leased[0]
        attempt = Attempt("r", 2)
        for part in range(pages + 1):
            assert link.peers[PREFILL].send(D, PartWritten(attempt)) is not None
            for _ in range(5):
                pair.step()
            assert link.peers[DECODE].knows(P) or part == pages
        until(pair, lambda: bool(pair.outputs("r")), "the end of its link")
        until(pair, lambda: not link.roles[DECODE].lease_counts().leased, "the fence")
        assert "more parts" in pair.outputs("r")[-1].reason


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        Ended(Attempt("x" * (NAME_CHARS + 1), 1), "no"),
        PartWritten(Attempt("r", 1 << 63)),
        Reserve(Attempt("r", 1), "x" * (NAME_CHARS + 1), TransferPages(3, ())),
        Ended(Attempt("\ud800" * 600, 1), "no"),
    ],
    ids=["a session", "a generation", "an identity", "no text"],
)
def test_what_is_longer_than_any_or_no_text_is_no_message(message):
    with pytest.raises(TransportError, match="cannot be read"):
        decode(encode(message))


@pytest.mark.parametrize("field", ["salt", "adapter"])
def test_nor_is_a_name_in_what_is_to_be_computed_again(field):
    sampling = SamplingParams(max_tokens=1)
    again = Recompute(
        tokens=np.zeros(1, np.int32), sampling=sampling, salt="", adapter="", priority=0,
        use=CacheUse.ALL,
    )  # fmt: skip
    long = replace(again, **{field: "x" * (NAME_CHARS + 1)})
    with pytest.raises(TransportError, match=f"{NAME_CHARS} are allowed"):
        decode(encode(reserve("r", again=long)))


def test_of_a_peer_s_reason_as_much_is_kept_as_people_read():
    for message in (Ended(Attempt("r", 1), "x" * 9999), Abort(Attempt("r", 1), True, "x" * 9999)):
        assert decode(encode(message)).reason == "x" * REASON_CHARS


def test_a_name_of_this_side_s_own_may_be_as_long_as_it_likes():
    names = [session_name(greedy("x" * n, [1], 1)) for n in (512, 513, 5000)]
    assert names[0] == "x" * 512
    assert len(set(names)) == 3
    assert max(map(len, names)) < NAME_CHARS - 64
    with tokens_over(Link()) as pair:
        asked = greedy("y" * 9000, PROMPT[:30], 4)
        assert pair.run(asked) == [expected_tokens(PROMPT[:30], 4)]
        settle(pair)


def test_a_name_with_a_number_is_the_same_to_both_sides():
    """Decode numbers a request that prefill is to compute again, which bounds what it is given."""
    for chars in range(500, 520):
        name = bounded(f"{session_name(greedy('x' * chars, [1], 1))}+12")
        assert session_name(greedy(name, [1], 1)) == name
    assert len(bounded("\ud800" * 600)) == 64


# -- peers ---------------------------------------------------------------------------------------


@pytest.fixture
def crowded(monkeypatch):
    """A side where three may be."""
    monkeypatch.setattr("stratakv.disagg.peers.MOST_PEERS", 3)
    with ExitStack() as undo:
        peers = Peers()
        peers.open(SPEC, DevicePools(SPEC, (PAGES,)), b"model", open_loopback)
        undo.callback(peers.close)
        yield peers


def test_more_peers_than_have_a_place_are_refused(crowded):
    fits = [crowded.introduce(PeerId(f"{n}")) for n in range(3)]
    assert join(crowded, PeerId("3"), fits).result(timeout=0) == JoinRefused(
        "3 peers are joined already, none idle; no more fit"
    )
    crowded.disconnect(PeerId("0"))
    wait_until(lambda: Disconnected(PeerId("0")) in crowded.poll(), "the fence")
    assert crowded.introduce(PeerId("3"))
    assert MOST_PEERS == 256


def test_who_would_join_too_many_is_answered_at_once(crowded):
    """Clients name them, and none has answered yet."""
    joiner = PeerJoiner(crowded, lambda peer, introductions: Future(), Rests(ManualClock()))
    for n in range(5):
        joiner.ask(PeerId(f"{n}"))
    assert [peer for peer, _ in joiner.refused()] == ["3", "4"]
    assert not joiner.refused()


def test_so_is_who_would_on_several_ranks(crowded):
    calls = []
    rests = Rests(ManualClock())
    joiner = RankedJoiner([crowded], 0, calls.append, lambda *_: Future(), rests)
    for n in range(5):
        joiner.ask(PeerId(f"{n}"))
    for call in calls:
        joiner.links.answered(call, [joiner.links.call(call)])
    assert [peer for peer, _ in joiner.refused()] == ["3", "4"]


def test_a_peer_s_name_is_no_longer_than_any():
    assert decode_call(encode_call(PeerId("x" * NAME_CHARS), [])) == ("x" * NAME_CHARS, ())
    with pytest.raises(TransportError, match=f"{NAME_CHARS} are allowed"):
        decode_call(encode_call(PeerId("x" * (NAME_CHARS + 1)), []))


def test_peers_that_are_not_asked_for_a_while_are_bounded():
    rests = Rests(ManualClock())
    names = [PeerId(f"{n}") for n in range(MOST + 1)]
    for name in names:
        rests.add(name, "no")
    assert [rests.reason(name) for name in names] == [None] + ["no"] * MOST
    for name in names:
        rests.pause(name)
    assert [rests.pauses(name) for name in names] == [False] + [True] * MOST
