"""Campaigns of the tree machine: many walks, the same every time or by chance.

Owns how Hypothesis is run. Must not know what a walk does.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import ClassVar
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.internal.conjecture import providers
from hypothesis.stateful import run_state_machine_as_test

from stratakv.testing.tree_machine import STEPS, TreeMachine
from stratakv.testing.tree_storing_machine import StoringMachine
from stratakv.tree.residency import Residency, ResidencyEvent


def campaign(
    number: int | None,
    walks: int,
    *,
    policy: str = "lru",
    steps: int = STEPS,
    shrink: bool = True,
    machine: type[TreeMachine] = StoringMachine,
) -> type[TreeMachine]:
    """Run ``walks`` random walks and return the machine with what they covered.

    ``number`` seeds the walks, so that a campaign is the same every time; None: by chance.
    Raises whatever the first failing walk raised, minimised if ``shrink``.
    """

    class Campaign(machine):
        """A machine with counters of its own."""

        did: ClassVar[Counter[str]] = Counter()
        stepped: ClassVar[Counter[tuple[Residency, ResidencyEvent]]] = Counter()

    Campaign.policy = policy
    profile = settings(
        max_examples=walks,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        verbosity=Verbosity.normal if shrink else Verbosity.quiet,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
    )
    seeded = Campaign if number is None else seed(number)(Campaign)
    with _whatever_is_imported():
        run_state_machine_as_test(seeded, settings=profile)
    return Campaign


@contextmanager
def _whatever_is_imported() -> Generator[None]:
    """Hypothesis also draws the constants that it finds in the modules that happen to be imported:
    without them a number means the same walks in every test run."""
    with patch.object(providers, "_get_local_constants", providers.Constants):
        providers.CONSTANTS_CACHE.cache.clear()
        yield
    providers.CONSTANTS_CACHE.cache.clear()
