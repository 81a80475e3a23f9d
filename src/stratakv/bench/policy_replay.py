"""One replay of a trace through one cache, in virtual time.

Owns the order of events: a request arrives, waits for a row and pages if it must, is prefilled at
once, holds its pages until its answer has been generated, and is released; and which tokens are
equal: a block's are all its own number, and an answer's are a number that nothing else has, so
there is no work per token beyond the cache's own hashing. Must not decide what is kept.

A trace names whole blocks only: it cannot say that the next turn of a conversation begins with the
partly filled block and the answer of the turn before. Where only one full block is ever seen to
follow a prompt's last full block, that block is taken to be the conversation going on, and the
partial block and the answer are its first tokens: pages smaller than a block can share those.
"""

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from stratakv.cache.kv_cache import KVCache
from stratakv.cache.prices import AdmissionRequest
from stratakv.cache.records import Admission, Refusal
from stratakv.core.choices import SNAPSHOT_TOKENS
from stratakv.core.ids import TokenIds
from stratakv.core.page_keys import Namespace, PageHasher
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
            for block, successor in pairwise(full):
                if self._next.setdefault(block, successor) != successor:
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
        while left > 0 and (successor := self._next.get(last, SEVERAL)) != SEVERAL:
            yield self._number[successor], BLOCK_TOKENS
            left -= BLOCK_TOKENS
            last = successor
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
        computed = max(request.input_length, request.total_tokens - 1)  # not the last output token
        ends = tokens[at][page - 1 : computed : page].tolist()
        keys = list(zip(ends, range(len(ends)), strict=True))
        limit = (request.input_length - 1) // page
        served += page * next((n for n, key in enumerate(keys[:limit]) if key not in seen), limit)
        seen.update(keys)
    return served


DECODE_TOK_S: Final = 50.0
"""Virtual speed of every answer."""


@dataclass(slots=True, kw_only=True)
class ReplayFigures:
    """Of one replay; tokens are prompt tokens, pages count every group."""

    prompt_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    refused_requests: int = 0
    evicted_device_pages: int = 0
    evicted_host_pages: int = 0
    backup_pages: int = 0
    snapshots: int = 0
    replay_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that were not computed, of all; those of refused requests count as
        computed."""
        return (self.device_tokens + self.host_tokens) / self.prompt_tokens


@dataclass(slots=True, eq=False)
class _Running:
    row: int
    tokens: TokenIds
    computed: int


class Replay:
    """``on_request``: called when a request of the trace has been begun."""

    def __init__(
        self, cache: KVCache, chunk_tokens: int, on_request: Callable[[], object] = lambda: None
    ) -> None:
        self._on_request = on_request
        self._cache = cache
        self._chunk_tokens = chunk_tokens
        self._page_tokens = cache.spec.page_tokens
        self._namespace = Namespace(model=b"bench policy", spec_digest=cache.spec.digest)
        self._running: list[tuple[float, int, _Running]] = []  # by the end of their answers
        self.figures = ReplayFigures()

    def run(self, requests: Sequence[TraceRequest], tokens: TraceTokens) -> ReplayFigures:
        """Play the whole trace; ``tokens`` are those of ``requests``."""
        begin_s = time.perf_counter()
        figures, now_s = self.figures, 0.0
        for at, request in enumerate(requests):
            self._on_request()
            now_s = max(now_s, request.timestamp_ms / 1000)
            while self._running and self._running[0][0] <= now_s:
                self._end_first()
            figures.prompt_tokens += request.input_length
            total = max(request.total_tokens, request.input_length + 1)
            if self._cache.admission.refusal(total) is not None:
                figures.refused_requests += 1
                continue
            ids = tokens[at]
            prefix = PageHasher(self._namespace, self._page_tokens)
            prefix.extend(ids[: request.input_length])
            asked = AdmissionRequest(prefix=prefix, tokens=request.input_length, total_tokens=total)
            admitted = self._cache.admission.admit(asked)
            while isinstance(admitted, Refusal):
                assert self._running, f"request {at} fits alone, and {admitted} keeps it out"
                now_s = self._end_first()
                admitted = self._cache.admission.admit(asked)
            self._start(at, request, ids, admitted, now_s)
        while self._running:
            self._end_first()
        counters = self._cache.tiers.pools.counters
        figures.evicted_device_pages = counters.evicted_device_pages
        figures.evicted_host_pages = counters.evicted_host_pages
        figures.backup_pages, figures.snapshots = counters.backup_pages, counters.snapshots
        figures.replay_s = time.perf_counter() - begin_s
        return figures

    def _start(
        self, at: int, request: TraceRequest, ids: TokenIds, admitted: Admission, now_s: float
    ) -> None:
        cached = admitted.cached
        self.figures.device_tokens += cached.device
        self.figures.host_tokens += cached.host
        one = _Running(admitted.row, ids, cached.total)
        self._cache.progress.settle()
        self._compute(one, request.input_length, self._chunk_tokens)
        end_s = now_s + request.output_length / DECODE_TOK_S
        heapq.heappush(self._running, (end_s, at, one))

    def _compute(self, one: _Running, end: int, step: int) -> None:
        """Tokens up to ``end`` go through the model, at most ``step`` at a time, and steps end at
        multiples of it: where states are kept."""
        cache, row = self._cache, np.array([one.row], np.int32)
        while one.computed < end:
            stop = min(end, (one.computed // step + 1) * step, cache.cut(one.row) or end)
            cache.extend(row, np.array([one.computed]), np.array([stop]))
            one.computed = stop
            cache.commit(one.row, one.tokens[:stop])
        cache.progress.settle()

    def _end_first(self) -> float:
        """The next answer ends; its last token has no KV. Returns when that is."""
        end_s, _, one = heapq.heappop(self._running)
        self._compute(one, len(one.tokens) - 1, min(self._chunk_tokens, SNAPSHOT_TOKENS))
        self._cache.release(one.row, one.tokens[: one.computed])
        self._cache.progress.settle()
        return end_s
