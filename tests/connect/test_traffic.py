"""Thousands of steps of vLLM's own scheduler, cache manager and connector over the tier, with
preemption, aborts, restarts and damage: attention never reads a byte that it would not compute. In
each release that is tested, the newest as its wheel for GPUs, of which no kernel runs here.
"""

import json
import os

import pytest

from tests.connect.environment import (
    ENGINES,
    HERE,
    ended,
    engine_process,
    faulty_package,
    misbehaving,
)
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


def traffic(release, directory, stores, lives, steps):
    """What it has counted. ``stores``: settings of the tier, for lives in turns."""
    skip_without(release)
    changed_model("llama").save_pretrained(directory / "model")
    case, answers = directory / "case.json", directory / "answers.json"
    case.write_text(
        json.dumps(
            {
                "model": str(directory / "model"), "seed": 1, "lives": lives, "steps": steps,
                "stores": stores, "host_bytes": 400_000,
            }
        )
    )  # fmt: skip
    paths = [*PATHS[release], ROOT / "src", HERE, faulty_package(directory)]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    ended(engine_process("vllm_traffic.py", case, answers, **environment))
    counts = json.loads(answers.read_text())
    assert counts["steps"] >= lives * steps
    return counts


def assert_seen(counts, *events):
    """Everything that could go wrong has been tried."""
    for event in events:
        assert counts.get(event, 0) >= 5, (event, counts)


@pytest.mark.parametrize("release", PATHS)
def test_attention_reads_what_would_be_computed(release, tmp_path):
    store = {"storage": f"file://{tmp_path}/store?quota=64MiB"}
    counts = traffic(release, tmp_path, [store], LIVES, STEPS)
    assert_seen(counts, "resumed", "aborted", "loaded", "stored", "damaged", "cached_tokens")
    assert counts["checked_bytes"] > 1 << 28


@pytest.mark.parametrize("release", PATHS)
def test_a_store_that_lies_fails_hangs_or_is_full_costs_hits_and_nothing_else(release, tmp_path):
    urls = misbehaving(tmp_path / "store")
    stores = [{"storage": url} for url in urls.values()] + [
        {"storage": urls["slow"], "timeout_s": 0.01}
    ]
    hanging = next(store for store in stores if store["storage"] == urls["hanging"])
    hanging["timeout_s"] = 0.05  # what comes back comes much later
    counts = traffic(release, tmp_path, stores, len(stores), 300)
    assert_seen(
        counts, "stored", "loaded", "missing", "damaged", "unread", "unwritten", "refused", "late"
    )
