"""What the released engines' own classes look like, where our adapters and their stand-ins rely on
it. Owns no judgement. Runs in the engines' environment, as ``contract.py ENGINE ANSWERS.json``.
"""

import dataclasses
import inspect
import json
import sys
from importlib import import_module
from pathlib import Path

from stratakv.connect.engines import ENGINES

CLASSES = {"vllm": ("StrataTier", "StrataConnector"), "sglang": ("StrataStorage",)}
RECORDS = {
    "vllm": {
        "vllm.v1.kv_offload.base": ("ReqContext",),
        "vllm.v1.kv_offload.tiering.base": ("TransferJob", "JobResult"),
    },
    "sglang": {
        "sglang.srt.mem_cache.hicache_storage": ("PoolTransfer", "PoolTransferResult"),
    },
}


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def overridden(cls):
    """Methods that have a namesake in the engine's class: both lists of parameters."""
    found = {}
    for name, made in vars(cls).items():
        inherited = [vars(base)[name] for base in cls.__mro__[1:-1] if name in vars(base)]
        if inspect.isfunction(made) and inherited and not name.startswith("__"):
            found[name] = [parameters(made), parameters(inherited[0])]
    return found


def looks(engine):
    adapter = import_module(ENGINES[engine].adapter)
    classes = {}
    for name in CLASSES[engine]:
        cls = getattr(adapter, name)
        classes[name] = {
            "abstract": sorted(cls.__abstractmethods__),
            "overridden": overridden(cls),
        }
    records = {
        name: [field.name for field in dataclasses.fields(getattr(import_module(module), name))]
        for module, names in RECORDS[engine].items()
        for name in names
    }
    return {"classes": classes, "records": records}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(looks(sys.argv[1])))
