"""Our own arithmetic, by a number.

Owns the number. Every identity that a page's key is made of begins with it, so pages that an older
arithmetic computed are not found. ``tests/meta/test_arithmetic.py`` holds it to the sources.
"""

from typing import Final

REVISION: Final = b"stratakv-arithmetic-3"
"""One more with each change of what a kernel, a layer, a hook or a runner computes, to the bit."""
