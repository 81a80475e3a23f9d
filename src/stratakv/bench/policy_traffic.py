"""Synthetic traffic as a trace: who comes when, under which system prompt, how long questions,
answers and pauses are; and chats, whose prompts are the conversation so far.

Owns the distributions, and what a conversation is made of. Must not know caches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from stratakv.core.choices import check_count
from stratakv.sim.trace import BLOCK_TOKENS, TraceRequest

MAX_ANSWER_TOKENS: Final = 4096
READ_S_PER_TOKEN: Final = 0.02
"""Somebody who goes on has read the answer first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Sessions that start in turn, ``start_s`` apart on average, each under one of ``systems``
    system prompts. The number of turns is geometric, lengths are log-normal with sigma 0.5, think
    and start times exponential; figures are means."""

    seed: int = 0
    systems: int = 16
    system_tokens: int = 1024
    zipf: float = 1.0
    answer_tokens: int = 300
    turns: float = 6.0
    think_s: float = 30.0
    start_s: float = 4.0

    def check(self, flag: str, sessions: int) -> None:
        """ConfigError where there are none, or the seed is none."""
        check_count(flag, sessions)
        check_count("--seed", self.seed, 0)

    def popular(self, rng: np.random.Generator, things: int, sessions: int) -> list[int]:
        """Which of ``things`` each session has chosen: Zipf with exponent ``zipf``."""
        weights = 1.0 / np.arange(1, things + 1) ** self.zipf
        return rng.choice(things, sessions, p=weights / weights.sum()).tolist()

    def starts_s(self, rng: np.random.Generator, sessions: int) -> list[float]:
        return np.cumsum(rng.exponential(self.start_s, sessions)).tolist()

    def systems_lengths(self, rng: np.random.Generator) -> list[int]:
        return lengths(rng, self.system_tokens, self.systems)

    def answer(self, rng: np.random.Generator) -> int:
        """Tokens of one."""
        return min(MAX_ANSWER_TOKENS, lengths(rng, self.answer_tokens, 1)[0])

    def pause_s(self, rng: np.random.Generator, answer: int) -> float:
        """From one prompt of a session to the next, with an answer of so many tokens between."""
        return rng.exponential(self.think_s) + READ_S_PER_TOKEN * answer


def lengths(rng: np.random.Generator, mean: float, count: int) -> list[int]:
    drawn = rng.lognormal(np.log(mean) - 0.125, 0.5, count)
    return np.maximum(1, drawn.round()).astype(int).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTraffic(Traffic):
    """``chats`` conversations, of which some ``turns * think_s / start_s`` go on at once. A prompt
    is the whole conversation so far. System prompts are popular by Zipf's law."""

    chats: int
    message_tokens: int = 200

    def __post_init__(self) -> None:
        self.check("--chats", self.chats)

    @property
    def name(self) -> str:
        return f"{self.chats} generated chats, messages of {self.message_tokens}, seed {self.seed}"


def generate(traffic: ChatTraffic) -> list[TraceRequest]:
    """The requests of all chats in order of arrival; the same for the same ``traffic``."""
    rng = np.random.default_rng(traffic.seed)
    chosen = traffic.popular(rng, traffic.systems, traffic.chats)
    system_lengths = traffic.systems_lengths(rng)
    starts_s = traffic.starts_s(rng, traffic.chats)
    turns: list[tuple[float, int, int, list[tuple[int, ...]]]] = []
    for chat, system in enumerate(chosen):
        own = np.random.default_rng((traffic.seed, chat))
        system_tokens = system_lengths[system]
        for at_s, prompt, answer in _turns(own, traffic, starts_s[chat], system_tokens):
            turns.append((at_s, prompt, answer, _blocks(chat, system, system_tokens, prompt)))
    turns.sort(key=lambda turn: turn[0])
    ids: dict[tuple[int, ...], int] = {}
    return [
        TraceRequest(
            timestamp_ms=round(at_s * 1000),
            input_length=prompt,
            output_length=answer,
            hash_ids=tuple(ids.setdefault(block, len(ids)) for block in blocks),
        )
        for at_s, prompt, answer, blocks in turns
    ]


def _turns(
    rng: np.random.Generator, traffic: ChatTraffic, at_s: float, tokens: int
) -> Iterator[tuple[float, int, int]]:
    """Time, prompt and answer tokens of one chat's turns, after ``tokens`` of system prompt."""
    for _ in range(rng.geometric(1 / traffic.turns)):
        tokens += lengths(rng, traffic.message_tokens, 1)[0]
        answer = traffic.answer(rng)
        yield at_s, tokens, answer
        tokens += answer
        at_s += traffic.pause_s(rng, answer)


def _blocks(chat: int, system: int, system_tokens: int, prompt: int) -> list[tuple[int, ...]]:
    """What the blocks of a prompt are: the system prompt's own, the chat's own, and a last
    one that is not full, which no longer prompt has."""
    shared = min(system_tokens, prompt) // BLOCK_TOKENS
    full = prompt // BLOCK_TOKENS
    blocks: list[tuple[int, ...]] = [(0, system, at) for at in range(shared)]
    blocks += [(1, chat, at) for at in range(shared, full)]
    if prompt % BLOCK_TOKENS:
        blocks.append((2, chat, full, prompt))
    return blocks
