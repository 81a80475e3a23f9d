# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""SGLang's own page hashes of a prompt without salt. Owns no hash of its own."""

from collections.abc import Sequence

from sglang.srt.mem_cache.utils import get_hash_str


def block_hashes(tokens: Sequence[int], hash_tokens: int, hash_name: str) -> Sequence[bytes]:
    """Of each whole page, as its back ends get them. ``hash_name``: SGLang has one."""
    del hash_name
    whole = list(tokens)[: len(tokens) // hash_tokens * hash_tokens]
    return [page.encode() for page in get_hash_str(whole, page_size=hash_tokens)]
