"""Walks of a prefetch beside its model, cut short: what ``make mutants`` runs in place of more."""

import random

import pytest

from tests.prefetch_model import Walk


@pytest.mark.parametrize("tenth", range(10))
def test_a_prefetch_decides_as_the_model_does(tenth: int) -> None:
    for seed in range(20):
        Walk(random.Random(100 * tenth + seed)).run()
