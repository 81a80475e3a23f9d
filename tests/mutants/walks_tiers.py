"""Walks of the tiers beside books of their own, cut short: what ``make mutants`` looks at first for
``tiers/`` and ``tiers/prefetch/``.
"""

import logging

import pytest

from tests.property.test_tier_machine import SPECS, walk


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="stratakv")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_pages_are_what_they_say_on_every_tier(spec, seed):
    walk(spec, seed, 30)
