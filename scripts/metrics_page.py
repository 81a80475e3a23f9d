"""Writes the table of docs/metrics.md from the metrics that the server has.

Owns the page's table; names and texts are ``serve/metric_families.py``'s.
"""

import sys
from pathlib import Path
from typing import Final

from stratakv.serve.metric_families import FAMILIES, MetricFamily

DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "metrics.md"
BEGIN: Final = "<!-- metrics: python -m scripts.metrics_page -->\n"
END: Final = "<!-- /metrics -->\n"


def table() -> str:
    head = "| metric | type | labels | what it says |\n|---|---|---|---|\n"
    return head + "".join(map(_row, FAMILIES))


def _row(family: MetricFamily) -> str:
    text = f"{family.text}; {family.see}" if family.see else family.text
    labels = ", ".join(family.labels)
    return f"| `{family.full_name}` | {family.kind} | {labels} | {text} |\n"


def document() -> str:
    """The page as it should be."""
    page = DOCUMENT.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    DOCUMENT.write_text(document(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
