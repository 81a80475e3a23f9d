"""Plays a workload on an engine, without HTTP, and times what a client would see.

Owns the loop and the clockwork of one play. Must not know what is compared with what.
"""

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from stratakv.bench.rig import greedy
from stratakv.bench.workload import TimedPrompt, Workload
from stratakv.core.ids import RequestId
from stratakv.engine.loop import Engine
from stratakv.engine.request import Output

NAP_S: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayFigures:
    """Of one play. ``*_tok_s`` count from the first arrival to the last token; prompt tokens count
    whether cached or computed. Time to first token (``ttft``) counts from the arrival, so waiting
    for admission is part of it; ``itl`` is the time between two tokens of one answer."""

    output_tok_s: float
    prompt_tok_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    cached_device_tokens: int
    cached_host_tokens: int


@dataclass(slots=True, eq=False)
class _Live:
    ask: TimedPrompt
    answer: list[int] = field(default_factory=list[int])
    last_s: float = 0.0


def play(engine: Engine, workload: Workload) -> PlayFigures:
    """Serve the whole workload; a request is submitted when its time has come."""
    before = engine.stats()
    coming = [(ask.at_s, at, ask) for at, ask in enumerate(workload.opening())]
    heapq.heapify(coming)
    count = len(coming)
    live: dict[RequestId, _Live] = {}
    first_s: list[float] = []
    gaps_s: list[float] = []
    begin_s = time.perf_counter()
    now_s = 0.0
    while coming or live:
        while coming and coming[0][0] <= now_s:
            ask = heapq.heappop(coming)[2]
            live[ask.id] = _Live(ask)
            engine.submit(greedy(ask.id, ask.tokens, ask.new_tokens))
        outputs = engine.step()
        now_s = time.perf_counter() - begin_s
        for ended in _note(outputs, live, now_s, (first_s, gaps_s)):
            answer = np.array(ended.answer, np.int32)
            more = workload.next_turn(ended.ask, answer, now_s)
            if more is not None:
                heapq.heappush(coming, (more.at_s, count, more))
                count += 1
        if coming and not live:
            time.sleep(min(NAP_S, max(0.0, coming[0][0] - now_s)))
            now_s = time.perf_counter() - begin_s
    after = engine.stats()
    return PlayFigures(
        output_tok_s=(after.output_tokens - before.output_tokens) / now_s,
        prompt_tok_s=(after.prompt_tokens - before.prompt_tokens) / now_s,
        ttft_ms_p50=_percentile_ms(first_s, 50),
        ttft_ms_p99=_percentile_ms(first_s, 99),
        itl_ms_p50=_percentile_ms(gaps_s, 50),
        itl_ms_p99=_percentile_ms(gaps_s, 99),
        cached_device_tokens=after.cached_device_tokens - before.cached_device_tokens,
        cached_host_tokens=after.cached_host_tokens - before.cached_host_tokens,
    )


def _note(
    outputs: Sequence[Output],
    live: dict[RequestId, _Live],
    now_s: float,
    times: tuple[list[float], list[float]],
) -> list[_Live]:
    """Record a step's tokens; returns the requests that have ended."""
    first_s, gaps_s = times
    ended: list[_Live] = []
    for output in outputs:
        one = live[output.request]
        assert output.token is not None, f"{output.request} was aborted"
        if one.answer:
            gaps_s.append(now_s - one.last_s)
        else:
            first_s.append(now_s - one.ask.at_s)
        one.answer.append(output.token)
        one.last_s = now_s
        if output.finish is not None:
            ended.append(live.pop(output.request))
    return ended


def _percentile_ms(times_s: Sequence[float], percent: int) -> float:
    """0.0 where nothing was timed: answers of one token have no gaps."""
    return float(np.percentile(times_s, percent)) * 1000 if times_s else 0.0
