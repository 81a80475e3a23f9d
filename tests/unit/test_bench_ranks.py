import multiprocessing
import os
import signal
from multiprocessing.connection import wait

import pytest

from stratakv.bench import ranks, ranks_processes
from stratakv.bench.ranks_engine import take_part
from stratakv.bench.ranks_meter import MeterRecord, TimedPart
from stratakv.bench.ranks_processes import on_ranks
from stratakv.core.errors import ConfigError, RankLostError
from stratakv.testing.patience import PATIENCE_S
from tests.forks import fork_server

KEYS = {
    "ballots_per_step", "broadcasts_per_step", "tick_us_p50", "ballot_us_p50",
    "bare_allreduce_us_p50", "ratio", "broadcast_us_p50", "bare_broadcast_us_p50", "ranks", "steps",
    "cached_device_tokens", "cached_host_tokens",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_fork_server():
    fork_server()


def test_the_report_counts_one_ballot_and_one_broadcast_a_step(capsys):
    report = ranks.run(tp=2, steps=60)
    assert report.keys() >= KEYS
    assert (report["ranks"], report["steps"], report["waited_steps"]) == (2, 60, 0)
    assert (report["ballots_per_step"], report["broadcasts_per_step"]) == (1, 1)
    assert min(report.values()) >= 0
    assert report["tick_us_p50"] > report["tick_own_us_p50"] > 0
    assert "1 ballot, 1 broadcast" in capsys.readouterr().out


def result_of(ballots):
    taken_s = {turn: [1e-3] for turn in TimedPart}
    return MeterRecord(
        ballots=ballots, broadcasts=[1, 1], taken_s=taken_s, met_s=[1e-4], agreed_s=[2e-4]
    )


@pytest.mark.parametrize("counts", [(1, 2), (0, 1), (0, 2)])
def test_no_step_hides_behind_another(counts):
    report = ranks.report_of([result_of([1, 1]), result_of(list(counts))], 2)
    assert report.ballots_per_step != 1


def dies(group, count):
    if group.rank == 1:
        os._exit(7)
    return take_part(group, count)


def hangs(group, count):
    if group.rank == 1:
        signal.pause()
    return count


def raises(group, count):
    raise ValueError(f"rank {group.rank} of {count}")


def test_a_rank_that_dies_ends_all(monkeypatch):
    """Nobody is waited for as long as before, once one is known to be gone."""
    limits_s = []

    def recorded(pipes, limit_s):
        limits_s.append(limit_s)
        return wait(pipes, limit_s)

    monkeypatch.setattr(ranks_processes, "wait", recorded)
    with pytest.raises(RankLostError, match="rank 1: ended without a word"):
        on_ranks(2, dies, 40, PATIENCE_S)
    assert limits_s[0] > max(limits_s[1:], default=0.0)
    assert max(limits_s[1:], default=0.0) <= ranks_processes.GRIEF_S
    assert not multiprocessing.active_children()


def test_a_rank_that_hangs_ends_all():
    with pytest.raises(RankLostError, match="rank 1: nothing within 3 s"):
        on_ranks(2, hangs, 40, 3.0)
    assert not multiprocessing.active_children()


def test_a_rank_that_raises_is_reported():
    with pytest.raises(RankLostError, match="ValueError: rank 0 of 5"):
        on_ranks(2, raises, 5, PATIENCE_S)


def test_one_rank_agrees_with_nobody():
    with pytest.raises(ConfigError, match="--tp 1: allowed is 2 and more"):
        ranks.run(tp=1)
