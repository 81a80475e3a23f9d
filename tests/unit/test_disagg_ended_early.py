"""What one side has given up before the other came is remembered until somebody comes or it is too
late, and no peer fills the memory with names."""

from math import inf

from stratakv.disagg.ended_early import EarlyEnd, EarlyEnds


def end(peer, until_s=10.0):
    return EarlyEnd(peer, f"{peer} left", until_s)


def test_a_name_is_given_once():
    ends = EarlyEnds(4)
    ends.add("r", end("decode"))
    ends.add("s", end(None))
    assert len(ends) == 2
    assert ends.pop("r") == end("decode")
    assert ends.pop("r") is None
    assert ends.pop("s") == end(None)
    assert len(ends) == 0


def test_the_last_end_of_a_name_counts():
    ends = EarlyEnds(4)
    ends.add("r", end("decode"))
    ends.add("r", end(None))
    assert len(ends) == 1
    assert ends.pop("r") == end(None)


def test_nobody_is_waited_for_longer_than_that():
    ends = EarlyEnds(4)
    for n, until_s in enumerate((10.0, 30.0, 20.0)):
        ends.add(f"{n}", end("decode", until_s))
    assert ends.expire(5.0) == 10.0
    assert ends.expire(10.0) == 20.0
    assert [ends.pop(f"{n}") is None for n in range(2)] == [True, False]
    assert ends.expire(20.0) == inf
    assert len(ends) == 0


def test_a_peer_that_invents_names_costs_others_none():
    ends = EarlyEnds(3)
    for peer in ("other", None):
        ends.add(f"of {peer}", end(peer))
    for n in range(20):
        ends.add(f"{n}", end("bad"))
    assert len(ends) == 5
    assert [n for n in range(20) if ends.pop(f"{n}")] == [17, 18, 19], "the newest"
    assert ends.pop("of other") is not None
    assert ends.pop("of None") is not None
