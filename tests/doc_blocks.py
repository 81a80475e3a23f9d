"""Code blocks of the documents. Owns their reading, and which test runs which page's Python."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import dedent
from typing import Final

from tests.meta.source import repository

PYTHON_IS_RUN_BY: Final[Mapping[str, str]] = {
    "README.md": "tests/integration/test_packaging.py",
    "docs/embedding.md": "tests/integration/test_packaging.py",
    "docs/disaggregation.md": "tests/conformance/test_transport_loopback.py",
    "docs/serve.md": "tests/integration/test_http_api.py",
    "CONTRIBUTING.md": "tests/unit/test_contributing_examples.py",
}
"""Each of these tests takes the blocks from the page."""


@dataclass(frozen=True)
class Block:
    """``language`` is what stands behind the fence: ``python``, ``sh``, ``text``."""

    page: str
    language: str
    code: str


def blocks_of(page: str, text: str) -> list[Block]:
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
    return [Block(page, language, dedent(code)) for _, language, code in found]


def all_blocks() -> list[Block]:
    """Of every page but the decisions, which are history."""
    pages = [(name, text) for name, text in repository() if name.endswith(".md")]
    return [block for name, text in pages if "/adr/" not in name for block in blocks_of(name, text)]


def shell_lines() -> list[tuple[str, str]]:
    """(page, command) of every shell line, once, in the order of its page, without its comment."""
    lines = [
        (block.page, line.partition("  #")[0].strip())
        for block in all_blocks() if block.language == "sh"
        for line in block.code.splitlines() if not line.startswith("#")
    ]  # fmt: skip
    return list(dict.fromkeys(lines))


def python_of(page: str) -> list[str]:
    """The Python blocks of one page, in order."""
    found = [b.code for b in all_blocks() if b.page == page and b.language == "python"]
    assert found, f"{page} has no Python"
    return found
