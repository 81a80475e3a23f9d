"""What is known of pages, as an engine asks for them."""

from stratakv.connect.lookups import LookupTable
from stratakv.core.clock import ManualClock

A, B, C = b"a", b"b", b"c"


def table(patience_s=10.0):
    clock = ManualClock()
    return LookupTable(clock, patience_s), clock


def test_each_page_is_asked_for_once_however_many_ask():
    lookups, _ = table()
    assert [lookups.lookup(key, request) for request in "xy" for key in (A, B)] == [None] * 4
    assert lookups.take_unasked() == [A, B]
    lookups.lookup(A, "z")
    assert lookups.take_unasked() == []


def test_nothing_is_kept_once_everybody_has_ended():
    lookups, _ = table()
    lookups.lookup(A, "x")
    lookups.lookup(A, "y")
    keys = lookups.take_unasked()
    lookups.answer(keys, [True])
    lookups.release("x")
    assert lookups.lookup(A, "y") is True
    lookups.release("y")
    lookups.release("nobody")
    assert lookups.size == 0


def test_who_ends_before_the_question_is_not_asked_for():
    lookups, _ = table()
    lookups.lookup(A, "x")
    lookups.lookup(B, "y")
    lookups.release("x")
    assert lookups.take_unasked() == [B]
    lookups.release("y")
    lookups.answer([B], [True])
    assert lookups.size == 0


def test_a_question_under_way_serves_who_comes_later():
    lookups, _ = table()
    lookups.lookup(A, "x")
    keys = lookups.take_unasked()
    lookups.release("x")
    assert lookups.lookup(A, "y") is None
    assert lookups.take_unasked() == []
    lookups.answer(keys, [True])
    assert lookups.lookup(A, "y") is True


def test_who_ended_and_came_back_before_the_question_is_asked_for_once():
    lookups, _ = table()
    lookups.lookup(A, "x")
    lookups.release("x")
    lookups.lookup(A, "y")
    assert lookups.take_unasked() == [A]


def test_a_page_that_could_not_be_read_is_missing_whatever_the_store_says():
    lookups, _ = table()
    lookups.lookup(A, "x")
    keys = lookups.take_unasked()
    lookups.mark_missing([A, C])
    lookups.answer(keys, [True])
    assert lookups.lookup(A, "x") is False
    assert lookups.size == 1


def test_only_what_is_late_is_given_up():
    lookups, clock = table(patience_s=2.0)
    lookups.lookup(A, "x")
    lookups.take_unasked()
    clock.advance(1.5)
    lookups.lookup(B, "x")
    second = lookups.take_unasked()
    clock.advance(0.5)
    assert lookups.give_up_late() == 1
    assert lookups.give_up_late() == 0
    assert [lookups.lookup(key, "x") for key in (A, B)] == [False, None]
    lookups.answer(second, [True])
    clock.advance(10.0)
    assert lookups.give_up_late() == 0
    assert lookups.lookup(B, "x") is True


def test_names_that_have_changed_make_every_verdict_void():
    lookups, _ = table()
    lookups.lookup(A, "x")
    lookups.answer(lookups.take_unasked(), [True])
    lookups.lookup(B, "x")
    lookups.forget()
    assert [lookups.lookup(key, "x") for key in (A, B)] == [False, False]


def test_what_was_decided_and_given_up_before_the_store_was_asked_is_not_asked():
    lookups, _ = table()
    lookups.lookup(A, "x")
    lookups.lookup(B, "x")
    lookups.mark_present([A])
    lookups.release("x")
    assert list(lookups.take_unasked()) == []
    assert lookups.size == 0


def test_what_is_asked_again_before_the_store_was_asked_is_asked_once():
    lookups, _ = table()
    lookups.lookup(A, "x")
    lookups.mark_present([A])
    lookups.release("x")
    lookups.lookup(A, "y")
    assert list(lookups.take_unasked()) == [A]
