"""What ``bench tree`` does to its subjects, each operation to one after the other.

Owns the operations and their times: conversations that share a prompt of 1,024 tokens and take 8
turns of 256; one-page evictions among many leaves; one long prompt. Medians of an operation, in
microseconds, one thread. Must not know who is measured.
"""

import gc
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Final, TypeAlias

import numpy as np

from stratakv.bench.tree_subjects import Operation, Subject, tokens_of

CASES: Final = tuple((page, window) for page in (16, 64) for window in (0, 4096))
"""Tokens of a page, and of a second group's window: 0 for none."""
SHARED: Final = 1024
TURNS: Final = 8
TURN: Final = 256
NEW_PROMPTS: Final = 200
Times: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSize:
    """``leaves``: of the trees in which one page is evicted so many times; ``long``: tokens."""

    conversations: int = 200
    leaves: tuple[int, ...] = (2000, 20000, 60000)
    evictions: int = 500
    long: int = 131072


FULL_SIZE: Final = TrafficSize()


@contextmanager
def no_collections() -> Generator[None]:
    """A pause of the garbage collector belongs to no operation."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


class _Clock:
    """One subject's times, by operation."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._times: dict[str, list[int]] = {}

    def run(self, name: str, operation: Operation) -> None:
        begin = time.perf_counter_ns()
        operation()
        self._times.setdefault(name, []).append(time.perf_counter_ns() - begin)

    def medians(self) -> Times:
        return {name: float(np.median(of)) / 1000 for name, of in self._times.items()}


def chat_pages(page: int, conversations: int) -> int:
    return conversations * (SHARED + TURNS * TURN) // page


def chats(subjects: Sequence[Subject], page: int, conversations: int) -> list[Times]:
    rng = np.random.default_rng(0)
    shared = tokens_of(rng, SHARED)
    prompts = [np.concatenate([shared, tokens_of(rng, TURNS * TURN)]) for _ in range(conversations)]
    lengths = [SHARED + turn * TURN for turn in range(1, TURNS + 1)]
    clocks = [_Clock(subject) for subject in subjects]
    turns = [prompt[:length] for prompt in prompts for length in lengths]
    for turn, clock in product(turns, clocks):
        clock.run("insert", clock.subject.insert(turn))
    for turn, clock in product(turns, clocks):
        for name, operation in clock.subject.uses(turn).items():
            clock.run(name, operation)
    for _ in range(NEW_PROMPTS):
        prompt = np.concatenate([shared, tokens_of(rng, TURNS * TURN)])
        for clock in clocks:
            clock.run("hash_match", clock.subject.new(prompt))
    for _ in range(60):
        for clock in clocks:
            clock.run("evict_4096", clock.subject.evict(4096 // page))
    return [clock.medians() for clock in clocks]


def leaves(subjects: Sequence[Subject], page: int, count: int, evictions: int) -> list[Times]:
    clocks = [_Clock(subject) for subject in subjects]
    for clock in clocks:
        rng = np.random.default_rng(1)
        for _ in range(count):
            clock.subject.insert(tokens_of(rng, page))()
    for _ in range(evictions):
        for clock in clocks:
            clock.run(f"evict_one_of_{count}", clock.subject.evict(1))
    return [clock.medians() for clock in clocks]


def long(subjects: Sequence[Subject], page: int, tokens: int) -> list[Times]:
    prompt = tokens_of(np.random.default_rng(2), tokens)
    clocks = [_Clock(subject) for subject in subjects]
    for _ in range(9):
        for clock in clocks:
            one = clock.subject
            clock.run("long_insert", one.insert(prompt))
            uses = one.uses(prompt)
            for _ in range(20):
                for name, operation in uses.items():
                    clock.run(f"long_{name}", operation)
            one.evict(tokens // page)()
    return [clock.medians() for clock in clocks]


def measure(make: Callable[[int], Sequence[Subject]], page: int, size: TrafficSize) -> list[Times]:
    """Of subjects that ``make`` makes for a number of pages: medians in microseconds, of each."""
    parts = [chats(make(chat_pages(page, size.conversations)), page, size.conversations)]
    parts += [leaves(make(count), page, count, size.evictions) for count in size.leaves]
    parts.append(long(make(size.long // page + 1), page, size.long))
    return [
        {name: us for part in of_one for name, us in part.items()}
        for of_one in zip(*parts, strict=True)
    ]
