"""Thousands of steps of vLLM's own scheduler, cache manager and connector over the tier, with
preemption, aborts, restarts and damage: attention never reads a byte that it would not compute. In
each release that is tested, the newest as its wheel for GPUs, of which no kernel runs here.
"""

import json
import os

import pytest

from tests.connect.environment import ENGINES, HERE, ended, engine_process
from tests.fixtures.models import changed_model
from tests.meta.source import ROOT

pytestmark = pytest.mark.connect

NEWEST = ENGINES / "newest"
"""Where ``make test-connect`` puts vLLM's newest wheel."""
PATHS = {"tested": [], "newest": [NEWEST]}
LIVES, STEPS = 4, 1000


def skip_without(release):
    if release == "newest" and not NEWEST.exists():
        pytest.skip("no newest vLLM: make test-connect installs it")


@pytest.mark.parametrize("release", PATHS)
def test_attention_reads_what_would_be_computed(release, tmp_path):
    skip_without(release)
    changed_model("llama").save_pretrained(tmp_path / "model")
    case, answers = tmp_path / "case.json", tmp_path / "answers.json"
    case.write_text(
        json.dumps(
            {
                "model": str(tmp_path / "model"), "seed": 1, "lives": LIVES, "steps": STEPS,
                "storage": f"file://{tmp_path}/store?quota=64MiB", "host_bytes": 400_000,
            }
        )
    )  # fmt: skip
    paths = os.pathsep.join(map(str, [*PATHS[release], ROOT / "src", HERE]))
    ended(engine_process("vllm_traffic.py", case, answers, PYTHONPATH=paths))
    counts = json.loads(answers.read_text())
    assert counts["steps"] >= LIVES * STEPS
    # Everything that could go wrong has been tried.
    for event in ("resumed", "aborted", "loaded", "stored", "damaged", "cached_tokens"):
        assert counts.get(event, 0) >= 5, (event, counts)
    assert counts["checked_bytes"] > 1 << 28
