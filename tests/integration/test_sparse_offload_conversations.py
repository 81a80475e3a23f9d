"""Twenty conversations with selected rows on the host, whichever way their prefixes come: each turn
is answered as without offload. Hand-offs and ranks have the same in files of their own."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product

import pytest

from tests.engines import computing, evict_device, greedy, retract_youngest, tokens_of
from tests.fixtures.deepseek_v32 import random_tokens
from tests.offloading import CASES, CountedRows, rows_of
from tests.storage_cases import PATIENT, Shelf, attach_backend, format_of

TURNS, ANSWER, RETRACT_STEPS = 3, 6, 5
FIRST = {"small": 40, "glm": 40, "v4": 70}
"""Tokens of a first prompt, by model."""
MORE = {"small": 9, "glm": 9, "v4": 19}
SPARE = {"small": 21, "glm": 21, "v4": 15}
"""Device pages of selected rows beside what one spilled request needs."""
WAYS = {
    "prefix": ("device", "host"),
    "host": ("host",),
    "storage": ("storage",),
    "retraction": ("device", "host"),
}
"""Where what is known comes from, one or the other."""


@dataclass
class Chats:
    """Every turn of twenty conversations, with a buffer of so many rows."""

    name: str
    buffer: int
    way: str
    cached: dict = field(default_factory=lambda: {"device": 0, "host": 0, "storage": 0})
    retracted: int = 0

    @contextmanager
    def engines(self):
        """What gives the engine of each turn: one for all, or, with a store, one each."""
        case = CASES[self.name]
        selected = case.least(self.buffer) + SPARE[self.name]
        shelf = Shelf(format_of(case.spec(self.buffer)), 1 << 30)
        with ExitStack() as undo:
            made = []

            def engine():
                if self.way == "storage":
                    undo.close()
                    made.clear()
                if not made:
                    more = PATIENT if self.way == "storage" else {}
                    made.append(undo.enter_context(case.engine(self.buffer, selected, **more)))
                    if self.way == "storage":
                        attach_backend(made[0], shelf)
                return made[0]

            yield engine

    def answered(self, parts, turn, asked):
        """What each is answered, all at once."""
        names = [f"{100 * turn + at}" for at in range(len(asked))]
        for name, prompt in zip(names, asked, strict=True):
            parts.engine.submit(greedy(name, prompt, ANSWER))
        outputs, steps = {name: [] for name in names}, 0
        while parts.engine.has_work():
            for output in parts.engine.step():
                outputs[output.request].append(output)
            steps += 1
            if (
                self.way == "retraction"
                and steps % RETRACT_STEPS == 0
                and len(computing(parts)) > 1
            ):
                retract_youngest(parts)
                self.retracted += 1
        parts.engine.check()
        for one in outputs.values():
            for tier in self.cached:
                self.cached[tier] += getattr(one[0].cached, tier)
        return [tokens_of(one) for one in outputs.values()]


QUICK = {
    ("small", 32, "prefix"),
    ("small", 32, "host"),
    ("small", 32, "storage"),
    ("v4", 16, "retraction"),
}
BUFFERS = {"small": (24, 32, 40, 56), "glm": (24,), "v4": (8, 16, 24)}
CHATS = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.long)
    for name, buffers in BUFFERS.items()
    for case in product([name], buffers, WAYS)
]


@pytest.mark.parametrize(("name", "buffer", "way"), CHATS)
def test_twenty_conversations_go_on_where_they_were(name, buffer, way):
    chats = Chats(name, buffer, way)
    known = [random_tokens(seed, FIRST[name]) for seed in range(20)]
    read = 0
    with chats.engines() as engine:
        for turn in range(TURNS):
            parts, asked = engine(), rows_of(known)
            found = chats.answered(parts, turn, asked)
            assert found == CASES[name].right(*asked, answer=ANSWER)
            read += CountedRows.rows
            known = [
                [*chat, *answer, *random_tokens(50 + turn, MORE[name])]
                for chat, answer in zip(known, found, strict=True)
            ]
            if way == "host":
                evict_device(parts)
            parts.cache.progress.settle()
    assert read
    assert any(chats.cached[tier] for tier in WAYS[way])
    assert chats.retracted or way != "retraction"
