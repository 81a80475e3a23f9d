"""Which name is meant by one that is none: one of ours that is written alike, or what vLLM and
SGLang call the same.

Owns their names. Must not know where a name was written: a flag, a file or the environment.
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Final

LIKE: Final = 0.75
"""How alike a name that is none must be to one that is, of 1, to be taken for it."""
FAMILIAR: Final[Mapping[str, str]] = {
    "attn-tp-size": "tp",
    "block-size": "page-tokens",
    "chunked-prefill-size": "chunk-tokens",
    "context-length": "max-model-len",
    "cors-origins": "allowed-origins",
    "disable-radix-cache": "cache",
    "disaggregation-bootstrap-port": "bootstrap-port",
    "disaggregation-mode": "role",
    "disaggregation-transfer-backend": "transport",
    "enable-lora": "lora",
    "enable-prefix-caching": "cache",
    "file-storage-path": "storage",
    "gpu-memory-utilization": "device-memory",
    "hicache-ratio": "host-ratio",
    "hicache-size": "host-memory",
    "hicache-storage-backend": "storage",
    "hicache-storage-prefetch-policy": "prefetch-policy",
    "hicache-write-policy": "write-policy",
    "kv-events-config": "kv-events",
    "kv-offloading-size": "host-memory",
    "kv-transfer-config": "storage",
    "long-prefill-token-threshold": "chunk-tokens",
    "lora-modules": "lora",
    "lora-paths": "lora",
    "max-num-batched-tokens": "step-tokens",
    "max-num-seqs": "max-running",
    "max-prefill-tokens": "step-tokens",
    "max-queued-requests": "max-waiting",
    "max-running-requests": "max-running",
    "mem-fraction-static": "device-memory",
    "model-path": "model",
    "no-enable-prefix-caching": "cache",
    "page-size": "page-tokens",
    "radix-eviction-policy": "eviction",
    "swap-space": "host-memory",
    "tensor-parallel-size": "tp",
    "tp-size": "tp",
    "uvicorn-log-level": "log-level",
}
"""A name of vLLM's or SGLang's, and ours for what it sets: values may differ."""


def meant(name: str, known: Collection[str]) -> str | None:
    """Of ``known`` keys, with dashes, the one that ``name`` may stand for."""
    key = name.lstrip("-").replace("_", "-").lower()
    if (ours := FAMILIAR.get(key)) in known:
        return ours
    like = difflib.get_close_matches(key, known, 1, LIKE)
    return like[0] if like else None
