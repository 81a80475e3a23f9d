"""The L2 adapter in the released LMCache: its own bench stores, looks up, loads and compares."""

import json
import re

import pytest

from tests.connect.environment import ended, engine_process
from tests.unit.test_connect_vllm import checkpoint

pytestmark = pytest.mark.connect


def test_lmcaches_own_bench_finds_and_verifies_what_it_has_stored(tmp_path):
    adapter = {
        "type": "plugin", "module_path": "stratakv.connect.lmcache", "class_name": "StrataL2",
        "adapter_params": {
            "storage": f"file://{tmp_path}/store?quota=512MiB",
            "model": str(checkpoint(tmp_path / "model")),
            "engine": "none: the bench makes the bytes",
        },
    }  # fmt: skip
    output = ended(
        engine_process(
            "lmcache_bench.py", "--l2-adapter", json.dumps(adapter), "--num-keys", 32,
            "--in-flight", 2, "--rounds", 3, "--lookup-max-hit-rate", 0.5, "--no-skip-verify",
        )
    )  # fmt: skip
    assert "All 64 keys data verified OK" in output
    assert re.search(r"\[Store\] Round 4: .* success_keys=64/64", output)
    assert re.search(r"\[Load\] Round 4: .* loaded=64/64", output)
    assert re.search(r"Actual hit rate: +0\.[1-9]", output)
