"""What is shown while weights load."""

import logging
import sys
import threading

import numpy as np
import pytest
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from stratakv.core.logs import DETAILS
from stratakv.serve.load_progress import load_progress
from stratakv.testing.patience import wait_until

MIB = 1 << 20
LOGGER = "stratakv.serve.load_progress"


@pytest.fixture(autouse=True)
def bar():
    """It is the process's: ranks that are threads of it leave it disabled."""
    shown = is_progress_bar_enabled()
    enable_progress_bar()
    yield
    if not shown:
        disable_progress_bar()


def lines(caplog):
    return [vars(record)[DETAILS] for record in caplog.records if record.name == LOGGER]


def test_a_log_has_lines_that_grow_with_what_is_loaded_and_no_bar(caplog):
    caplog.set_level(logging.INFO)
    with load_progress(96 * MIB, period_s=0.001):
        assert not is_progress_bar_enabled()
        wait_until(lambda: lines(caplog))
        weights = [np.ones(64 * MIB, np.uint8)]

        def reaches(size):
            """More and more, for a system may take other memory of this process meanwhile."""
            if lines(caplog)[-1]["loaded_bytes"] >= size:
                return True
            weights.append(np.ones(4 * MIB, np.uint8))
            return False

        wait_until(lambda: reaches(60 * MIB))
        wait_until(lambda: reaches(96 * MIB))
    assert is_progress_bar_enabled()
    assert lines(caplog)[0]["loaded_bytes"] < 60 * MIB
    assert "of 96 MiB in memory after " in caplog.text


def test_it_ends_with_a_load_that_fails():
    with pytest.raises(ValueError, match="no weights"), load_progress(1):
        raise ValueError("no weights")
    assert is_progress_bar_enabled()
    assert "stratakv-load-progress" not in {thread.name for thread in threading.enumerate()}


def test_a_terminal_has_the_bar(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with load_progress(1, period_s=0.001):
        assert is_progress_bar_enabled()
    assert lines(caplog) == []
