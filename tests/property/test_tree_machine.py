"""The tree against the perfect model: 500 walks, the same every time; in `make test-long` 1,500
more, and 20,000 by chance.

Under LRU the model predicts who leaves. Under any other policy it says who may, and that what no
checkpoint needs goes first; evictions that take saved pages first are among those walks too.
"""

from collections import Counter

import pytest

from stratakv.core.choices import EVICTIONS
from stratakv.testing.tree_campaign import campaign
from stratakv.testing.tree_machine import TreeMachine
from stratakv.testing.tree_spilling_machine import SpillingMachine
from stratakv.tree.residency import Residency, ResidencyEvent

R, E = Residency, ResidencyEvent
WALKS = 500
SPILLED_WALKS = 150
DESIGN = {
    (R.ABSENT, E.INSERTED), (R.ABSENT, E.FETCHED), (R.DEVICE, E.FETCHED),
    (R.DEVICE, E.BACKUP_BEGUN), (R.DEVICE, E.DEVICE_EVICTED), (R.SAVING, E.BACKUP_DONE),
    (R.SAVING, E.BACKUP_FAILED), (R.BOTH, E.DEVICE_EVICTED), (R.BOTH, E.HOST_EVICTED),
    (R.HOST, E.INSERTED), (R.HOST, E.LOAD_BEGUN), (R.HOST, E.HOST_EVICTED),
    (R.LOADING, E.LOAD_DONE),
}  # fmt: skip
"""The transitions of the design's table, but for what a foreign engine saves: its pages never have
a place on the device."""


def real_work(machine: type[TreeMachine]) -> None:
    """A campaign that covered nothing would prove nothing."""
    assert set(machine.stepped) == DESIGN
    did: Counter[str] = machine.did
    for often in ("device hit", "extend", "backup done", "evict DEVICE anchor"):
        assert did[f"walks with {often}"] > 0.4 * did["walks"], often
    for seldom in (
        "load", "fetch landed", "evict DEVICE other", "evict HOST anchor", "extend without state",
        "late snapshot", "rolling checkpoint", "resumed", "stored", "prefetch landed", "touched",
    ):  # fmt: skip
        assert did[f"walks with {seldom}"] > 0.02 * did["walks"], seldom
    for ever in (
        "load declined", "backup failed", "backup dropped", "extend short", "duplicate",
        "resume short", "retracted unsaved", "hold lost", "store failed", "hold short",
        "prefetch abandoned", "squeezed", "apart",
    ):  # fmt: skip
        assert did[ever], ever
    assert did["prefetch cut"] or did["walks"] < 2000, "prefetch cut"


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(number, marks=pytest.mark.long) for number in (1, 2, 3))]
)
def test_tree_agrees_with_the_perfect_model(number: int) -> None:
    real_work(campaign(number, WALKS))


@pytest.mark.parametrize("policy", [policy for policy in EVICTIONS if policy != "lru"])
def test_every_policy_keeps_the_trees_rules(policy: str) -> None:
    campaign(1, WALKS // 10, policy=policy)


@pytest.mark.long
@pytest.mark.parametrize("policy", [policy for policy in EVICTIONS if policy != "lru"])
def test_every_policy_keeps_the_trees_rules_in_5000_walks(policy: str) -> None:
    real_work(campaign(None, 5000, policy=policy))


@pytest.mark.long
@pytest.mark.parametrize("tenth", range(10))
def test_tree_agrees_with_the_perfect_model_in_20000_walks(tenth: int) -> None:
    del tenth  # each is seeded by chance
    real_work(campaign(None, 2000))


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(number, marks=pytest.mark.long) for number in range(1, 9))]
)
def test_spilled_leases_agree_with_the_perfect_model(number: int) -> None:
    """With groups at home on the host: what is pinned where, what is read there, who would leave
    the device."""
    machine = campaign(number, SPILLED_WALKS, machine=SpillingMachine)
    for ever in ("spilled", "settled", "received", "read on the host at once", "retracted", "load"):
        assert machine.did[ever], ever
