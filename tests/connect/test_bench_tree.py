"""``bench tree`` beside SGLang's released core, in that engine's environment."""

import pytest

from stratakv.bench import tree
from stratakv.bench.tree_traffic import FULL_SIZE, TrafficSize
from tests.connect.environment import ENGINES, HERE

pytestmark = pytest.mark.connect

SMALL = TrafficSize(conversations=3, leaves=FULL_SIZE.leaves[:1], evictions=5, long=5120)


def test_sglangs_core_does_the_same_operations_in_the_same_run(capsys):
    python = ENGINES / "bin" / "python"
    if not python.exists():
        pytest.skip("no environment of the engines: make test-connect makes it")
    report = tree.run(str(python), HERE, SMALL)
    assert "SGLang, in this run" in capsys.readouterr().out
    for ours, theirs in report["side_by_side"]:
        assert ours.keys() == theirs.keys()
        assert min(*ours.values(), *theirs.values()) > 0
    for case in report["cases"]:
        assert not case["sglang_recorded"]
        assert case["sglang"].keys() == case["us"].keys()
