"""What holds for every test. Owns process-wide settings: threads, network, Hypothesis."""

import atexit
import functools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, Phase, settings

from stratakv.storage.file import segment
from stratakv.storage.file.page_io import PythonPageIo

if find_spec("torch") is not None:  # the library's own tests run without it, on other Pythons
    import torch

    # xdist's workers share two cores: more threads would only wait for each other.
    torch.set_num_threads(1)
# Who imports these gives its process a device for good: ``integration/test_away.py`` runs them.
collect_ignore = ["away"]
# A model comes from a directory or from a config; a test that asks a network is wrong.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Kernels run without a GPU; `make gpu` says 0. Read when the first of them is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

# What a start keeps for the next one is this run's own, its servers' and its workers' too.
if "STRATAKV_TEST_CACHE" not in os.environ:
    os.environ["STRATAKV_TEST_CACHE"] = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# No deadline: a busy machine is not a bug. In CI the examples are the same every time, so that a
# red run means the change; at home they are random, so that they find what nobody thought of.
settings.register_profile(
    "house",
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# For `make mutants`: a mutant meets the same few examples every time.
settings.register_profile(
    "mutants",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=15,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("house")


SUMMARY = "summary"


@pytest.fixture
def python_page_io(monkeypatch):
    """Stored pages go through calls of ``os``, which a test can break."""
    monkeypatch.setattr(segment, "PAGE_IO", PythonPageIo())


@pytest.fixture
def no_toolkit(monkeypatch):
    """Adapters name pages by every byte of a machine's CUDA compilers, where it has some, at every
    start: a tenth of a second."""
    monkeypatch.setenv("CUDA_HOME", "/nowhere")


@pytest.fixture
def summary(record_property):
    """What the run's summary is to say beside how many have passed."""
    return functools.partial(record_property, SUMMARY)


@pytest.fixture(autouse=True)
def _shared_models_as_made():
    """Which test meets one next is chance: who has changed it says so itself."""
    yield
    models = sys.modules.get("tests.fixtures.models")
    assert models is None or not models.shared_models_written_to()


@pytest.fixture(autouse=True)
def _logs_as_before():
    """A logger that stays silenced would hide lines from the tests that come after."""
    before = _own_log_levels()
    yield
    after = _own_log_levels()
    assert {name: after[name] for name in before} == before
    assert not any(level for name, level in after.items() if name not in before)
    assert not logging.root.manager.disable


def _own_log_levels():
    loggers = logging.root.manager.loggerDict.items()
    own = (one for one in loggers if one[0].partition(".")[0] == "stratakv")
    return {name: one.level for name, one in own if isinstance(one, logging.Logger)}


@pytest.fixture
def quiet():
    """Engines, stores and sessions that fail on purpose log it, thousands of times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def pytest_terminal_summary(terminalreporter):
    passed = terminalreporter.stats.get("passed", [])
    lines = [text for report in passed for name, text in report.user_properties if name == SUMMARY]
    for text in lines:
        terminalreporter.write_line(text)


@pytest.fixture
def nothing_starts(monkeypatch):
    """A test in which no process is started, no rank is met and no model loaded."""

    def begun(*_arguments, **_options):
        raise AssertionError("something was begun")

    monkeypatch.setattr(subprocess, "Popen", begun)
    monkeypatch.setattr("stratakv.serve.launch.join", begun)
    monkeypatch.setattr("stratakv.serve.wiring.load_model", begun)
