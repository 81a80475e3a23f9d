"""Hand-offs given up at every moment, over a transport that is late and untidy: no wrong byte, no
page that is lost, nobody who waits for ever.
"""

from collections import Counter

import pytest

from stratakv.tiers import progress
from tests.hand_off_campaign import Moment, campaign
from tests.pairs import every_rule


@pytest.fixture(autouse=True)
def nobody_sleeps(monkeypatch):
    """Engines that wait for each other give each other turns."""
    monkeypatch.setattr(progress, "POLL_S", 0.0)
    monkeypatch.setattr(progress, "PAUSE_POLLS", 1)


@every_rule
def test_aborts_in_every_state_harm_nobody(rules):
    walk = campaign(rules, 3, 10)
    assert walk.right > 5


PARTS, EACH = 10, 17
"""Of every moment 17 in each part, of each of the six sets of rules: 1,020 in all."""


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@every_rule
def test_a_thousand_aborts_in_every_state(rules, part):
    hit, right, seed = Counter(), 0, 1000 * (part + 1)
    while min(hit[moment] for moment in Moment) < EACH:
        walk = campaign(rules, seed, 70)
        hit, right, seed = hit + walk.hit, right + walk.right, seed + 1
    assert right > sum(hit.values()) / 2
