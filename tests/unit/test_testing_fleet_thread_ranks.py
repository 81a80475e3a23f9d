"""The rendezvous of simulated ranks: what it answers, and whom it names when ranks do not meet."""

import threading

import numpy as np
import pytest

from stratakv.core.errors import RankLostError
from stratakv.testing.fleet.thread_ranks import Rendezvous, ThreadRanks
from stratakv.testing.patience import PATIENCE_S


def together(*bodies, seed=0):
    """Each body is a rank; what each returned or raised."""
    rendezvous = Rendezvous(len(bodies), seed)
    results = [None] * len(bodies)

    def live(rank):
        rendezvous.begin(rank)
        try:
            results[rank] = bodies[rank](ThreadRanks(rank, rendezvous))
        except (AssertionError, RankLostError) as error:
            results[rank] = error
        rendezvous.leave(rank, "has ended")

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    rendezvous.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a rank hangs"
    return results


def test_the_least_of_each_lane_comes_back_to_all():
    lanes = [np.array([3, 1, 2]), np.array([1, 5, 2]), np.array([2, 2, 9])]
    results = together(*[lambda ranks: ranks.all_reduce_min(lanes[ranks.rank].copy()).tolist()] * 3)
    assert results == [[1, 1, 2]] * 3


def test_rank_0_broadcasts_and_texts_are_in_order():
    def body(ranks):
        return ranks.broadcast(b"%d" % ranks.rank), list(ranks.gather(str(ranks.rank)))

    assert together(*[body] * 4) == [(b"0", ["0", "1", "2", "3"])] * 4


def test_only_one_rank_runs_at_a_time():
    inside = []

    def body(ranks):
        for _ in range(50):
            inside.append(ranks.rank)
            assert len(inside) == 1
            inside.pop()
            ranks.broadcast(b"")

    assert together(*[body] * 3) == [None] * 3


def test_other_calls_and_other_shapes_do_not_meet():
    def broadcasts(ranks):
        ranks.broadcast(b"")

    def votes(count):
        return lambda ranks: ranks.all_reduce_min(np.zeros(count, np.int64))

    for bodies in ((broadcasts, votes(3), votes(3)), (votes(3), votes(4), votes(3))):
        results = together(*bodies)
        assert all(isinstance(error, AssertionError | RankLostError) for error in results)
        assert "rank 1 in all_reduce_min" in str(results[0])


def test_who_does_not_come_is_named_and_nobody_hangs():
    def votes(ranks):
        ranks.broadcast(b"")
        ranks.broadcast(b"")

    def ends(ranks):
        ranks.broadcast(b"")

    for bodies in ((votes, votes, ends), (ends, votes, votes)):
        lost = [error for error in together(*bodies) if error is not None]
        assert len(lost) == 2
        assert all(isinstance(error, RankLostError) for error in lost)
        assert all("has ended, while others wait" in str(error) for error in lost)


def test_ranks_that_meet_for_ever_are_stopped(monkeypatch):
    monkeypatch.setattr("stratakv.testing.fleet.thread_ranks.MOST_COLLECTIVES", 20)

    def body(ranks):
        while True:
            ranks.broadcast(b"")

    assert all("no end" in str(error) for error in together(body, body))


@pytest.mark.parametrize("ranks", [2, 8])
def test_who_leaves_early_leaves_in_peace(ranks):
    def body(own):
        return own.broadcast(b"x")

    assert together(*[body] * ranks) == [b"x"] * ranks


def test_the_order_of_turns_is_drawn_from_the_seed():
    def turns(seed):
        came = []

        def body(ranks):
            for _ in range(20):
                came.append(ranks.rank)
                ranks.broadcast(b"")

        assert together(*[body] * 4, seed=seed) == [None] * 4
        return came

    assert turns(1) == turns(1) != turns(2)
    rounds = {tuple(turns(1)[at : at + 4]) for at in range(0, 80, 4)}
    assert len(rounds) > 6
