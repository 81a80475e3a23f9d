"""What ranks make of sessions that stand differently on each: the least counts, all learn of an end
in the same ballot, and nobody's page is free before everybody's is."""

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest

from stratakv.agreement.ballot import SLOTS, Ballot, SlotKind
from stratakv.disagg.agreeing_role import ELSEWHERE, AgreeingRole, Lane
from stratakv.disagg.session import SessionState
from stratakv.engine.request import Phase
from stratakv.engine.roles import (
    ChunkComputed,
    FirstToken,
    MayStart,
    PartSent,
    Received,
    Sent,
    Start,
    TransferFailed,
    TransferLost,
)

FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = SessionState
FIRST = FirstToken(7)


@dataclass(eq=False)
class Asked:
    """As much of a request as a role of sessions looks at."""

    id: str
    phase: Phase = Phase.WAITING


class Scripted:
    """A rank's own role, of which the test says how each session stands."""

    def __init__(self):
        self.states, self.ends, self.calls = {}, [], []
        self.alone = set()

    def put(self, name, state):
        """It stands so here; where it has ended nobody touches its pages."""
        if state is SUCCESS:
            self.end(Received(name, FIRST))
        elif state is FAILED:
            self.end(TransferFailed(name, f"{name} broke"))
        else:
            self.states[name] = state

    def end(self, end):
        self.states.pop(end.request, None)
        self.ends.append(end)

    def concerns(self, request):
        return request.id not in self.alone

    def state(self, request):
        return self.states.get(request.id)

    def abort(self, request, reason):
        self.calls.append(("abort", request.id, reason))

    def arrived(self, request):
        if self.concerns(request):
            self.states[request.id] = BOOTSTRAPPING

    def may_start(self, request):
        if self.states.get(request.id) is BOOTSTRAPPING:
            return Start.WAIT
        return Start.RECEIVE if request.id in self.states else Start.COMPUTE

    def reserved(self, request, pages):
        self.calls.append(("reserved", request.id))
        self.put(request.id, TRANSFERRING)

    def computed(self, request, computed, pages):
        self.calls.append(("computed", request.id))
        if isinstance(computed, ChunkComputed):
            return Phase.PREFILLING
        return Phase.DECODING if request.id in self.alone else Phase.TRANSFERRING

    def poll(self):
        ends, self.ends = self.ends, []
        return ends

    def left(self, request):
        self.calls.append(("left", request.id))


class Group:
    """The ranks of one engine. Whatever they answer must be the same on all. ``startable``: of whom
    all have reported that they may start."""

    def __init__(self, ranks=2, lanes=1):
        self.startable = []
        self.own = [Scripted() for _ in range(ranks * lanes)]
        mine = [Lane(own, own) for own in self.own]
        self.roles = [AgreeingRole(mine[at : at + lanes]) for at in range(0, len(mine), lanes)]

    def alike(self, verb, *of):
        answers = [getattr(role, verb)(*of) for role in self.roles]
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]

    def arrive(self, *names):
        asked = [Asked(name) for name in names]
        for one in asked:
            self.alike("arrived", one)
        return asked

    def votes(self):
        """All vote, and their engines do not hear of it yet."""
        ballots = [Ballot() for _ in self.roles]
        for role, ballot in zip(self.roles, ballots, strict=True):
            role.vote(ballot)
        least = np.minimum.reduce([ballot.lanes for ballot in ballots])
        for role, ballot in zip(self.roles, ballots, strict=True):
            role.agreed(ballot.result(least))
        self.alike("figures")

    def ballot(self):
        """Who has ended, once all have voted: the same of all, but for reasons."""
        self.votes()
        ends = [role.poll() for role in self.roles]
        kinds = [[(type(end), end.request) for end in found] for found in ends]
        assert all(found == kinds[0] for found in kinds), ends
        self.startable += [end.request for end in ends[0] if isinstance(end, MayStart)]
        return [end for end in ends[0] if not isinstance(end, MayStart)]

    def put(self, name, *states):
        for own, state in zip(self.own, states, strict=True):
            own.put(name, state)

    def waiting(self, name="r"):
        """One that may start on all ranks."""
        (asked,) = self.arrive(name)
        self.put(name, *[WAITING] * len(self.own))
        assert self.ballot() == []
        assert self.alike("may_start", asked) is Start.RECEIVE
        return asked

    def transferring(self, name="r"):
        asked = self.waiting(name)
        self.alike("reserved", asked, None)
        return asked


