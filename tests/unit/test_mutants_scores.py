"""``make mutants`` calls no target met while a mutant has not been run, and says what it needs."""

import sys
from collections import Counter
from importlib import import_module

import pytest

from scripts.mutants.scores import TARGETS, verdict


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"killed": 95, "survived": 5}, "95.0%: 95% met"),
        ({"killed": 94, "hung": 1, "survived": 5}, "95.0%: 95% met"),
        ({"killed": 94, "survived": 6}, "94.0%: 95% not met"),
        ({"killed": 100, "not run": 1}, "100.0% of those run, 1 not run: 95% not met"),
        ({"not run": 3406}, "0.0% of those run, 3,406 not run: 95% not met"),
    ],
)
def test_no_target_is_met_while_a_mutant_has_not_been_run(counts, expected):
    assert verdict("tree", Counter(counts)) == expected


def test_cache_and_the_file_store_have_a_lower_target():
    assert verdict("cache", Counter(killed=85, survived=15)) == "85.0%: 85% met"
    assert TARGETS["storage/file"] == 0.85


def test_who_lacks_the_mutation_tester_is_shown_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "libcst", None)
    monkeypatch.delitem(sys.modules, "scripts.mutants.mutations", raising=False)
    with pytest.raises(SystemExit, match=r"libcst.*`make mutants` or `pip install -e"):
        import_module("scripts.mutants.mutations")
