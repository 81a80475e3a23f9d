"""``stratakv bench disagg``: what it costs and brings to compute prompts elsewhere.

Owns four measurements. How many requests a decode engine admits that takes pages by group, beside
one that takes them for whole prompts in every group, each with the split of the same bytes that is
best for it. What one such decision takes. And bytes: pages of one side handed over to the other's,
beside the transport's library alone, lap by lap (``hand_offs``). And what decoding gains under long
prompts (``token_gaps``), by servers of their own. Needs the library alone for the others; a
transport that is not installed is left out.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Final

from stratakv.bench import token_gaps
from stratakv.bench.hand_offs import HandOffLoad, HandOffs
from stratakv.bench.rig import Laps, in_turn
from stratakv.bench.transports import TRANSPORTS
from stratakv.core.errors import ConfigError, TransportError
from stratakv.policy.admission import PageBudget, demand
from stratakv.policy.preallocation import Admitted, admitted
from stratakv.spec.budget import ExpectedLoad, device_bytes, device_pages
from stratakv.spec.derive import spec_of
from stratakv.spec.groups import CacheSpec

POOL_BYTES: Final = 16 << 30
RUNNING: Final = 64
CHAT_TOKENS: Final = 8192
PROMPTS: Final = tuple(1024 << n for n in range(8))
RESERVE_TOKENS: Final = 512
PAGE_TOKENS: Final = 256
LAYERS: Final = 24
LONG_PROMPT: Final = 4096
SHORT_PROMPT: Final = 512
LAP_BYTES: Final = 600 << 20
"""Of the requests of one lap, of pages anywhere in the pools: five long prompts, 25 short ones."""
UNDER_WAY: Final = 4
"""Requests that are posted and not written."""
LAPS: Final = 16
DECISIONS: Final = 2000
_LIBRARY, _HAND_OFF = "library", "hand-off"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffThroughput:
    """Medians. ``ratio``: of the seconds of the transport's library alone to the hand-off's, of the
    same ranges in neighbouring laps of requests of ``LONG_PROMPT`` tokens, ``short_ratio`` of
    ``SHORT_PROMPT``; ``processor_ratio``: of long prompts, of the processor's seconds that the
    process took which sends, which others on the same cores do not change. ``gb_s``: of the
    hand-off of long prompts, 10^9 bytes. ``alone_*``: of one short
    request while there is no other, until its proof is there, and its bytes by the library."""

    name: str
    ratio: float
    short_ratio: float
    processor_ratio: float
    gb_s: float
    alone_ms: float
    alone_library_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedHere:
    """Requests of ``prompt`` tokens that the same bytes admit, each way with the split between
    groups that is for this length; ``per_group_fixed_split``: with the one for ``CHAT_TOKENS``."""

    prompt: int
    per_group: int
    whole_prompt: int
    per_group_fixed_split: int


def gpt_oss_spec(layers: int, page_tokens: int = PAGE_TOKENS) -> CacheSpec:
    """From the published sizes: every other layer sees 128 tokens."""
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": layers,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "sliding_window": 128,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_size": 2880,
    }
    return spec_of(config, page_tokens=page_tokens, dtype="bfloat16")


def run() -> dict[str, object]:
    """Measure, and print tables; the servers take a few minutes."""
    table, pages = admissions(gpt_oss_spec(LAYERS))
    decision_us = admit_us(gpt_oss_spec(LAYERS), pages)
    print(f"gpt-oss-20b, windows of 128, pages of {PAGE_TOKENS}, {POOL_BYTES >> 30} GiB:")
    print(f"prompt   admitted by group   by whole prompts   by group, split for {CHAT_TOKENS:,}")
    for row in table:
        fixed = row.per_group_fixed_split
        print(f"{row.prompt:7,} {row.per_group:18,} {row.whole_prompt:18,} {fixed:26,}")
    print(f"one decision: {decision_us:.1f} us")
    found = [each for name in TRANSPORTS if (each := throughput(name)) is not None]
    for each in found:
        print(
            f"{each.name:20} {each.gb_s:6.2f} GB/s, {each.ratio:.2f} of its library alone (by the "
            f"processor's seconds {each.processor_ratio:.2f}); prompts of {SHORT_PROMPT} tokens "
            f"{each.short_ratio:.2f}, one of them alone {each.alone_ms:.2f} ms, by the library "
            f"{each.alone_library_ms:.2f}"
        )
    gaps = token_gaps.run()
    if gaps is not None:
        print(gaps.text())
    return {
        "admit_us": decision_us,
        "admitted": [asdict(row) for row in table],
        "transport": [asdict(each) for each in found],
        "itl_p99_ratio": None if gaps is None else gaps.ratio,
        "itl": None if gaps is None else asdict(gaps),
    }


def admissions(spec: CacheSpec) -> tuple[list[AdmittedHere], Sequence[int]]:
    """The table, and the pool of servers of ``CHAT_TOKENS``. For whole prompts the even split is
    the best at every length; by group another one fits each, and so each has its own."""
    even = (POOL_BYTES // sum(group.page_bytes for group in spec.groups),) * len(spec.groups)
    assert device_bytes(spec, even) <= POOL_BYTES
    fixed = _split(spec, CHAT_TOKENS)
    return [
        AdmittedHere(
            prompt=prompt,
            per_group=_admitted(spec, _split(spec, prompt + RESERVE_TOKENS), prompt).per_group,
            whole_prompt=_admitted(spec, even, prompt).whole_prompt,
            per_group_fixed_split=_admitted(spec, fixed, prompt).per_group,
        )
        for prompt in PROMPTS
    ], fixed


def _split(spec: CacheSpec, chat_tokens: int) -> Sequence[int]:
    """A server's own, for chats of so many tokens."""
    load = ExpectedLoad(
        max_running=RUNNING,
        max_model_len=max(PROMPTS) + RESERVE_TOKENS,
        chunk_tokens=1,
        chat_tokens=chat_tokens,
    )
    return device_pages(spec, POOL_BYTES, load)


