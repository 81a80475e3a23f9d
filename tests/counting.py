"""How much work something is, on any machine: calls are counted, seconds are not.

Owns the count. Work inside one call of C code, as numpy's, is one call: it shows what grows with
Python objects.
"""

import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def counted(work: Callable[[], T]) -> tuple[T, int]:
    """What ``work`` returns, and how many functions were called for it on this thread."""
    calls = 0

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        return work(), calls
    finally:
        sys.setprofile(None)
