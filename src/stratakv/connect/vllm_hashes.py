# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""vLLM's own block hashes of a prompt without salt, images or adapters. Owns no hash of its own."""

from collections.abc import Sequence

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash


def block_hashes(tokens: Sequence[int], hash_tokens: int, hash_name: str) -> Sequence[bytes]:
    """Of each whole block."""
    hashing = get_hash_fn_by_name(hash_name)
    init_none_hash(hashing)
    found: list[bytes] = []
    for end in range(hash_tokens, len(tokens) + 1, hash_tokens):
        parent = found[-1] if found else None
        found.append(hash_block_tokens(hashing, parent, tuple(tokens[end - hash_tokens : end])))
    return found