@pytest.mark.parametrize("other", SessionState)
@pytest.mark.parametrize("one", SessionState)
def test_a_session_is_where_its_last_rank_is(one, other):
    group = Group()
    (asked,) = group.arrive("r")
    group.put("r", one, other)
    ends, least = group.ballot(), min(one, other)
    if least is SUCCESS:
        assert ends == [Received("r", FIRST)]
        return
    assert ends == []
    starts = least in {WAITING, TRANSFERRING} and SUCCESS not in {one, other}
    if SUCCESS not in {one, other} or least < WAITING:
        wanted = Start.RECEIVE if starts else Start.WAIT
        assert group.alike("may_start", asked) is wanted
    aborts = [call for own in group.own for call in own.calls if call[0] == "abort"]
    assert aborts == [("abort", "r", ELSEWHERE)] * (2 if least is FAILED else 0)


def test_nobody_may_start_before_a_ballot_has_agreed():
    group = Group()
    (asked,) = group.arrive("r")
    group.put("r", WAITING, WAITING)
    assert group.alike("may_start", asked) is Start.WAIT
    assert group.startable == []
    group.ballot()
    assert group.startable == ["r"]
    assert group.alike("may_start", asked) is Start.RECEIVE
    group.ballot()
    assert group.startable == ["r"], "once"


