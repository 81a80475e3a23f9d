"""What it costs to be watched: the bench sees what a watcher takes, and leaves nothing behind."""

import json
import logging
import time
from collections import Counter

import pytest
import torch

from stratakv.bench import observability
from stratakv.bench.shapes import HYBRID, build
from stratakv.cli import main
from stratakv.engine.step_times import StepTimes
from stratakv.serve.metrics import Durations


@pytest.fixture(autouse=True)
def few_laps(monkeypatch):
    monkeypatch.setattr(observability, "LAPS", 3)
    monkeypatch.setattr(observability, "TURNS", 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_command_prints_the_ratio_and_writes_all_of_it(tmp_path, capsys):
    written = tmp_path / "figures.json"
    assert main(["bench", "observability", "--json", str(written)]) == 0
    found = json.loads(written.read_text())
    assert min(found.values()) > 0
    assert found["observability_ratio"] == pytest.approx(
        found["watched_us"] / found["bare_us"], rel=0.5
    )
    shown = capsys.readouterr().out
    assert f"observability_ratio {found['observability_ratio']:.3f} (at most 1.01)" in shown


def test_what_watches_is_there_and_counted_in_the_watched_turns_alone(monkeypatch):
    """Each part of a step is made to take a millisecond where it is timed."""
    enter, observe, logger = StepTimes.enter, Durations.observe, logging.getLogger("stratakv")
    before = logger.level, logger.propagate, [*logger.handlers]

    def slow(self, part):
        until_s = time.thread_time() + 0.001
        while time.thread_time() < until_s:
            pass
        enter(self, part)

    monkeypatch.setattr(StepTimes, "enter", slow)
    found = observability.observability(build(HYBRID))
    assert found.observability_ratio > 1  # how much more is the machine's own affair
    assert found.watched_us - found.bare_us > 5000
    assert found.shown_ms > 0
    assert found.log_lines > 0
    assert StepTimes.enter is slow
    assert Durations.observe is observe
    assert (logger.level, logger.propagate, [*logger.handlers]) == before
    assert logging.root.manager.disable == logging.NOTSET


def test_every_watcher_that_is_left_out_is_called_where_it_is_not(monkeypatch):
    """A name that nothing calls any more would measure nothing."""
    called = Counter()

    def counted(verb, name):
        def count(*args, **kwargs):
            called[name] += 1
            return verb(*args, **kwargs)

        return count

    for owner, name in observability.WATCHERS:
        monkeypatch.setattr(owner, name, counted(vars(owner)[name], f"{owner.__name__}.{name}"))
    observability.observability(build(HYBRID))
    assert set(called) == {f"{owner.__name__}.{name}" for owner, name in observability.WATCHERS}
