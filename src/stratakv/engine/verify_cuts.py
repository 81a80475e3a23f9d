"""Where a prompt is worth cutting: one token on either side of whatever an engine or a model could
decide by. Owns the list of such sizes; must not compute anything in them. Pure.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import first_key

SCAN_TOKENS: Final = 64
"""Of a chunk of Hugging Face's scans of a state, where the config does not say."""
SCAN_KEYS: Final = ("chunk_size", "mamba_chunk_size")
"""The config's names for it."""


def cut_sizes(spec: CacheSpec, config: Mapping[str, object], tokens: int) -> tuple[int, ...]:
    """Sizes of chunks, in tokens, that cut a prompt of ``tokens``: one and two, which some layers
    compute on other paths than several; and a page, a window, a chunk of chunked attention or of a
    state's scan, one token less and one more. ``config``: as for ``spec_of``."""
    whole = {spec.page_tokens, *_reaches(spec, tokens), *_scans(spec, config)}
    sizes = {1, 2, *(size + by for size in whole for by in (-1, 0, 1))}
    return tuple(sorted(size for size in sizes if 0 < size < tokens))


def _reaches(spec: CacheSpec, tokens: int) -> Iterator[int]:
    """How many tokens each group reads at most, where a prompt has more."""
    positions = np.arange(tokens, dtype=np.int64)
    for group in spec.groups:
        if not group.stateful:
            moved = np.flatnonzero(first_key(group.retention, positions))
            yield from moved[:1].tolist()


def _scans(spec: CacheSpec, config: Mapping[str, object]) -> Iterator[int]:
    if any(group.stateful for group in spec.groups):
        yield SCAN_TOKENS
        yield from (size for key in SCAN_KEYS if isinstance(size := config.get(key), int))
