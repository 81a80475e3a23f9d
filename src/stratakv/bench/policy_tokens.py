"""Token ids that say again what a trace says about shared prefixes.

Owns which tokens are equal. A block's tokens are all its own number, and an answer's are a number
that nothing else has, so there is no work per token beyond the cache's own hashing.

A trace names whole blocks only: it cannot say that the next turn of a conversation begins with the
partly filled block and the answer of the turn before. Where only one full block is ever seen to
follow a prompt's last full block, that block is taken to be the conversation going on, and the
partial block and the answer are its first tokens: pages smaller than a block can share those.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from stratakv.core.ids import TokenIds
from stratakv.sim.trace import BLOCK_TOKENS, TraceRequest

SEVERAL: Final = -1


class TraceTokens:
    """``[at]`` are the tokens of request ``at``, prompt and answer: int32 [total_tokens]."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self._requests = requests
        self._number: dict[int, int] = {}  # by hash id: the token its block is made of
        self._next: dict[int, int] = {}  # by hash id: the full block that follows, or SEVERAL
        for request in requests:
            for block in request.hash_ids:
                self._number.setdefault(block, len(self._number))
            full = request.full_blocks
            for block, follower in pairwise(full):
                if self._next.setdefault(block, follower) != follower:
                    self._next[block] = SEVERAL

    def __getitem__(self, at: int) -> TokenIds:
        request = self._requests[at]
        spans = list(self._spans(at))
        numbers = np.array([number for number, _ in spans], np.int32)
        tokens = np.repeat(numbers, [count for _, count in spans])
        return tokens[: request.total_tokens]

    def _spans(self, at: int) -> Iterator[tuple[int, int]]:
        """Numbers and how often each comes; the last one may come too often."""
        request = self._requests[at]
        full = request.full_blocks
        for block in full:
            yield self._number[block], BLOCK_TOKENS
        left = request.total_tokens - len(full) * BLOCK_TOKENS
        last = full[-1] if full else SEVERAL
        while left > 0 and (follower := self._next.get(last, SEVERAL)) != SEVERAL:
            yield self._number[follower], BLOCK_TOKENS
            left -= BLOCK_TOKENS
            last = follower
        partial = left - request.output_length
        if partial > 0:
            yield self._number[request.hash_ids[-1]], partial
            left -= partial
        if left > 0:
            yield -1 - at, left


def unlimited_tokens(tokens: TraceTokens, requests: Sequence[TraceRequest], page: int) -> int:
    """Prompt tokens that a cache which never forgets would serve from whole pages, one token always
    being computed. Ends of pages are enough: equal numbers at equal places have equal prefixes."""
    seen: set[tuple[int, int]] = set()
    served = 0
    for at, request in enumerate(requests):
        computed = max(request.input_length, request.total_tokens - 1)  # not the last token said
        ends = tokens[at][page - 1 : computed : page].tolist()
        keys = list(zip(ends, range(len(ends)), strict=True))
        limit = (request.input_length - 1) // page
        served += page * next((n for n, key in enumerate(keys[:limit]) if key not in seen), limit)
        seen.update(keys)
    return served
