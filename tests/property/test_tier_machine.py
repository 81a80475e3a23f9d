"""A tiered cache walks at random beside books of its own (``tests/tier_machine.py``)."""

import logging
from collections import Counter

import pytest

from stratakv.policy.write import WriteBack, WriteThrough, WriteThroughSelective
from stratakv.spec.retention import KeepBoundary, KeepWindow
from stratakv.testing.specs import small_spec
from tests.tier_machine import TierMachine

SPECS = {
    "anchor": small_spec([], page_tokens=2),
    "window": small_spec([KeepWindow(5)], page_tokens=2),
    "state": small_spec([KeepBoundary()], page_tokens=2, anchor_bytes=False),
    "all": small_spec([KeepBoundary(), KeepWindow(4)], page_tokens=2),
}
COPIES = ["serve"] * 5 + ["leave"] * 3 + ["tick"] * 2 + ["push_out"] * 2
COPIES += ["hold", "let_go", "settle", "save_live", "live_back", "live_back", "wait_for_copies"]
COPIES += ["come_back"] * 2
STORAGE = [*COPIES, "attach", "ask", "ask", "answer", "answer", "tick"]
WRITES = [WriteThrough(), WriteThroughSelective(2), WriteBack(0.4)]
WALKS = 12


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="stratakv")


def walk(spec, seed, steps):
    """One of a few pages or of more, with storage or without, under every write policy."""
    device, host = (24, 30) if seed % 2 else (12, 14)
    machine = TierMachine(spec, seed, device, host, WRITES[seed % len(WRITES)])
    machine.run(steps, STORAGE if seed % 4 else COPIES)
    return machine.seen


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_pages_are_what_they_say_on_every_tier(spec):
    seen = sum((walk(spec, seed, 80) for seed in range(WALKS)), Counter())
    assert seen["loaded"] > 0
    assert seen["came from storage"] > 0
    assert seen["live back"] > 0
    assert seen["live lost"] > 0


@pytest.mark.long
@pytest.mark.parametrize("tenth", range(10))
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_longer_walks(spec, tenth):
    for seed in range(10):
        walk(spec, 10 + 10 * tenth + seed, 200)
