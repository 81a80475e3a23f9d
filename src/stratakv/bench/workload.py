"""What the serving bench plays: conversations that grow, or a recorded trace.

Owns who asks what, and when. Must not know engines.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from stratakv.core.errors import ConfigError
from stratakv.core.ids import RequestId, TokenIds
from stratakv.sim.trace import BLOCK_TOKENS, TraceRequest, read_trace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedPrompt:
    """One request: arrives ``at_s`` after the start, wants exactly ``new_tokens``."""

    id: RequestId
    at_s: float
    tokens: TokenIds
    new_tokens: int


class Workload(Protocol):
    """``name`` says all that is needed to play it again."""

    @property
    def name(self) -> str: ...

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer together."""
        ...

    def opening(self) -> list[TimedPrompt]:
        """Requests that arrive whatever is answered, in order of arrival; resets the workload."""
        ...

    def next_turn(self, ask: TimedPrompt, answer: TokenIds, now_s: float) -> TimedPrompt | None:
        """What the one who asked sends next, if anything."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """``users`` talk for ``turns`` turns each, all under one system prompt; a turn's prompt is the
    whole conversation so far, and comes as soon as the answer is there."""

    users: int = 16
    turns: int = 4
    system_tokens: int = 512
    message_tokens: int = 128
    answer_tokens: int = 24
    vocabulary: int = 512

    @classmethod
    def within(cls, longest: int, vocabulary: int) -> "Chat":
        """As long as it is by default, or shorter in proportion where ``longest`` tokens are all a
        request may have."""
        usual = cls(vocabulary=vocabulary)
        if usual.longest <= longest:
            return usual
        return cls(
            system_tokens=usual.system_tokens * longest // usual.longest,
            message_tokens=max(1, usual.message_tokens * longest // usual.longest),
            answer_tokens=max(1, usual.answer_tokens * longest // usual.longest),
            vocabulary=vocabulary,
        )

    @property
    def name(self) -> str:
        return (
            f"chat: {self.users} users x {self.turns} turns, system prompt {self.system_tokens}, "
            f"message {self.message_tokens}, answer {self.answer_tokens} tokens"
        )

    @property
    def longest(self) -> int:
        return self.system_tokens + self.turns * (self.message_tokens + self.answer_tokens)

    def opening(self) -> list[TimedPrompt]:
        system = self._words(0, 0, self.system_tokens)
        return [
            self._ask(user, 1, np.concatenate((system, self._words(user + 1, 1, None))), 0.0)
            for user in range(self.users)
        ]

    def next_turn(self, ask: TimedPrompt, answer: TokenIds, now_s: float) -> TimedPrompt | None:
        user, turn = map(int, ask.id.split("."))
        if turn == self.turns:
            return None
        history = np.concatenate((ask.tokens, answer, self._words(user + 1, turn + 1, None)))
        return self._ask(user, turn + 1, history, now_s)

    def _ask(self, user: int, turn: int, tokens: TokenIds, at_s: float) -> TimedPrompt:
        name = RequestId(f"{user}.{turn}")
        return TimedPrompt(id=name, at_s=at_s, tokens=tokens, new_tokens=self.answer_tokens)

    def _words(self, user: int, turn: int, count: int | None) -> TokenIds:
        rng = np.random.default_rng((user, turn))
        return rng.integers(0, self.vocabulary, count or self.message_tokens, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The first requests of a Mooncake trace, scaled down: every token count is divided by
    ``shrink``, and time by ``hurry``. Equal hash ids become equal tokens, so what could be reused
    in the trace can be reused here, in the same proportion."""

    source: str
    asks: tuple[TimedPrompt, ...]
    shrink: int
    hurry: float

    @property
    def name(self) -> str:
        return (
            f"{self.source}: first {len(self.asks)} requests, "
            f"tokens / {self.shrink}, time / {self.hurry:.3g}"
        )

    @property
    def longest(self) -> int:
        return max(len(ask.tokens) + ask.new_tokens for ask in self.asks)

    def opening(self) -> list[TimedPrompt]:
        return list(self.asks)

    def next_turn(self, ask: TimedPrompt, answer: TokenIds, now_s: float) -> TimedPrompt | None:
        del ask, answer, now_s  # a trace does not listen
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceScale:
    """What a trace is cut down to. ``shrink`` is the least power of two from ``min_shrink`` up at
    which every request fits ``max_tokens``."""

    max_tokens: int
    vocabulary: int
    requests: int = 500
    play_s: float = 20.0
    min_shrink: int = 64


def scaled_trace(path: Path, scale: TraceScale) -> Trace:
    """The first requests of a Mooncake-format file. ConfigError for a file that is none, and for
    requests too long to be scaled."""
    records = read_trace(path, "--trace", scale.requests)
    longest = max(record.input_length + record.output_length for record in records)
    shrink = scale.min_shrink
    while longest / shrink + 2 > scale.max_tokens:
        shrink *= 2
    if shrink > BLOCK_TOKENS:
        raise ConfigError(
            f"--trace {path}: a request of {longest} tokens; allowed are "
            f"{scale.max_tokens * BLOCK_TOKENS} and less, which can be scaled to this model"
        )
    begin_ms = records[0].timestamp_ms
    hurry = max(1.0, (records[-1].timestamp_ms - begin_ms) / 1000 / scale.play_s)
    block = BLOCK_TOKENS // shrink
    asks = tuple(
        TimedPrompt(
            id=RequestId(f"trace-{at}"),
            at_s=(record.timestamp_ms - begin_ms) / 1000 / hurry,
            tokens=_tokens(record, block, max(1, record.input_length // shrink), scale.vocabulary),
            new_tokens=max(1, round(record.output_length / shrink)),
        )
        for at, record in enumerate(records)
    )
    return Trace(source=path.name, asks=asks, shrink=shrink, hurry=hurry)


def _tokens(record: TraceRequest, block: int, count: int, vocabulary: int) -> TokenIds:
    parts = [
        np.random.default_rng(block_id).integers(0, vocabulary, block, dtype=np.int32)
        for block_id in record.hash_ids
    ]
    return np.concatenate(parts)[:count]
