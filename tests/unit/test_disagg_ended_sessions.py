"""What is over where prompts are computed is remembered by name until whoever has not heard of it
comes, or it is too late, and no peer fills the memory with names."""

from math import inf

import pytest

from stratakv.disagg.ended_sessions import EndedSessions, How

HERE, THERE, OVER = How


def memory(most=4, **ends):
    found = EndedSessions(most, 10.0)
    for name, how in ends.items():
        found.add(name, how, None if how is HERE else "decode", f"{name} is over", 0.0)
    return found


def test_who_asks_for_what_was_given_up_is_answered_once():
    for how in (HERE, THERE):
        ends = memory(r=how)
        assert ends.asked("r", 1.0) == "r is over"
        assert ends.asked("r", 1.0) is None
        assert len(ends) == 0


def test_a_request_that_decode_has_given_up_ends_and_the_next_one_goes_on():
    ends = memory(r=THERE)
    assert ends.arrived("r", 1.0) == "r is over"
    assert ends.arrived("r", 1.0) is None


def test_a_request_of_a_name_that_this_side_has_given_up_is_another_one():
    ends = memory(r=HERE)
    assert ends.arrived("r", 1.0) is None
    assert ends.asked("r", 1.0) is None, "and decode may ask for it"


def test_what_was_handed_over_is_over_however_often_somebody_comes():
    ends = memory(r=OVER)
    for _ in range(3):
        assert ends.asked("r", 9.0) == ends.arrived("r", 9.0) == "r is over"
        assert ends.given_up("r", 9.0)
    assert ends.asked("r", 10.0) is None
    assert len(ends) == 0, "both sides know"


def test_decode_need_not_be_remembered_where_it_says_what_this_side_knows():
    ends = memory(here=HERE, there=THERE, over=OVER)
    assert [ends.given_up(name, 1.0) for name in ("here", "there", "over", "new")] == [
        True, False, True, False
    ]  # fmt: skip
    assert ends.asked("here", 1.0) is None, "both know"


def test_the_last_end_of_a_name_counts():
    ends = memory(r=THERE)
    ends.add("r", OVER, "decode", "again", 5.0)
    assert len(ends) == 0
    assert ends.asked("r", 14.0) == "again"


def test_nobody_is_waited_for_longer_than_that():
    ends = EndedSessions(4, 10.0)
    for n, how in enumerate((OVER, HERE, THERE)):
        ends.add(f"{n}", how, "decode", "over", n)
    assert ends.expire(5.0) == 11.0, "of those that were given up the first"
    assert ends.expire(11.0) == 12.0
    assert [ends.asked(f"{n}", 11.0) for n in range(3)] == [None, None, "over"]
    assert ends.expire(12.0) == inf


def test_a_peer_that_invents_names_costs_others_none():
    ends = memory(3, other=THERE, here=HERE)
    for n in range(20):
        ends.add(f"{n}", THERE, "bad", "over", 0.0)
    assert len(ends) == 5
    assert [n for n in range(20) if ends.asked(f"{n}", 0.0)] == [17, 18, 19], "the newest"
    assert ends.asked("other", 0.0)
    assert ends.asked("here", 0.0)


@pytest.mark.parametrize(("many", "one"), [(OVER, THERE), (THERE, OVER)])
def test_what_was_given_up_and_what_was_handed_over_push_each_other_out_never(many, one):
    ends = memory(3, first=one)
    for n in range(20):
        ends.add(f"{n}", many, "decode", "over", 0.0)
    assert ends.asked("first", 0.0)
