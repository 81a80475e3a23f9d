"""What the counts of a package come to. Owns the targets."""

from collections import Counter
from typing import Final

TARGETS: Final = {
    "policy": 0.95, "agreement": 0.95, "tree": 0.95, "spec": 0.95, "cache": 0.85,
    "tiers": 0.85, "tiers/prefetch": 0.85, "storage/file": 0.85,
}  # fmt: skip
"""Least part of the mutants that can be killed, by package."""


def score(counts: Counter[str]) -> float:
    """Killed, of those that were run and can be."""
    run = counts["killed"] + counts["hung"] + counts["survived"]
    return (counts["killed"] + counts["hung"]) / run if run else 0.0


def verdict(room: str, counts: Counter[str]) -> str:
    """The score beside what it leaves out. A target is met by all mutants, not by those that were
    run first."""
    target, reached = TARGETS[room], score(counts)
    if counts["not run"]:
        return f"{reached:.1%} of those run, {counts['not run']:,} not run: {target:.0%} not met"
    return f"{reached:.1%}: {target:.0%} {'met' if reached >= target else 'not met'}"
