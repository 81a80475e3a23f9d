"""The L2 adapter in the released LMCache: its own bench stores, looks up, loads and compares, and
its L1 uses memory again while tasks on a slow store still run.
"""

import json
import os
import re

import pytest

from tests.connect.environment import HERE, ended, engine_process, faulty_package
from tests.meta.source import ROOT
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


def test_memory_that_lmcache_uses_again_is_neither_read_nor_written(tmp_path):
    """Seen to fail with an adapter that copied in the store's turn, and that filled whatever buffer
    it had been given."""
    paths = os.pathsep.join(map(str, (ROOT / "src", HERE, faulty_package(tmp_path))))
    store = f"{tmp_path}/store"
    output = ended(
        engine_process(
            "lmcache_memory.py", checkpoint(tmp_path / "model"), f"file://{store}?quota=64MiB",
            f"faulty://{store}?delay_s=3", PYTHONPATH=paths,
        )
    )  # fmt: skip
    assert "every chunk is what it was" in output