def test_a_late_rank_holds_up_the_end_on_all():
    group = Group(3)
    group.transferring()
    group.own[0].put("r", SUCCESS)
    group.own[2].put("r", SUCCESS)
    for _ in range(3):
        assert group.ballot() == []
    group.own[1].put("r", SUCCESS)
    assert group.ballot() == [Received("r", FIRST)]
    assert group.ballot() == []


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("other", range(4))
def test_first_tokens_that_differ_fail_on_all_ranks_in_one_ballot(lanes, other):
    """Whoever a peer has sent another one to than to the rest; none goes on with either."""
    group = Group(4 // lanes, lanes)
    group.transferring()
    for at, own in enumerate(group.own):
        own.end(Received("r", FirstToken(9) if at == other else FIRST))
    assert group.ballot() == [
        TransferFailed("r", "its first token is 7 to one rank and 9 to another")
    ]
    assert group.ballot() == []
    assert group.alike("__len__") == 0


def test_a_failure_of_one_rank_ends_where_no_rank_s_pages_are_touched():
    group = Group(3)
    asked = group.transferring()
    group.own[1].put("r", FAILED)
    assert group.ballot() == []
    assert [("abort", "r", ELSEWHERE) in own.calls for own in group.own] == [True] * 3
    assert group.alike("may_start", asked) is Start.WAIT
    group.own[0].states["r"] = FAILED  # given up, and still written to
    group.own[2].put("r", SUCCESS)  # it had arrived
    for _ in range(3):
        assert group.ballot() == []
    group.own[0].put("r", FAILED)
    (end,) = group.ballot()
    assert end == TransferFailed("r", "r broke")
    assert group.ballot() == []


def test_a_loss_is_reported_where_it_is_one_on_all_ranks_and_the_end_where_pages_are_free():
    group = Group(3)
    group.transferring()
    for own in group.own:
        own.states["r"] = FAILED
    group.own[1].ends.append(TransferLost("r", "its peer is lost"))
    for _ in range(3):
        assert group.ballot() == []
    group.own[0].ends.append(TransferLost("r", "its peer is lost"))
    group.own[2].put("r", FAILED)
    assert group.ballot() == [TransferLost("r", "its peer is lost")]
    assert group.ballot() == [], "once"
    group.own[0].put("r", FAILED)
    assert group.ballot() == []
    group.own[1].put("r", FAILED)
    (end,) = group.ballot()
    assert isinstance(end, TransferFailed)
    assert group.alike("__len__") == 0


def test_a_rank_that_had_success_learns_that_it_failed_elsewhere():
    group = Group()
    group.transferring()
    group.put("r", SUCCESS, FAILED)
    assert group.ballot() == []
    assert group.ballot() == [TransferFailed("r", ELSEWHERE)]


def test_a_failure_that_is_known_before_its_session_was_opened_is_one_on_all():
    """As where one rank still has another session of that name."""
    group = Group()
    (asked,) = group.arrive("r")
    group.own[1].put("r", FAILED)
    assert group.ballot() == []
    assert group.alike("may_start", asked) is Start.WAIT
    group.own[0].states.pop("r")  # which does as it was asked
    assert isinstance(group.ballot()[0], TransferFailed)


@pytest.mark.parametrize("states", [(BOOTSTRAPPING, WAITING), (WAITING, WAITING)])
def test_who_leaves_before_pages_are_named_is_forgotten_at_once(states):
    group = Group()
    (asked,) = group.arrive("r")
    group.put("r", *states)
    group.ballot()
    group.alike("left", asked)
    for own in group.own:
        assert own.calls[-1] == ("left", "r")
        own.states.pop("r")
    assert group.alike("__len__") == 0
    assert group.ballot() == []
    again = group.waiting()
    assert group.alike("may_start", again) is Start.RECEIVE


@pytest.mark.parametrize("first", range(2))
def test_who_leaves_in_the_middle_of_a_transfer_ends_when_all_pages_are_free(first):
    group = Group()
    asked = group.transferring()
    group.alike("left", asked)
    group.put("r", *[TRANSFERRING] * 2)
    assert group.ballot() == []
    group.own[first].put("r", FAILED)
    for _ in range(2):
        assert group.ballot() == []
    group.own[1 - first].put("r", SUCCESS)
    (end,) = group.ballot()
    assert isinstance(end, TransferFailed)
    assert group.alike("__len__") == 0


def test_one_that_leaves_with_success_on_all_ranks_has_been_sent():
    group = Group()
    (asked,) = group.arrive("r")
    group.put("r", WAITING, WAITING)
    group.ballot()
    assert group.alike("computed", asked, FIRST, Given()) is Phase.TRANSFERRING
    group.put("r", TRANSFERRING, TRANSFERRING)
    group.alike("left", asked)
    for own in group.own:
        own.end(Sent("r"))
    assert group.ballot() == [Sent("r")]


class Given:
    """Pages of a part, and how often a rank has taken them."""

    def __init__(self):
        self.taken = 0

    def __call__(self):
        self.taken += 1
        return self


def test_a_part_is_sent_when_it_is_sent_from_all_ranks():
    group = Group(3)
    asked, pages = group.waiting(), Given()
    for part in range(1, 3):
        assert group.alike("computed", asked, ChunkComputed(part), pages) is Phase.PREFILLING
        assert pages.taken == 3 * part, "read on every rank, whatever its own role does"
        group.put("r", TRANSFERRING, TRANSFERRING, TRANSFERRING)
        for late in range(3):
            assert group.ballot() == []
            group.own[late].ends.append(PartSent("r"))
        assert group.ballot() == [PartSent("r")]
        assert group.ballot() == []
    assert group.alike("computed", asked, FIRST, pages) is Phase.TRANSFERRING
    assert group.ballot() == []
    for own in group.own:
        own.end(Sent("r"))
    assert group.ballot() == [Sent("r")]


def test_a_part_that_is_given_before_the_last_one_was_sent_is_sent_with_it():
    group = Group()
    asked, pages = group.waiting(), Given()
    group.alike("computed", asked, ChunkComputed(1), pages)
    group.own[0].ends.append(PartSent("r"))
    assert group.ballot() == []
    group.alike("computed", asked, ChunkComputed(2), pages)
    group.own[1].ends.append(PartSent("r"))
    assert group.ballot() == [], "rank 0 still reads the second one"
    group.own[0].ends.append(PartSent("r"))
    assert group.ballot() == [PartSent("r")]


def test_a_chunk_that_was_computed_after_all_had_failed_is_read_by_nobody():
    group = Group()
    asked, pages = group.waiting(), Given()
    group.own[1].put("r", FAILED)
    group.ballot()
    assert group.alike("computed", asked, ChunkComputed(1), pages) is Phase.PREFILLING
    assert not pages.taken
    group.own[0].put("r", FAILED)
    assert isinstance(group.ballot()[0], TransferFailed)


def test_an_end_that_comes_within_a_step_is_the_end_of_what_the_step_has_computed():
    """A wait for a copy is a ballot: the engine hears of its result behind the step alone."""
    group = Group()
    asked, pages = group.waiting(), Given()
    group.put("r", FAILED, FAILED)
    group.votes()
    group.votes()
    assert group.alike("computed", asked, ChunkComputed(1), pages) is Phase.PREFILLING
    assert group.alike("computed", asked, FIRST, pages) is Phase.TRANSFERRING
    assert group.alike("may_start", asked) is Start.WAIT
    group.alike("reserved", asked, None)
    assert not pages.taken
    assert not any({("computed", "r"), ("reserved", "r")} & set(own.calls) for own in group.own)
    assert [isinstance(end, TransferFailed) for end in group.ballot()] == [True]


def test_an_end_that_comes_while_pages_are_given_is_theirs():
    group = Group()
    asked = group.waiting()

    def fails():
        if not fails.done:
            fails.done = True
            group.put("r", FAILED, FAILED)
            group.votes()
        return "pages"

    fails.done = False
    assert group.alike("computed", asked, ChunkComputed(1), fails) is Phase.PREFILLING
    assert not any(("computed", "r") in own.calls for own in group.own)
    assert [isinstance(end, TransferFailed) for end in group.ballot()] == [True]


def test_a_part_that_is_read_on_one_rank_holds_up_the_end_of_a_failure():
    group = Group()
    asked, pages = group.waiting(), Given()
    group.alike("computed", asked, ChunkComputed(1), pages)
    group.own[0].put("r", TRANSFERRING)
    group.own[1].put("r", FAILED)
    for _ in range(3):
        assert group.ballot() == []
    group.own[0].put("r", FAILED)
    assert isinstance(group.ballot()[0], TransferFailed)


def test_a_prompt_that_was_computed_after_all_had_failed_is_given_to_nobody():
    group = Group()
    asked = group.waiting()
    group.own[1].put("r", FAILED)
    group.ballot()
    assert group.alike("computed", asked, FIRST, Given()) is Phase.TRANSFERRING
    assert not any(("computed", "r") in own.calls for own in group.own)
    group.own[0].put("r", FAILED)
    assert isinstance(group.ballot()[0], TransferFailed)


def test_what_no_other_engine_has_a_part_in_is_the_role_s_own():
    group = Group()
    for own in group.own:
        own.alone.add("r")
    (asked,) = group.arrive("r")
    assert group.alike("may_start", asked) is Start.COMPUTE
    assert group.alike("computed", asked, FIRST, Given()) is Phase.DECODING
    group.alike("left", asked)
    assert group.ballot() == []


def test_who_has_no_slot_waits_for_one_in_the_order_of_arrival():
    group, most = Group(), SLOTS[SlotKind.SESSION]
    names = [f"{n}" for n in range(most + 3)]
    asked = group.arrive(*names)
    for name in names:
        group.put(name, WAITING, WAITING)
    group.ballot()
    starts = [group.alike("may_start", one) for one in asked]
    assert starts == [Start.RECEIVE] * most + [Start.WAIT] * 3
    group.alike("left", asked[most + 1])  # it waits for none any more
    group.put("5", SUCCESS, SUCCESS)
    group.put("6", SUCCESS, SUCCESS)
    assert [end.request for end in group.ballot()] == ["5", "6"]
    starts = [group.alike("may_start", asked[most + n]) for n in (0, 2)]
    assert starts == [Start.WAIT] * 2
    group.ballot()
    starts = [group.alike("may_start", asked[most + n]) for n in (0, 2)]
    assert starts == [Start.RECEIVE] * 2


def test_one_that_fails_without_a_slot_fails_on_all_once_it_has_one():
    group, most = Group(), SLOTS[SlotKind.SESSION]
    asked = group.arrive(*[f"{n}" for n in range(most + 1)])
    late = asked[-1]
    group.own[1].put(late.id, FAILED)
    for _ in range(2):
        assert group.ballot() == []
    assert group.alike("may_start", late) is Start.WAIT
    group.alike("left", asked[0])
    group.ballot()
    group.own[0].states.pop(late.id)
    (end,) = group.ballot()
    assert (type(end), end.request) == (TransferFailed, late.id)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_on_each_rank_all_have_the_same_ends(seed):
    """Ranks go on at their own pace, fail and are left; every session has one end, and not before
    its pages are free on all ranks."""
    rng = Random(seed)
    group = Group(rng.choice((2, 3, 4)))
    open_, ended, left = {}, {}, set()
    for step in range(300):
        if rng.random() < 0.2 and step < 250:
            (asked,) = group.arrive(f"r{step}")
            open_[asked.id] = asked
        for name, asked in list(open_.items()):
            states = {own.states.get(name) for own in group.own}
            if rng.random() < 0.02 and name not in left and TRANSFERRING in states:
                group.alike("left", asked)
                left.add(name)
            starts = name not in left and states <= {WAITING, BOOTSTRAPPING}
            if starts and group.alike("may_start", asked) is Start.RECEIVE:
                group.alike("reserved", asked, None)
        for own in group.own:
            for name, state in list(own.states.items()):
                if rng.random() < 0.7 and step < 250:
                    continue
                gone = ("abort", name, ELSEWHERE) in own.calls or name in left
                if gone or rng.random() < 0.03:
                    own.put(name, FAILED)
                elif state in {BOOTSTRAPPING, TRANSFERRING}:
                    own.put(name, SessionState(state + 1))
        for end in group.ballot():
            assert end.request not in ended
            assert not any(end.request in own.states for own in group.own)
            ended[end.request] = end
            del open_[end.request]
    assert not open_
    assert {type(end) for end in ended.values()} == {Received, TransferFailed}
    assert group.alike("__len__") == 0
