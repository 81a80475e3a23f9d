"""``bench tree``: every row of every case, beside the sketch and what was recorded."""

import math
import sys

import pytest

from stratakv.bench import tree
from stratakv.bench.tree_traffic import CASES, FULL_SIZE, TrafficSize
from stratakv.core.errors import ConfigError

SMALL = TrafficSize(conversations=3, leaves=FULL_SIZE.leaves[:1], evictions=5, long=5120)
NOT_SMALL = {f"evict_one_of_{count}" for count in FULL_SIZE.leaves[1:]}


def test_every_row_of_every_case_is_measured_and_has_a_yardstick(capsys):
    report = tree.run(size=SMALL)
    cases = report["cases"]
    assert [(case["page"], case["window"]) for case in cases] == list(CASES)
    for case in cases:
        assert case["us"].keys() == tree.ROWS.keys() - NOT_SMALL | {"long_lease_release"}
        assert case["sglang_recorded"]
        assert case["sglang"].keys() == tree.ROWS.keys()
        assert min(case["us"].values()) > 0
        # The sketch collects pages as it matches: it has no lock without them.
        assert case["sketch"].keys() == case["us"].keys() - {"lock_unlock", "long_lock_unlock"}
    assert all(math.isfinite(exponent) for exponent in report["exponents"].values())
    assert "SGLang 0.5.23, recorded" in capsys.readouterr().out


def test_every_ratio_that_was_recorded_has_a_row_and_a_case():
    assert tree.RECORDED.keys() == tree.ROWS.keys()
    assert all(len(by_case) == len(CASES) for by_case in tree.RECORDED.values())


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("/nowhere/python", "allowed is a Python that has SGLang"),
        (sys.executable, "No module named"),
    ],
)
def test_a_python_without_sglang_is_refused_with_its_words(python, words):
    with pytest.raises(ConfigError, match=f"--python .*(?s:.*){words}"):
        tree.run(python, size=SMALL)
