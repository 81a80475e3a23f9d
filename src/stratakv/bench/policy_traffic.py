"""What chats and branching sessions have in common: who comes when, under which system prompt, and
how long what is said and the pauses are.

Owns the distributions. Must not know caches, nor what a prompt is made of.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from stratakv.core.config import check_count

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
