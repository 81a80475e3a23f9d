# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
"""vLLM's own block hashes of a prompt without images or adapters. Owns no hash of its own."""

from collections.abc import Sequence

from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from stratakv.connect.why_miss import AskedPrompt
from stratakv.core.errors import ConfigError


def block_hashes(prompt: AskedPrompt, hash_tokens: int, hash_name: str) -> Sequence[bytes]:
    """Of each whole block."""
    if prompt.extra_key is not None:
        raise ConfigError("--why-miss extra_key: vLLM has none; allowed is cache_salt")
    hashing = get_hash_fn_by_name(hash_name)
    init_none_hash(hashing)
    request = Request(
        request_id="prompt",
        prompt_token_ids=list(prompt.tokens),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=prompt.cache_salt,
        block_hasher=get_request_block_hasher(hash_tokens, hashing),
    )
    return list(request.block_hashes)
