"""A session goes forward by one state at a time, fails in every state, and ends once."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratakv.disagg.session import (
    Aborted,
    Agreed,
    Arrived,
    Session,
    SessionLimits,
    SessionState,
    TransferBegun,
)

FORWARD = (Agreed(), TransferBegun(), Arrived("r"))
LIMITS = SessionLimits(bootstrap_s=10.0, waiting_s=20.0, transfer_s=40.0)
RUNNING = (
    SessionState.BOOTSTRAPPING, SessionState.WAITING_FOR_INPUT, SessionState.TRANSFERRING,
)  # fmt: skip


def session_in(state, now_s=0.0):
    session = Session.opened("r", LIMITS, now_s)
    for event in FORWARD[: max(0, state - SessionState.BOOTSTRAPPING)]:
        session = session.after(event, now_s)
    return session if state else session.after(Aborted("no"), now_s)


@pytest.mark.parametrize("state", SessionState)
def test_the_events_lead_through_the_states_in_their_order(state):
    assert session_in(state).state is state


@pytest.mark.parametrize("state", RUNNING)
def test_an_abort_fails_it_in_every_state_with_its_reason(state):
    failed = session_in(state).after(Aborted("the client left"), 1.0)
    assert (failed.state, failed.reason) == (SessionState.FAILED, "the client left")


@pytest.mark.parametrize(
    ("state", "event"),
    list(
        product(
            (SessionState.FAILED, SessionState.SUCCESS),
            (*FORWARD, Arrived("another"), Aborted("late")),
        )
    ),
)
def test_an_end_is_an_end(state, event):
    ended = session_in(state)
    assert ended.after(event, 5.0) == ended
    assert ended.expire(1e9) == ended


@pytest.mark.parametrize("state", RUNNING)
def test_a_word_that_comes_twice_moves_nothing_and_buys_no_time(state):
    session = session_in(state)
    for event in FORWARD[: state - SessionState.BOOTSTRAPPING]:
        assert session.after(event, 7.0) == session


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (SessionState.BOOTSTRAPPING, TransferBegun()),
        (SessionState.BOOTSTRAPPING, Arrived("r")),
        (SessionState.WAITING_FOR_INPUT, Arrived("r")),
    ],
)
def test_a_word_that_comes_too_early_is_of_another_session(state, event):
    failed = session_in(state).after(event, 0.0)
    assert failed.state is SessionState.FAILED
    assert state.name in failed.reason


@pytest.mark.parametrize("state", RUNNING)
def test_the_metadata_of_another_session_proves_nothing(state):
    failed = session_in(state).after(Arrived("q"), 0.0)
    assert failed.state is SessionState.FAILED
    assert "q" in failed.reason


@pytest.mark.parametrize(("state", "limit_s"), list(zip(RUNNING, (10.0, 20.0, 40.0), strict=True)))
def test_each_state_has_a_deadline_of_its_own_from_its_beginning(state, limit_s):
    session = session_in(state, now_s=100.0)
    assert session.expire(100.0 + limit_s - 0.1) == session
    failed = session.expire(100.0 + limit_s)
    assert failed.state is SessionState.FAILED
    assert failed.reason.endswith(" took too long")
    assert state.name not in failed.reason, "clients read it"


@given(st.lists(st.sampled_from([*SessionState]), min_size=1, max_size=4))
def test_ranks_together_are_what_the_least_of_them_is(states):
    together = min(states)
    assert (together is SessionState.SUCCESS) == all(s is SessionState.SUCCESS for s in states)
    assert (together is SessionState.FAILED) == any(s is SessionState.FAILED for s in states)


EVENTS = st.sampled_from([*FORWARD, Arrived("q"), Aborted("no"), "expire"])


@given(st.lists(st.tuples(EVENTS, st.floats(0, 30)), max_size=12))
def test_states_only_grow_until_one_fails_and_success_needs_every_step(steps):
    session, now_s, seen = Session.opened("r", LIMITS, 0.0), 0.0, []
    for event, passes_s in steps:
        now_s += passes_s
        before = session
        session = session.expire(now_s) if event == "expire" else session.after(event, now_s)
        if session.state is not before.state:
            seen.append(session.state)
            assert session.state is SessionState.FAILED or session.state == before.state + 1
        assert (session.state is SessionState.FAILED) == bool(session.reason)
    if session.state is SessionState.SUCCESS:
        assert seen == [*RUNNING[1:], SessionState.SUCCESS]
