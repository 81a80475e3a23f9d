"""What a released engine's own classes look like, and where they are not what our adapters rely on.
Owns no judgement. Runs in the engines' environment, as ``contract.py ENGINE ANSWERS.json``.
"""

import dataclasses
import json
import sys
from importlib import import_module
from pathlib import Path

from stratakv.connect.contract import broken, demanded
from stratakv.connect.engines import ENGINES

RECORDS = {
    "vllm": {
        "vllm.v1.kv_offload.base": ("ReqContext",),
        "vllm.v1.kv_offload.tiering.base": ("TransferJob", "JobResult"),
    },
    "sglang": {
        "sglang.srt.mem_cache.hicache_storage": ("PoolTransfer", "PoolTransferResult"),
    },
}


def looks(name):
    """As it is recorded in ``contracts``."""
    engine = ENGINES[name]
    adapter = import_module(engine.adapter)
    return {
        "classes": {
            cls: dataclasses.asdict(demanded(vars(adapter)[cls])) for cls in engine.classes
        },
        "records": {
            record: [
                field.name for field in dataclasses.fields(vars(import_module(module))[record])
            ]
            for module, records in RECORDS[name].items()
            for record in records
        },
    }


if __name__ == "__main__":
    found = {"looks": looks(sys.argv[1]), "broken": broken(ENGINES[sys.argv[1]])}
    Path(sys.argv[2]).write_text(json.dumps(found, indent=1))