def _admitted(spec: CacheSpec, pages: Sequence[int], prompt: int) -> Admitted:
    (row,) = admitted(spec, pages, (prompt,), RESERVE_TOKENS)
    return row


def admit_us(spec: CacheSpec, pages: Sequence[int]) -> float:
    """Whether the next of many requests fits beside those that were admitted before it."""
    wanted = demand(spec, 4096 + RESERVE_TOKENS, 4096 + RESERVE_TOKENS, 1, 0)
    budget, laps = PageBudget(spec, pages), list[float]()
    for _ in range(DECISIONS):
        begun_s = time.perf_counter()
        if budget.fits(wanted, pages):
            budget.book(wanted)
        laps.append(time.perf_counter() - begun_s)
    return round(median(laps) * 1e6, 2)


def throughput(name: str) -> HandOffThroughput | None:
    """None where the transport is not installed, or cannot be had here."""
    try:
        with _opened(name, LONG_PROMPT) as (hand_offs, requests):
            many, work = _laps(hand_offs, LAPS, requests)
            size = hand_offs.load.request_bytes * requests
        with _opened(name, SHORT_PROMPT) as (hand_offs, requests):
            short, _ = _laps(hand_offs, LAPS, requests)
            alone, _ = _laps(hand_offs, LAPS * requests // 2, 1)
    except (ConfigError, TransportError) as error:
        print(f"{name}: left out: {error}")
        return None
    return HandOffThroughput(
        name=name,
        ratio=round(many.ratio(_LIBRARY, _HAND_OFF), 3),
        short_ratio=round(short.ratio(_LIBRARY, _HAND_OFF), 3),
        processor_ratio=round(work.median_s(_LIBRARY) / work.median_s(_HAND_OFF), 3),
        gb_s=round(size / many.median_s(_HAND_OFF) / 1e9, 3),
        alone_ms=round(alone.median_s(_HAND_OFF) * 1e3, 2),
        alone_library_ms=round(alone.median_s(_LIBRARY) * 1e3, 2),
    )


@contextmanager
def _opened(name: str, prompt: int) -> Generator[tuple[HandOffs, int]]:
    """Both sides, and how many requests of so many tokens are a lap; their bytes were looked at."""
    load = HandOffLoad(spec=gpt_oss_spec(LAYERS), requests=1, prompt=prompt, under_way=UNDER_WAY)
    load = replace(load, requests=max(1, LAP_BYTES // load.request_bytes))
    with HandOffs.opened(name, load) as hand_offs:
        hand_offs.hand_over(load.requests)  # before the library may have brought anything
        here, there = hand_offs.sums(load.requests)
        if here != there:
            raise AssertionError(f"{name}: what is there is not what was handed over")
        yield hand_offs, load.requests


def _laps(hand_offs: HandOffs, laps: int, requests: int) -> tuple[Laps, Laps]:
    """By the clock, and by the processor's seconds of this process."""
    found, work = Laps(), Laps()
    contenders: list[tuple[str, Callable[[int], float]]] = [
        (_LIBRARY, hand_offs.by_library),
        (_HAND_OFF, hand_offs.hand_over),
    ]
    for turn in range(laps):
        for which, seconds in in_turn(contenders, turn):
            begun_s = time.process_time()
            found.add(which, seconds(requests))
            work.add(which, time.process_time() - begun_s)
    return found, work
