"""``stratakv bench disagg``: what it costs and brings to compute prompts elsewhere.

Owns four measurements. How many requests a decode engine admits that takes pages by group, beside
one that takes them for whole prompts in every group, each with the split of the same bytes that is
best for it. What one such decision takes. And bytes: pages of both sides through ``Peers``, with
their pairing and the message that proves them, beside the same ranges by the transport's library
alone (``transports``), lap by lap in this process. And what decoding gains under long prompts
(``token_gaps``), by servers of their own. Needs the library alone for the others; a transport that
is not installed is left out.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Final

import numpy as np

from stratakv.bench import token_gaps
from stratakv.bench.rig import Laps, in_turn
from stratakv.bench.transports import TRANSPORTS, BareWires, OpenTransport, WriteCase
from stratakv.cache.footprint import TransferPages
from stratakv.cache.records import TierTokens
from stratakv.core.errors import ConfigError, TransportError
from stratakv.disagg.messages import Arrival, Attempt
from stratakv.disagg.page_places import pages_of, places_of
from stratakv.disagg.peers import MessageReceived, Peers
from stratakv.disagg.ranges import Regions, joined, located
from stratakv.disagg.transport import Lost, Memory, PeerId
from stratakv.engine.roles import FirstToken
from stratakv.memory.device_pools import DevicePools
from stratakv.policy.admission import PageBudget, demand
from stratakv.policy.preallocation import Admitted, admitted
from stratakv.spec.budget import ExpectedLoad, device_bytes, device_pages
from stratakv.spec.derive import spec_of
from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import needed

POOL_BYTES: Final = 16 << 30
RUNNING: Final = 64
CHAT_TOKENS: Final = 8192
PROMPTS: Final = tuple(1024 << n for n in range(8))
RESERVE_TOKENS: Final = 512
PAGE_TOKENS: Final = 256
TRANSFER_PROMPT: Final = 4096
REQUESTS: Final = 8
"""Of one lap; 17 MiB each, of pages anywhere in the pools."""
LAPS: Final = 16
DECISIONS: Final = 2000
_PREFILL, _DECODE = PeerId("prefill"), PeerId("decode")
_PAUSE_S: Final = 0.0002


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffThroughput:
    """Medians. ``ratio``: of the seconds of the transport's library alone to the hand-off's, of the
    same ranges in neighbouring laps; ``gb_s``: of the hand-off, 10^9 bytes."""

    name: str
    ratio: float
    gb_s: float


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
    table, pages = admissions(gpt_oss_spec(24))
    decision_us = admit_us(gpt_oss_spec(24), pages)
    print(f"gpt-oss-20b, windows of 128, pages of {PAGE_TOKENS}, {POOL_BYTES >> 30} GiB:")
    print(f"prompt   admitted by group   by whole prompts   by group, split for {CHAT_TOKENS:,}")
    for row in table:
        fixed = row.per_group_fixed_split
        print(f"{row.prompt:7,} {row.per_group:18,} {row.whole_prompt:18,} {fixed:26,}")
    print(f"one decision: {decision_us:.1f} us")
    found = [each for name in TRANSPORTS if (each := throughput(name)) is not None]
    for each in found:
        print(f"{each.name:20} {each.gb_s:6.2f} GB/s, {each.ratio:.2f} of its library alone")
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
    choice = TRANSPORTS[name]
    try:
        with HandOffs.opened(choice.open, gpt_oss_spec(4)) as hand_offs:
            case = hand_offs.case
            with BareWires.opened(choice.wire(), case) as bare:
                laps = Laps()
                contenders: list[tuple[str, Callable[[], object]]] = [
                    ("bare", bare.round),
                    ("hand-off", hand_offs.round),
                ]
                for turn in range(LAPS):
                    for which, work in in_turn(contenders, turn):
                        laps.time(which, work)
    except (ConfigError, TransportError) as error:
        print(f"{name}: left out: {error}")
        return None
    gb_s = case.size_bytes / laps.median_s("hand-off") / 1e9
    return HandOffThroughput(
        name=name, ratio=round(laps.ratio("bare", "hand-off"), 3), gb_s=round(gb_s, 3)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """An engine's pools, and its way to the other one's."""

    peers: Peers
    memories: Sequence[Memory]

    @classmethod
    def opened(
        cls, open_transport: OpenTransport, spec: CacheSpec, pages: Sequence[int]
    ) -> "_Side":
        pools, peers = DevicePools(spec, pages), Peers()
        for group in spec.groups:
            pools.poison(group.id, np.arange(pages[group.id], dtype=np.int32))
        peers.open(spec, pools, b"bench", open_transport)
        memories, _ = places_of(spec, pools, ())
        return cls(peers, memories)

    @property
    def regions(self) -> Regions:
        return Regions.of([(each.ctypes.data, each.nbytes) for each in self.memories])


class HandOffs:
    """``REQUESTS`` prompts from one engine's pools to another's, again and again."""

    def __init__(self, spec: CacheSpec, prefill: "_Side", decode: "_Side") -> None:
        self._prefill, self._decode = prefill.peers, decode.peers
        self._laps = 0
        random = np.random.default_rng(1)
        self._source = _requests(spec, random)
        self._target = _requests(spec, random)
        pairing = self._prefill.pairing(_DECODE)
        self.case = WriteCase(
            prefill.memories,
            decode.memories,
            [
                joined(located(pairing.writes(*pages), prefill.regions, decode.regions))
                for pages in zip(self._source, self._target, strict=True)
            ],
        )

    @classmethod
    @contextmanager
    def opened(cls, open_transport: OpenTransport, spec: CacheSpec) -> "Generator[HandOffs]":
        sides: list[_Side] = []
        pages = [
            REQUESTS * len(needed(group.retention, TRANSFER_PROMPT, spec.page_tokens))
            for group in spec.groups
        ]
        try:
            sides.append(_Side.opened(open_transport, spec, pages))
            sides.append(_Side.opened(open_transport, spec, pages))
            prefill, decode = (side.peers for side in sides)
            introduction, answer = prefill.introduce(_DECODE), decode.introduce(_PREFILL)
            decode.meet(_PREFILL, introduction)
            prefill.meet(_DECODE, answer)
            yield cls(spec, *sides)
        finally:
            for side in sides:
                side.peers.close()

    def round(self) -> None:
        """Until decode has the proof of each request. TransportError where a side is lost."""
        self._laps += 1
        pairing = self._prefill.pairing(_DECODE)
        for at, (source, target) in enumerate(zip(self._source, self._target, strict=True)):
            attempt = Attempt(f"r{at}", self._laps)
            proof = Arrival(attempt, FirstToken(1), TierTokens(0, 0, 0))
            self._prefill.send(_DECODE, proof, pairing.writes(source, target))
        left = REQUESTS
        while left:
            for event in (*self._decode.poll(), *self._prefill.poll()):
                if isinstance(event, Lost):
                    raise TransportError(event.reason)
                left -= isinstance(event, MessageReceived)
            time.sleep(_PAUSE_S)


def _requests(spec: CacheSpec, random: np.random.Generator) -> list[TransferPages]:
    """Of every group the pages that decoding needs, scattered."""
    spans = [needed(group.retention, TRANSFER_PROMPT, spec.page_tokens) for group in spec.groups]
    pages = [random.permutation(REQUESTS * len(span)).tolist() for span in spans]
    return [
        TransferPages(
            TRANSFER_PROMPT,
            tuple(
                pages_of(group.id, span.start, own[at * len(span) : (at + 1) * len(span)])
                for group, span, own in zip(spec.groups, spans, pages, strict=True)
            ),
        )
        for at in range(REQUESTS)
    ]
