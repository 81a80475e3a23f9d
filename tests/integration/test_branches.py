"""Prompts that part from an old one somewhere inside, after the device has let go of it: exactly
what the milestone above the branch gives is not computed, on every tier, and what is said is what
a model without a cache would say.

The old prompt has 400 tokens, 25 pages of 16, and ends at 24: one token is always computed. Its
milestones lie at 1, 2, 3, 6, 12, 18 and 21 pages; of states every 32 tokens at 2, 4, 8, 16, 20, 22.
"""

import pytest

from stratakv.tree.nodes import Tier
from tests.engines import evict, evict_device, on_device, on_host, on_storage
from tests.hit_cases import lab, prompt
from tests.storage_cases import shelf_for, shelf_lab

PAGE = 16
LONG = prompt(PAGE, 1, 400)
KEYS = {200: 192, 300: 288}
"""Shared tokens, and how many of them windows and chunks have; the second branch comes last."""
STATES = {200: 128, 300: 256}
FAMILIES = {"gemma3": KEYS, "llama4": KEYS, "qwen3_next": STATES}
SNAPSHOTS = {"snapshot_tokens": 32}
families = pytest.mark.parametrize("family", FAMILIES)


def branch(shared, seed=2):
    return LONG[:shared] + prompt(PAGE, seed, 70)


@families
def test_a_branch_hits_the_milestone_above_it_on_the_device(family):
    with lab(family, PAGE, **SNAPSHOTS) as this:
        this.ask(LONG)
        for group in range(1, len(this.spec.groups)):
            needed = this.parts.cache.tiers.tree.internals.nodes.need[group] > 0
            evict(this.parts, Tier.DEVICE, group, keep=int(needed.sum()))
        for seed, (shared, hit) in enumerate(FAMILIES[family].items(), 2):
            assert this.ask(branch(shared, seed)).cached == on_device(this.spec, hit)


@families
def test_a_branch_hits_the_milestone_above_it_on_the_host(family):
    with lab(family, PAGE, **SNAPSHOTS) as this:
        this.ask(LONG)
        for seed, (shared, hit) in enumerate(FAMILIES[family].items(), 2):
            evict_device(this.parts)
            assert this.ask(branch(shared, seed)).cached == on_host(this.spec, hit)


@families
def test_a_branch_hits_the_milestone_above_it_in_storage(family):
    shelf = shelf_for(family, PAGE)
    with shelf_lab(family, PAGE, shelf, **SNAPSHOTS) as this:
        this.ask(LONG)
    for seed, (shared, hit) in enumerate(FAMILIES[family].items(), 2):
        with shelf_lab(family, PAGE, shelf, **SNAPSHOTS) as this:
            assert this.ask(branch(shared, seed)).cached == on_storage(this.spec, hit)
