"""Seeded bugs: a few characters of one function's source are others for the rest of a test.

Owns how a bug gets into the code; which, and what must see it, belongs to the tests.
"""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest


def seed_bug(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, text: str, bug: str
) -> None:
    """``text``, which stands once in ``owner``'s function ``name``, is ``bug``."""
    function: Callable[..., Any] = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(text) == 1, f"{name} has changed: plant its bug anew"
    made: dict[str, Any] = {}
    exec(source.replace(text, bug), function.__globals__, made)
    monkeypatch.setattr(owner, name, made[name])
