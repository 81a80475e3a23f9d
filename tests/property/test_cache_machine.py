"""A cache of requests walks at random beside books of its own (``tests/cache_machine.py``)."""

from collections import Counter

import pytest

from stratakv.policy.admission import demand
from stratakv.spec.retention import KeepBoundary, KeepChunk, KeepWindow
from tests.cache_machine import CHUNK, MOST, CacheMachine, wide_spec

SPECS = {
    "anchor": wide_spec(3),
    "window": wide_spec(2, KeepWindow(5)),
    "chunk": wide_spec(3, KeepChunk(7)),
    "state": wide_spec(2, KeepBoundary()),
    "all": wide_spec(3, KeepBoundary(), KeepWindow(4)),
}
CALM = ["submit", "submit", "admit", "admit", *["step"] * 4, "tick", "tick", "receive"]
BUSY = [*CALM, "tick", "abort", "retract", "push_out"]
POOLS = (1.5, 2.5, 12)
"""Of the anchor, in pages of the longest request; others have what those that run may hold."""
HOSTS = (60, 8, 0)
WALKS = 18


def walk(spec, seed, steps):
    """In a pool that is short, in one that is not, and in one that nothing ever leaves; with much
    of a host, with little, and without one."""
    size, host = seed % len(POOLS), HOSTS[seed // len(POOLS) % len(HOSTS)]
    peak = demand(spec, MOST, MOST, 2 * CHUNK, 0).peak
    device = [
        int(most * POOLS[size]) if group.keeps_all else most * max(3, int(POOLS[size]))
        for group, most in zip(spec.groups, peak, strict=True)
    ]
    machine = CacheMachine(spec, seed, device, host, steps_at_once=1 + seed % 2)
    machine.run(steps, CALM if size == 2 else BUSY)
    return machine.seen


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_row_that_a_request_reads_is_its_own_tokens(spec):
    seen = sum((walk(spec, seed, 70) for seed in range(WALKS)), Counter())
    for what in ("loaded", "saved", "not saved", "restored", "received", "sent", "went on"):
        assert seen[what] > 0, what


@pytest.mark.long
@pytest.mark.parametrize("tenth", range(10))
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_longer_walks(spec, tenth):
    for seed in range(18, 36):
        walk(spec, 100 * tenth + seed, 200)
