"""The tree machine's walks, cut short: what ``make mutants`` runs in place of the campaigns."""

import pytest

from stratakv.core.choices import EVICTIONS
from stratakv.testing.tree_campaign import campaign

WALKS = 6


@pytest.mark.parametrize("number", range(10, 13))
def test_the_tree_agrees_with_the_perfect_model(number: int) -> None:
    campaign(number, WALKS, shrink=False)


@pytest.mark.parametrize("policy", [policy for policy in EVICTIONS if policy != "lru"])
def test_every_policy_keeps_the_trees_rules(policy: str) -> None:
    campaign(1, WALKS, policy=policy, shrink=False)
