"""The figures and the verdict of ``make demo``: nothing but a perfect run may pass."""

from dataclasses import replace

import pytest

from demo import table
from demo.client import Reply
from demo.script import Line

CACHED = Reply(
    text="A list.", finish="stop", first_s=0.02, prompt_tokens=1000, answer_tokens=4, device=600,
    host=250, storage=50,
)  # fmt: skip
PLAIN = replace(CACHED, first_s=0.2, device=0, host=0, storage=0)
TURN = table.Turn(line=Line("Ada", "What?"), number=2, cached=CACHED, plain=PLAIN)
MOVED = {("copied", "backup"): 1234, ("evicted", "device"): 567, ("copied", "load"): 89}


def test_a_perfect_run_has_no_failure():
    assert table.failures([TURN, TURN], asked=2) == []


@pytest.mark.parametrize(
    ("cached", "plain", "message"),
    [
        ({"text": "A tuple."}, {}, "Ada's turn 2 differs"),
        ({"finish": "length"}, {}, "Ada's turn 2 differs"),
        ({"answer_tokens": 5}, {}, "Ada's turn 2 differs"),
        ({"host": 0}, {}, "the host tier served no hit"),
        ({"device": 0}, {}, "the device tier served no hit"),
        ({}, {"device": 16}, "hit a cache that is off"),
        ({}, {"storage": 16}, "hit a cache that is off"),
    ],
)
def test_each_thing_that_goes_wrong_is_reported(cached, plain, message):
    turn = replace(TURN, cached=replace(CACHED, **cached), plain=replace(PLAIN, **plain))
    (failure,) = table.failures([turn], asked=1)
    assert message in failure


def test_one_differing_answer_among_many_fails_the_run():
    differing = replace(TURN, plain=replace(PLAIN, text="Something else."))
    assert table.failures([TURN, differing, TURN], asked=3)


def test_a_run_that_was_cut_short_fails():
    assert table.failures([TURN], asked=2) == ["only 1 of 2 turns were played"]


def test_columns_stand_under_their_headers():
    top, below, rule = table.header().splitlines()
    row = table.row(TURN)
    figures = ["1,000", "600", "250", "50", "100", "20", "ms", "200", "ms"]
    assert row.split() == ["Ada", "2", *figures, "yes"]
    assert len(row) == len(rule) == len(table.divider("a restart"))
    for word, cell in (("device", "600"), ("host", "250"), ("storage", "  50")):
        assert below.index(word) + len(word) == row.index(cell) + len(cell)
    assert top.index("computed") + len("computed") == row.index(" 100 ") + 4


def test_a_differing_answer_cries_out_in_its_row():
    assert table.row(replace(TURN, plain=replace(PLAIN, text="x"))).endswith("NO")


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_user_who_begins_again_after_the_restart_fails_the_run():
    assert table.failures_of_restart([TURN, TURN]) == []
    again = replace(TURN, cached=replace(CACHED, storage=0))
    (failure,) = table.failures_of_restart([TURN, again])
    assert failure == "Ada's turn 2 got nothing from storage after the restart"


def test_the_summary_of_the_restart_adds_up():
    lines = words(table.summary_of_restart([TURN, replace(TURN, plain=replace(PLAIN, text="x"))]))
    assert "after the restart 2,000 prompt tokens in 2 turns" in lines
    assert "from storage 100 (5.0%)" in lines
    assert "first token after 20 ms with storage, 200 ms without: 10.0 times as fast" in lines
    assert "identical output 1 of 2 answers" in lines


def test_the_summary_adds_up():
    slow = replace(TURN, cached=replace(CACHED, first_s=0.04, device=0, host=0, storage=0))
    lines = words(table.summary([TURN, slow, TURN], MOVED))
    assert "prompt tokens 3,000 in 3 turns" in lines
    assert "from the device 1,200 (40.0%)" in lines
    assert "from the host 500 (16.7%)" in lines
    assert "computed 1,200 (40.0%)" in lines
    assert "hit rate 60.0% of prompt tokens" in lines
    assert "first token after 20 ms with the cache, 200 ms without: 10.0 times as fast" in lines
    assert "identical output 3 of 3 answers" in lines
    assert any("1,234 copied to the host" in line for line in lines)
    assert any("89 loaded back" in line for line in lines)


def test_an_excerpt_shows_question_and_answer():
    assert table.excerpt(TURN) == "Ada, turn 2: What?\n  A list."
    empty = replace(TURN, cached=replace(CACHED, text=""))
    assert "(an empty answer)" in table.excerpt(empty)
