"""Steps in thousands of SGLang's own scheduler, radix cache, cache controller and pools over the
back end, with retraction, aborts, eviction, restarts and damage: attention never reads a byte that
it would not compute. What SGLang lacks on a CPU is in ``sglang_cpu``.
"""

import json
import os

import pytest

from tests.connect.environment import HERE, ended, engine_process
from tests.connect.test_sglang import FAMILIES, SHAPE, TIERS, case
from tests.fixtures.models import changed_model
from tests.meta.source import ROOT

pytestmark = pytest.mark.connect

LIVES, STEPS = 6, 400
SMALL = {"max_total_tokens": 1024, "max_running_requests": 6, "chunked_prefill_size": 128}
EXTRA = {
    "backend_name": "strata", "module_path": "stratakv.connect.sglang",
    "class_name": "StrataStorage", "interface_v1": 1, "prefetch_threshold": 16,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_reads_what_would_be_computed(family, tmp_path):
    changes, _ = FAMILIES[family]
    changed_model(family, **SHAPE, **changes).save_pretrained(tmp_path / "model")
    engine = case(tmp_path / "model", None, [])["engine"] | TIERS | SMALL | {"hicache_ratio": 2.0}
    extra = EXTRA | {"storage": f"file://{tmp_path}/store?quota=8MiB"}
    given, answers = tmp_path / "case.json", tmp_path / "answers.json"
    given.write_text(
        json.dumps({"engine": engine, "extra": extra, "seed": 1, "lives": LIVES, "steps": STEPS})
    )
    paths = os.pathsep.join(map(str, [ROOT / "src", HERE, HERE / "sglang_cpu"]))
    ended(
        engine_process(
            "sglang_traffic.py", given, answers, PYTHONPATH=paths, TORCHDYNAMO_DISABLE="1"
        )
    )
    counts = json.loads(answers.read_text())
    assert counts["steps"] >= LIVES * STEPS
    # Everything that could go wrong has been tried.
    pools = {"kv", "swa"} if family == "laguna" else {"kv"}
    for event in (
        "retracted", "aborted", "cached_tokens",
        *(f"{pool} {event}" for pool in pools for event in ("stored", "loaded")), "kv damaged",
    ):  # fmt: skip
        assert counts.get(event, 0) >= 5, (event, counts)
    assert counts["checked_bytes"] > 1 << 28
