"""Synthetic traffic whose prompts part inside older ones, as a trace: many questions on one
document, and agents that go back and edit what was said.

Owns the distributions and the seed. Must not know caches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from stratakv.bench.policy_chats import lengths
from stratakv.bench.trace import BLOCK_TOKENS, TraceRequest
from stratakv.core.errors import ConfigError

MAX_ANSWER_TOKENS: Final = 4096
Said: TypeAlias = tuple[tuple[int, int], ...]
"""A prompt, as pieces: whose number, and how many of its first tokens."""
Turn: TypeAlias = tuple[float, Said, int]
"""Time in seconds, prompt, answer tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchTraffic:
    """``sessions`` that start in turn, ``start_s`` apart on average: every second one is a reader,
    who asks about a document, and every other one an agent, whose history grows turn by turn.

    A reader takes one of as many documents (Zipf with exponent ``zipf``) behind one of ``systems``
    instructions, and asks ``turns`` questions that share nothing but the document. An agent has
    twice as many turns and adds ``step_tokens`` in each (what it was told and what its tools gave
    it); with probability ``edits`` it first goes back to a place anywhere in its history, the later
    the likelier, forgets the rest and says something else. Numbers of turns are geometric, lengths
    log-normal with sigma 0.5, think and start times exponential; figures are means.
    """

    sessions: int
    seed: int = 0
    systems: int = 16
    system_tokens: int = 1500
    zipf: float = 0.5
    document_tokens: int = 30_000
    question_tokens: int = 300
    answer_tokens: int = 300
    step_tokens: int = 2500
    edits: float = 0.6
    turns: float = 2.0
    think_s: float = 30.0
    start_s: float = 4.0

    def __post_init__(self) -> None:
        if self.sessions < 1:
            raise ConfigError(f"--branching {self.sessions}: allowed is 1 and up")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: allowed is 0 and up")

    @property
    def name(self) -> str:
        return (
            f"{self.sessions} generated sessions of readers and agents, documents of "
            f"{self.document_tokens}, seed {self.seed}"
        )


class _Pieces:
    """Numbers for what was never said before."""

    def __init__(self) -> None:
        self._last = 0

    def new(self, tokens: int) -> tuple[int, int]:
        self._last += 1
        return self._last, tokens


def generate(traffic: BranchTraffic) -> list[TraceRequest]:
    """The requests of all sessions in order of arrival; the same for the same ``traffic``."""
    rng = np.random.default_rng(traffic.seed)
    pieces = _Pieces()
    systems = [pieces.new(n) for n in lengths(rng, traffic.system_tokens, traffic.systems)]
    shelf = [pieces.new(n) for n in lengths(rng, traffic.document_tokens, traffic.sessions)]
    weights = 1.0 / np.arange(1, traffic.sessions + 1) ** traffic.zipf
    chosen = rng.choice(traffic.sessions, traffic.sessions, p=weights / weights.sum()).tolist()
    behind = rng.integers(0, traffic.systems, traffic.sessions).tolist()
    starts_s = np.cumsum(rng.exponential(traffic.start_s, traffic.sessions)).tolist()
    turns: list[Turn] = []
    for session in range(traffic.sessions):
        own = np.random.default_rng((traffic.seed, session))
        head = (systems[behind[session]],)
        if session % 2:
            turns += _agent(own, traffic, starts_s[session], head, pieces)
        else:
            document = shelf[chosen[session]]
            turns += _reader(own, traffic, starts_s[session], (*head, document), pieces)
    turns.sort(key=lambda turn: turn[0])
    names = _BlockNames()
    return [
        TraceRequest(
            timestamp_ms=round(at_s * 1000),
            input_length=sum(tokens for _, tokens in said),
            output_length=answer,
            hash_ids=tuple(names.of(said)),
        )
        for at_s, said, answer in turns
    ]


def _reader(
    rng: np.random.Generator, traffic: BranchTraffic, at_s: float, head: Said, pieces: _Pieces
) -> Iterator[Turn]:
    for _ in range(rng.geometric(1 / traffic.turns)):
        question = pieces.new(lengths(rng, traffic.question_tokens, 1)[0])
        answer = _answer(rng, traffic)
        yield at_s, (*head, question), answer
        at_s += rng.exponential(traffic.think_s) + 0.02 * answer


def _agent(
    rng: np.random.Generator, traffic: BranchTraffic, at_s: float, head: Said, pieces: _Pieces
) -> Iterator[Turn]:
    said = head
    for _ in range(2 * rng.geometric(1 / traffic.turns)):
        if rng.random() < traffic.edits:
            total, least = sum(n for _, n in said), sum(n for _, n in head)
            said = _cut(said, least + int((total - least) * np.sqrt(rng.random())))
        said = (*said, pieces.new(lengths(rng, traffic.step_tokens, 1)[0]))
        answer = _answer(rng, traffic)
        yield at_s, said, answer
        said = (*said, pieces.new(answer))
        at_s += rng.exponential(traffic.think_s) + 0.02 * answer


def _answer(rng: np.random.Generator, traffic: BranchTraffic) -> int:
    return min(MAX_ANSWER_TOKENS, lengths(rng, traffic.answer_tokens, 1)[0])


def _cut(said: Said, tokens: int) -> Said:
    """The first ``tokens`` of what was said."""
    kept: list[tuple[int, int]] = []
    for number, length in said:
        if tokens <= 0:
            break
        kept.append((number, min(length, tokens)))
        tokens -= length
    return tuple(kept)


class _BlockNames:
    """Numbers of blocks: equal where all that was said up to a block's end is equal."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Said], int] = {}

    def of(self, said: Said) -> Iterator[int]:
        """One for every block of a prompt; the last one may be partly filled."""
        above, block, room = -1, list[tuple[int, int]](), BLOCK_TOKENS
        for number, length in said:
            start = 0
            while start < length:
                stop = min(length, start + room)
                block.append((number, stop))
                room -= stop - start
                start = stop
                if not room:
                    above = self._known.setdefault((above, tuple(block)), len(self._known))
                    yield above
                    block, room = [], BLOCK_TOKENS
        if block:
            yield self._known.setdefault((above, tuple(block)), len(self._known))
