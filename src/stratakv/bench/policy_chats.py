"""Synthetic chat traffic as a trace: conversations that grow, under a few system prompts.

Owns the distributions and the seed. Must not know caches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from stratakv.bench.trace import BLOCK_TOKENS, TraceRequest
from stratakv.core.errors import ConfigError

MAX_ANSWER_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTraffic:
    """``chats`` conversations that start in turn, ``start_s`` apart on average, so that some
    ``turns * think_s / start_s`` of them go on at once. A prompt is the whole conversation so far.

    Popularity of the ``systems`` system prompts is Zipf with exponent ``zipf``; the number of turns
    is geometric, lengths are log-normal with sigma 0.5, think and start times exponential; figures
    are means.
    """

    chats: int
    seed: int = 0
    systems: int = 16
    zipf: float = 1.0
    system_tokens: int = 1024
    turns: float = 6.0
    message_tokens: int = 200
    answer_tokens: int = 300
    think_s: float = 30.0
    start_s: float = 4.0

    def __post_init__(self) -> None:
        if self.chats < 1:
            raise ConfigError(f"--chats {self.chats}: allowed is 1 and up")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: allowed is 0 and up")

    @property
    def name(self) -> str:
        return f"{self.chats} generated chats, messages of {self.message_tokens}, seed {self.seed}"


def generate(traffic: ChatTraffic) -> list[TraceRequest]:
    """The requests of all chats in order of arrival; the same for the same ``traffic``."""
    rng = np.random.default_rng(traffic.seed)
    weights = 1.0 / np.arange(1, traffic.systems + 1) ** traffic.zipf
    chosen = rng.choice(traffic.systems, traffic.chats, p=weights / weights.sum())
    system_lengths = lengths(rng, traffic.system_tokens, traffic.systems)
    starts_s = np.cumsum(rng.exponential(traffic.start_s, traffic.chats))
    turns: list[tuple[float, int, int, list[tuple[int, ...]]]] = []
    for chat, system in enumerate(chosen.tolist()):
        own = np.random.default_rng((traffic.seed, chat))
        system_tokens = system_lengths[system]
        for at_s, prompt, answer in _turns(own, traffic, starts_s.item(chat), system_tokens):
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
        answer = min(MAX_ANSWER_TOKENS, lengths(rng, traffic.answer_tokens, 1)[0])
        yield at_s, tokens, answer
        tokens += answer
        at_s += rng.exponential(traffic.think_s) + 0.02 * answer


def lengths(rng: np.random.Generator, mean: float, count: int) -> list[int]:
    drawn = rng.lognormal(np.log(mean) - 0.125, 0.5, count)
    return np.maximum(1, drawn.round()).astype(int).tolist()


def _blocks(chat: int, system: int, system_tokens: int, prompt: int) -> list[tuple[int, ...]]:
    """What tells the blocks of a prompt apart: the system prompt's own, the chat's own, and a last
    one that is not full, which no longer prompt has."""
    shared = min(system_tokens, prompt) // BLOCK_TOKENS
    full = prompt // BLOCK_TOKENS
    blocks: list[tuple[int, ...]] = [(0, system, at) for at in range(shared)]
    blocks += [(1, chat, at) for at in range(shared, full)]
    if prompt % BLOCK_TOKENS:
        blocks.append((2, chat, full, prompt))
    return blocks
