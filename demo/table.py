"""The demo's figures as a person reads them: the table, the summary, the verdict.

Pure text from plain records; must not talk to a server nor print.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from demo.client import Reply
from demo.script import Line

COLUMNS: Final = (
    ("user", "", -6),
    ("turn", "", 4),
    ("prompt", "tokens", 9),
    ("from", "device", 9),
    ("from", "host", 7),
    ("from", "storage", 9),
    ("computed", "", 11),
    ("", "cache", 9),
    ("first token", "no cache", 11),
    ("output", "identical", 12),
)
"""Two lines of header and the width of each column; negative: flush left."""
WRAP: Final = 92


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One question and both answers. ``number``: of this user's turns, from 1."""

    line: Line
    number: int
    cached: Reply
    plain: Reply

    @property
    def identical(self) -> bool:
        return self.cached.same_answer(self.plain)

    @property
    def computed(self) -> int:
        """Prompt tokens that the cached run had to compute."""
        reply = self.cached
        return reply.prompt_tokens - reply.device - reply.host - reply.storage


def header() -> str:
    top, below, widths = zip(*COLUMNS, strict=True)
    return "\n".join([_row(top), _row(below), "─" * sum(map(abs, widths))])


def divider(text: str) -> str:
    """Says between two rows what happened between them."""
    return f"── {text} ".ljust(sum(abs(width) for _, _, width in COLUMNS), "─")


def row(turn: Turn) -> str:
    reply = turn.cached
    return _row((
        turn.line.user,
        str(turn.number),
        f"{reply.prompt_tokens:,}",
        f"{reply.device:,}",
        f"{reply.host:,}",
        f"{reply.storage:,}",
        f"{turn.computed:,}",
        _ms(reply.first_s),
        _ms(turn.plain.first_s),
        "yes" if turn.identical else "NO",
    ))  # fmt: skip


def excerpt(turn: Turn) -> str:
    """One question and its answer, to be read."""
    asked = f"{turn.line.user}, turn {turn.number}: {turn.line.question}"
    lines = textwrap.wrap(turn.cached.text, WRAP - 2) or ["(an empty answer)"]
    return "\n".join([asked, *(f"  {line}" for line in lines)])


def summary(turns: Sequence[Turn], moved: Mapping[tuple[str, str], int]) -> str:
    """``moved``: the server's counters of pages, the warm-up's included."""
    prompt = sum(turn.cached.prompt_tokens for turn in turns)
    device = sum(turn.cached.device for turn in turns)
    host = sum(turn.cached.host for turn in turns)
    cached_s = median(turn.cached.first_s for turn in turns)
    plain_s = median(turn.plain.first_s for turn in turns)
    same = sum(turn.identical for turn in turns)
    computed = sum(turn.computed for turn in turns)
    ratio = f"{plain_s / cached_s:.1f} times as fast"
    lines = (
        ("prompt tokens", f"{prompt:,} in {len(turns)} turns"),
        ("from the device", f"{device:,} ({device / prompt:.1%})"),
        ("from the host", f"{host:,} ({host / prompt:.1%})"),
        ("computed", f"{computed:,} ({computed / prompt:.1%})"),
        ("hit rate", f"{1 - computed / prompt:.1%} of prompt tokens"),
        ("first token after", f"{_ms(cached_s)} with the cache, {_ms(plain_s)} without: {ratio}"),
        ("", "(medians over all turns, users' first ones included)"),
        ("pages moved", f"{moved['copied', 'backup']:,} copied to the host"),
        ("", f"{moved['evicted', 'device']:,} evicted from the device"),
        ("", f"{moved['copied', 'load']:,} loaded back from the host"),
        ("identical output", f"{same} of {len(turns)} answers"),
    )
    return _figures(lines)


def summary_of_restart(turns: Sequence[Turn]) -> str:
    """``turns``: those after it."""
    prompt = sum(turn.cached.prompt_tokens for turn in turns)
    storage = sum(turn.cached.storage for turn in turns)
    warm_s = median(turn.cached.first_s for turn in turns)
    cold_s = median(turn.plain.first_s for turn in turns)
    same = sum(turn.identical for turn in turns)
    ratio = f"{cold_s / warm_s:.1f} times as fast"
    lines = (
        ("after the restart", f"{prompt:,} prompt tokens in {len(turns)} turns"),
        ("from storage", f"{storage:,} ({storage / prompt:.1%})"),
        ("first token after", f"{_ms(warm_s)} with storage, {_ms(cold_s)} without: {ratio}"),
        ("", "(medians; a cold start computes all, as the server without a cache does)"),
        ("identical output", f"{same} of {len(turns)} answers"),
    )
    return _figures(lines)


def _figures(lines: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<21}{value}" for name, value in lines)


def failures(turns: Sequence[Turn], asked: int) -> list[str]:
    """Why this run proves nothing or disproves something; empty where all is as it must be."""
    found: list[str] = []
    if len(turns) < asked:
        found.append(f"only {len(turns)} of {asked} turns were played")
    for turn in turns:
        if not turn.identical:
            found.append(
                f"{turn.line.user}'s turn {turn.number} differs:\n"
                f"  with the cache: {turn.cached.text!r} ({turn.cached.finish})\n"
                f"  without:        {turn.plain.text!r} ({turn.plain.finish})"
            )
        if turn.plain.device or turn.plain.host or turn.plain.storage:
            found.append(f"{turn.line.user}'s turn {turn.number} hit a cache that is off")
    if not any(turn.cached.device for turn in turns):
        found.append("the device tier served no hit")
    if not any(turn.cached.host for turn in turns):
        found.append("the host tier served no hit")
    return found


def failures_of_restart(turns: Sequence[Turn]) -> list[str]:
    """The same of the turns after it: nobody may have to begin again."""
    return [
        f"{turn.line.user}'s turn {turn.number} got nothing from storage after the restart"
        for turn in turns
        if not turn.cached.storage
    ]


def _row(cells: Sequence[str]) -> str:
    """Cells under their columns' headers."""
    return "".join(
        cell.ljust(-width) if width < 0 else cell.rjust(width)
        for cell, (_, _, width) in zip(cells, COLUMNS, strict=True)
    ).rstrip()


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"
