"""Pairs of engines, one that computes prompts and one that decodes, for tests; over any link."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch

from stratakv.assembly.build import Sockets
from stratakv.core.config import EngineConfig
from stratakv.core.ids import RequestId
from stratakv.engine.grammars import NO_GRAMMARS
from stratakv.engine.huggingface.model import with_adapters
from stratakv.spec.derive import spec_of
from stratakv.spec.retention import KeepBoundary, KeepChunk, KeepLive, KeepWindow
from stratakv.testing.hand_off import HandOffSide, LocalHandOff
from tests.engines import VOCABULARY, all_free, small_engine, token_engine, token_spec, tokens_of
from tests.fixtures.models import tiny_model
from tests.hit_cases import config_for, engine_model, oracle

PAGE = 16


class Pair:
    """Two engines, a step of each after the other; both are checked after each of theirs, or after
    every so many."""

    def __init__(self, link, prefill, decode):
        self.link = link
        self.check_every, self.steps = 1, 0
        self.sides = {HandOffSide.PREFILL: prefill, HandOffSide.DECODE: decode}
        self.out = {side: {} for side in HandOffSide}
        link.connect(decode.spec, prefill.pools, decode.pools, decode.arenas)

    @property
    def decode(self):
        return self.sides[HandOffSide.DECODE]

    def submit(self, asked):
        for side, parts in self.sides.items():
            self.out[side][asked.id] = []
            parts.engine.submit(asked)

    def step(self):
        for back in self.link.returned():
            self.out[HandOffSide.PREFILL].setdefault(back.id, [])
            self.sides[HandOffSide.PREFILL].engine.submit(back)
        for side, parts in self.sides.items():
            for output in parts.engine.step():
                self.out[side][output.request].append(output)
            if self.steps % self.check_every == 0:
                parts.engine.check()
        self.steps += 1

    def drain(self):
        while any(parts.engine.has_work() for parts in self.sides.values()):
            self.step()

    def run(self, *asked):
        for one in asked:
            self.submit(one)
        self.drain()
        return [tokens_of(self.outputs(one.id)) for one in asked]

    def outputs(self, name, side=HandOffSide.DECODE):
        return self.out[side][name]

    def phase(self, side, name):
        found = self.sides[side].engine.status(RequestId(name))
        return None if found is None else found.phase

    def assert_nothing_left(self):
        self.drain()
        assert not len(self.link)
        for parts in self.sides.values():
            stats = parts.engine.stats()
            assert (stats.waiting, stats.running) == (0, 0)
            assert parts.engine.flush()
            parts.engine.check()
            assert all_free(parts)


@contextmanager
def model_pair(
    family, decode_pages=None, link=None, adapters=None, host=True, grammars=None, **settings
):
    """``adapters``: directories of those that are loaded, by name. ``grammars``: makes a side's."""
    grammars = grammars or (lambda: NO_GRAMMARS)
    settings |= {} if host else {"cache": "device"}
    torch.set_num_threads(1)
    model = with_adapters(engine_model(family), adapters or {})
    spec = spec_of(model.config, page_tokens=PAGE, dtype=model.dtype)
    plenty = (64,) * len(spec.groups)
    hosts = plenty if host else (0,) * len(spec.groups)
    link, config = (
        LocalHandOff() if link is None else link,
        config_for(PAGE, snapshot_tokens=PAGE, **settings),
    )
    with ExitStack() as undo:
        sides = [
            undo.enter_context(
                small_engine(
                    model, config, pages, hosts, role=link.roles[side], grammars=grammars()
                )
            )
            for side, pages in (
                (HandOffSide.PREFILL, plenty),
                (HandOffSide.DECODE, decode_pages or plenty),
            )
        ]
        yield Pair(link, *sides)


def right(family, tokens, count):
    return oracle(tiny_model(family), tuple(tokens), count)[0]


RULES = {
    "full": (),
    "window": (KeepWindow(10),),
    "short window": (KeepWindow(3),),
    "chunk": (KeepChunk(12),),
    "state": (KeepBoundary(),),
    "all": (KeepWindow(10), KeepBoundary(), KeepLive()),
}
CONFIG = EngineConfig(
    page_tokens=4,
    max_running=4,
    max_model_len=200,
    chunk_tokens=9,
    step_tokens=20,
    snapshot_tokens=8,
    load_back_threshold=1,
)
PROMPT = [n * 7 % VOCABULARY for n in range(60)]


@contextmanager
def token_pair(*rules, device=60, prefill=60, host=100, page=4, link=None, **settings):
    """``device`` and ``prefill``: pages of each group where it is decoded and where prompts are
    computed, or one count for all."""
    spec, config = token_spec(page, *rules), replace(CONFIG, page_tokens=page, **settings)
    config = config if host else replace(config, cache="device")
    link = LocalHandOff() if link is None else link
    groups = len(spec.groups)
    with ExitStack() as undo:
        sides = [
            undo.enter_context(
                token_engine(
                    spec, config, pages if isinstance(pages, tuple) else (pages,) * groups,
                    (host,) * groups,
                    sockets=Sockets(role=lambda side=side: link.roles[side]),
                )
            )
            for side, pages in ((HandOffSide.PREFILL, prefill), (HandOffSide.DECODE, device))
        ]  # fmt: skip
        yield Pair(link, *sides)


every_rule = pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
