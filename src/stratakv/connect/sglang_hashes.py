# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""SGLang's own page hashes of a prompt. Owns no hash of its own."""

from collections.abc import Sequence

from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

from stratakv.connect.why_miss import AskedPrompt


def block_hashes(prompt: AskedPrompt, hash_tokens: int, hash_name: str) -> Sequence[bytes]:
    """Of each whole page, as its back ends get them. ``hash_name``: SGLang has one."""
    del hash_name
    whole = list(prompt.tokens)[: len(prompt.tokens) // hash_tokens * hash_tokens]
    seed = storage_namespace_seed(prompt.extra_key, prompt.cache_salt)
    return [page.encode() for page in get_hash_str(whole, seed, page_size=hash_tokens)]
