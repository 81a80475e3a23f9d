"""One finding of ``stratakv doctor``, and how a list of them is shown. Owns no check."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["fine", "untested", "poor", "bad"]


@dataclass(frozen=True, slots=True)
class Check:
    """``what`` was looked at, and what is the matter with it, or how it is. ``advice``: what to do
    about it, where there is something to do: always, unless it is fine. "poor" is slow or small,
    "bad" does not work."""

    what: str
    verdict: Verdict
    text: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert (self.verdict == "fine") == (not self.advice), f"{self.what}: what is to be done?"


def check_lines(checks: Sequence[Check]) -> list[str]:
    """For people."""
    lines: list[str] = []
    for check in checks:
        lines.append(f"{check.verdict:<9}{check.what}: {check.text}")
        if check.advice:
            lines.append(f"{'':<9}-> {check.advice}")
    return lines


def check_figures(checks: Sequence[Check]) -> Mapping[str, object]:
    """As plain data."""
    return {"ok": exit_code(checks) == 0, "checks": [asdict(check) for check in checks]}


def exit_code(checks: Sequence[Check]) -> int:
    """1 where something does not work."""
    return int(any(check.verdict == "bad" for check in checks))
