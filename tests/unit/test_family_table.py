"""docs/families.md says what is true now: all types of the installed transformers are in it, each
with the groups and the refusal of today. That "exact" holds is proven family by family in
``test_hit_equals_recompute_families``."""

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from scripts.families_not_served import NOT_SERVED
from scripts.family_table import DOCUMENT, document, exact, known, main, refused
from stratakv.spec.families import COMPOSITES, NOT_PROVEN
from tests.integration import test_hit_equals_recompute_families as proof


def test_the_page_is_what_the_generator_writes():
    results = [(f, "exact" if (r := refused(f)) is None else f"refused: {r}") for f in known()]
    assert DOCUMENT.read_text(encoding="utf-8") == document(results), "make it anew"


def test_each_family_that_is_called_exact_is_proven():
    assert {family for family, _ in proof.CASES} >= set(exact())


def test_every_causal_lm_of_transformers_is_accounted_for():
    accounted = {*known(), *COMPOSITES, *NOT_SERVED}
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - accounted == set()
    assert len(accounted) == len(known()) + len(COMPOSITES) + len(NOT_SERVED), "in one table each"


def test_a_composite_that_is_not_proven_says_so_in_both_places():
    assert {*NOT_PROVEN} <= {*NOT_SERVED}


@pytest.mark.long
def test_the_page_can_be_made_anew(monkeypatch, tmp_path):
    monkeypatch.setattr("scripts.family_table.DOCUMENT", tmp_path / "families.md")
    main()
    assert (tmp_path / "families.md").read_text(encoding="utf-8") == DOCUMENT.read_text(
        encoding="utf-8"
    )
