"""Synthetic traffic whose prompts part inside older ones, as a trace: many questions on one
document, and agents that go back and edit earlier turns.

Owns what readers and agents send. Must not know caches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from stratakv.bench.policy_traffic import Traffic, lengths
from stratakv.sim.trace import BLOCK_TOKENS, TraceRequest

PromptPieces: TypeAlias = tuple[tuple[int, int], ...]
"""A prompt, as pieces: whose number, and how many of its first tokens."""
Turn: TypeAlias = tuple[float, PromptPieces, int]
"""Time in seconds, prompt, answer tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchTraffic(Traffic):
    """``sessions``: every second one is a reader, who asks about a document, and every other one an
    agent, whose history grows turn by turn.

    A reader takes one of as many documents, popular by Zipf's law, behind one of ``systems``
    instructions, and asks ``turns`` questions that share nothing but the document. An agent has
    twice as many turns and adds ``step_tokens`` in each (its instructions and what its tools gave
    it); with probability ``edits`` it first goes back to a place anywhere in its history, the later
    the likelier, forgets the rest and sends something else.
    """

    sessions: int
    system_tokens: int = 1500
    zipf: float = 0.5
    turns: float = 2.0
    document_tokens: int = 30_000
    question_tokens: int = 300
    step_tokens: int = 2500
    edits: float = 0.6

    def __post_init__(self) -> None:
        self.check("--branching", self.sessions)

    @property
    def name(self) -> str:
        return (
            f"{self.sessions} generated sessions of readers and agents, documents of "
            f"{self.document_tokens}, seed {self.seed}"
        )


class _Pieces:
    """Numbers for text that is new."""

    def __init__(self) -> None:
        self._last = 0

    def new(self, tokens: int) -> tuple[int, int]:
        self._last += 1
        return self._last, tokens


def generate(traffic: BranchTraffic) -> list[TraceRequest]:
    """The requests of all sessions in order of arrival; the same for the same ``traffic``."""
    rng = np.random.default_rng(traffic.seed)
    pieces = _Pieces()
    systems = [pieces.new(n) for n in traffic.systems_lengths(rng)]
    shelf = [pieces.new(n) for n in lengths(rng, traffic.document_tokens, traffic.sessions)]
    chosen = traffic.popular(rng, traffic.sessions, traffic.sessions)
    behind = rng.integers(0, traffic.systems, traffic.sessions).tolist()
    starts_s = traffic.starts_s(rng, traffic.sessions)
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
            input_length=sum(tokens for _, tokens in prompt),
            output_length=answer,
            hash_ids=tuple(names.of(prompt)),
        )
        for at_s, prompt, answer in turns
    ]


def _reader(
    rng: np.random.Generator,
    traffic: BranchTraffic,
    at_s: float,
    head: PromptPieces,
    pieces: _Pieces,
) -> Iterator[Turn]:
    for _ in range(rng.geometric(1 / traffic.turns)):
        question = pieces.new(lengths(rng, traffic.question_tokens, 1)[0])
        answer = traffic.answer(rng)
        yield at_s, (*head, question), answer
        at_s += traffic.pause_s(rng, answer)


def _agent(
    rng: np.random.Generator,
    traffic: BranchTraffic,
    at_s: float,
    head: PromptPieces,
    pieces: _Pieces,
) -> Iterator[Turn]:
    prompt = head
    for _ in range(2 * rng.geometric(1 / traffic.turns)):
        if rng.random() < traffic.edits:
            total, least = sum(n for _, n in prompt), sum(n for _, n in head)
            prompt = _cut(prompt, least + int((total - least) * np.sqrt(rng.random())))
        prompt = (*prompt, pieces.new(lengths(rng, traffic.step_tokens, 1)[0]))
        answer = traffic.answer(rng)
        yield at_s, prompt, answer
        prompt = (*prompt, pieces.new(answer))
        at_s += traffic.pause_s(rng, answer)


def _cut(prompt: PromptPieces, tokens: int) -> PromptPieces:
    """The first ``tokens`` of a prompt."""
    kept: list[tuple[int, int]] = []
    for number, length in prompt:
        if tokens <= 0:
            break
        kept.append((number, min(length, tokens)))
        tokens -= length
    return tuple(kept)


class _BlockNames:
    """Numbers of blocks: equal where all text up to a block's end is equal."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, PromptPieces], int] = {}

    def of(self, prompt: PromptPieces) -> Iterator[int]:
        """One for every block of a prompt; the last one may be partly filled."""
        above, block, room = -1, list[tuple[int, int]](), BLOCK_TOKENS
        for number, length in prompt:
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
