"""Pages of the released SGLang's own host pools, of KV, latents, windows, states, index keys and
DeepSeek-V4's, come back from the back end byte by byte, in every layout.
"""

import json
import os

import pytest

from tests.connect.environment import HERE, ended, engine_process
from tests.connect.test_sglang import SHAPE, case
from tests.connect.test_sglang_traffic import EXTRA
from tests.fixtures.models import changed_model
from tests.meta.source import ROOT

pytestmark = pytest.mark.connect


def test_every_pool_gets_back_what_it_has_stored(tmp_path):
    changed_model("llama", **SHAPE).save_pretrained(tmp_path / "model")
    engine = case(tmp_path / "model", None, [])["engine"]
    extra = EXTRA | {"storage": f"file://{tmp_path}/store?quota=64MiB"}
    given, answers = tmp_path / "case.json", tmp_path / "answers.json"
    given.write_text(json.dumps({"engine": engine, "extra": extra}))
    paths = os.pathsep.join(map(str, [ROOT / "src", HERE, HERE / "sglang_cpu"]))
    environment = {"PYTHONPATH": paths, "TORCHDYNAMO_DISABLE": "1"}
    ended(engine_process("sglang_pools.py", given, answers, **environment))
    moved = json.loads(answers.read_text())
    assert {name.split()[0] for name in moved} == {
        "mha", "mla", "indexer", "mamba", "paged", "state", "hybrid", "v4",
    }  # fmt: skip
    assert all(moved.values())
