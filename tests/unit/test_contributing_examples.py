"""What CONTRIBUTING shows of the public suites fits them: every hook that it defines is one."""

from pathlib import Path

import pytest
import torch

from tests.doc_blocks import python_of


class Theirs:
    """Stands for the names that a reader puts in: the examples are defined here, not run."""


@pytest.mark.parametrize("code", python_of("CONTRIBUTING.md"))
def test_an_example_overrides_hooks_of_its_suite(code):
    given = dict.fromkeys(("MyEngine", "MyBackend", "MyKernels"), Theirs)
    given |= {"PLACE": "", "Path": Path, "torch": torch}
    found: dict[str, object] = dict(given)
    exec(code, found)
    suites = [cls for name, cls in found.items() if name.startswith("Test")]
    assert suites
    for suite in suites:
        hooks = {name for name in vars(suite) if not name.startswith("__")}
        assert hooks
        assert all(hasattr(suite.__base__, name) for name in hooks), suite
