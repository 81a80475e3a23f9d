"""One replay of a trace through one cache, in virtual time.

Owns the order of events: a request arrives, waits for a row and pages if it must, is prefilled at
once, holds its pages until its answer has been said, and is released. Must not decide what is kept.
"""

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stratakv.bench.policy_tokens import TraceTokens
from stratakv.cache.admit import AdmissionRequest
from stratakv.cache.kv_cache import KVCache
from stratakv.cache.records import Admission, Refusal
from stratakv.core.config import SNAPSHOT_TOKENS
from stratakv.core.ids import TokenIds
from stratakv.core.page_keys import Namespace, PageHasher
from stratakv.sim.trace import TraceRequest

DECODE_TOK_S: Final = 50.0
"""Virtual speed of every answer."""


@dataclass(slots=True, kw_only=True)
class Figures:
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
        self.figures = Figures()

    def run(self, requests: Sequence[TraceRequest], tokens: TraceTokens) -> Figures:
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
            if self._cache.refusal(total) is not None:
                figures.refused_requests += 1
                continue
            said = tokens[at]
            prefix = PageHasher(self._namespace, self._page_tokens)
            prefix.extend(said[: request.input_length])
            asked = AdmissionRequest(prefix=prefix, tokens=request.input_length, total_tokens=total)
            admitted = self._cache.admit(asked)
            while isinstance(admitted, Refusal):
                assert self._running, f"request {at} fits alone, and {admitted} keeps it out"
                now_s = self._end_first()
                admitted = self._cache.admit(asked)
            self._start(at, request, said, admitted, now_s)
        while self._running:
            self._end_first()
        counters = self._cache.counters
        figures.evicted_device_pages = counters.evicted_device_pages
        figures.evicted_host_pages = counters.evicted_host_pages
        figures.backup_pages, figures.snapshots = counters.backup_pages, counters.snapshots
        figures.replay_s = time.perf_counter() - begin_s
        return figures

    def _start(
        self, at: int, request: TraceRequest, said: TokenIds, admitted: Admission, now_s: float
    ) -> None:
        cached = admitted.cached
        self.figures.device_tokens += cached.device
        self.figures.host_tokens += cached.host
        one = _Running(admitted.row, said, cached.total)
        self._cache.settle()
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
        cache.settle()

    def _end_first(self) -> float:
        """The next answer ends; its last token has no KV. Returns when that is."""
        end_s, _, one = heapq.heappop(self._running)
        self._compute(one, len(one.tokens) - 1, min(self._chunk_tokens, SNAPSHOT_TOKENS))
        self._cache.release(one.row, one.tokens[: one.computed])
        self._cache.settle()
        return end_s
