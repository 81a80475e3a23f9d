"""Tests that need a GPU: collected where Triton does not interpret, as ``make gpu`` has it.

What torch warns of on one GPU or another is no fault of a test; nobody could see it without one."""

import os

import pytest

collect_ignore_glob = [] if os.environ["TRITON_INTERPRET"] == "0" else ["test_*.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.filterwarnings("ignore::UserWarning:torch.*"))
