"""Engines of a model whose selected rows may be on the host, and what it says without offload.

Pages of both tiers that nobody owns are NaN, and ``drain`` checks that every page has one owner. An
engine of the same model without offload, whose device holds everything, says what is right.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property, partial

import pytest

from stratakv.assembly.device import CPU
from stratakv.assembly.sizing import spec_for
from stratakv.core.config import EngineConfig
from stratakv.spec.groups import Home
from stratakv.spec.offload import selected_group
from stratakv.transfer.cpu import DEFAULT_COPIER
from stratakv.transfer.host_rows import CpuHostRows
from tests.engines import greedy, run, small_engine, tokens_of
from tests.fixtures import deepseek_v4
from tests.fixtures.deepseek_v32 import random_tokens, wrapped

ANSWER = 20
COMMON = {"max_running": 6, "reserve_tokens": ANSWER, "load_back_threshold": 1}
V32 = COMMON | {"page_tokens": 8, "max_model_len": 160, "chunk_tokens": 24, "step_tokens": 64}
V4 = COMMON | {"page_tokens": 16, "max_model_len": 224, "chunk_tokens": 48, "step_tokens": 96}


class CountedRows(CpuHostRows):
    """Counts what is read on the host, in rows of decoding requests and in pages of chunks."""

    rows = pages_read = 0

    def load(self, layer, device, host):
        CountedRows.rows += len(host)
        super().load(layer, device, host)

    def load_pages(self, layer, device, host):
        CountedRows.rows += len(host)
        super().load_pages(layer, device, host)

    def pages(self, layer, pages):
        CountedRows.pages_read += len(pages)
        return super().pages(layer, pages)


COUNTED = replace(CPU, host_rows=CountedRows)


class OffloadCase:
    """``plain``: settings without offload. ``device`` and ``host``: pages of every group, with the
    selected rows in one of their own."""

    def __init__(self, make_model, plain, device, host):
        self._make_model = make_model
        self.plain, self.device, self.host = plain, device, host

    @cached_property
    def model(self):
        return self._make_model()

    def config(self, buffer=None, **settings):
        offload = {} if buffer is None else {"sparse_offload": True, "device_buffer_size": buffer}
        return EngineConfig(**self.plain | offload | settings)

    def spec(self, buffer, home=Home.HOST):
        return spec_for(self.model.facts, self.config(buffer), home)

    def least(self, buffer, home=Home.HOST):
        """Device pages that one spilled request needs."""
        spec = self.spec(buffer, home)
        page_rows = spec.groups[selected_group(spec)].page_rows
        staging = -(-self.plain["chunk_tokens"] // self.plain["page_tokens"]) + 2
        return -(-buffer // page_rows) + staging

    def pages(self, device, host):
        """Of the group of selected rows so many, of the others plenty."""
        return tuple(
            (*plenty[:1], some, *plenty[2:])
            for plenty, some in ((self.device, device), (self.host, host))
        )

    @contextmanager
    def engine(
        self, buffer, selected=None, host=None, copier=DEFAULT_COPIER, role=None, device=None,
        **settings,
    ):  # fmt: skip
        """``device``: COUNTED, if none is given. ``selected``: device pages of the group whose home
        is the host; None: for one request. ``host``: its host pages; None: plenty."""
        selected = self.least(buffer) if selected is None else selected
        pages, hosts = self.pages(selected, self.host[1] if host is None else host)
        CountedRows.rows = CountedRows.pages_read = 0
        with small_engine(
            self.model, self.config(buffer, **settings), pages, hosts, copier,
            role=role, device_kind=COUNTED if device is None else device,
        ) as parts:  # fmt: skip
            yield parts

    @cache  # noqa: B019 - a case lives as long as the tests
    def right(self, *prompts, answer=ANSWER, longest=None):
        """What each prompt is answered without offload, one after the other on a cold cache."""
        longest = self.plain["max_model_len"] if longest is None else longest
        plain = self.config(max_model_len=longest)
        device = (300, *self.device[2:])
        with small_engine(self.model, plain, device, (0,) * len(device)) as parts:
            return [
                tokens_of(run(parts, greedy(str(at), prompt, answer))[str(at)])
                for at, prompt in enumerate(prompts)
            ]


def _v4(seed):
    made = partial(deepseek_v4.adopted, seed)
    return OffloadCase(made, V4, (100, 100, 100, 8), (200, 100, 200, 8))


CASES = {name: OffloadCase(partial(wrapped, name), V32, (200, 200), (400, 200))
         for name in ("small", "glm", "groups")}  # fmt: skip
CASES |= {"v4": _v4(deepseek_v4.TWICE), "narrow v4": _v4(deepseek_v4.NARROW)}


SMALL = CASES["small"]
PROMPTS = [random_tokens(seed, 60 + 13 * seed % 37) for seed in range(20)]
"""For the models of V3.2."""


def levels(every, often):
    """Host pages of a test: ``every`` number of them, of which only some are tried ``often``."""
    return [
        pages if pages in often else pytest.param(pages, marks=pytest.mark.long) for pages in every
    ]


def answers(prompts, parts, first=0, answer=ANSWER):
    """All at once."""
    asked = [greedy(f"{first + at}", prompt, answer) for at, prompt in enumerate(prompts)]
    found = run(parts, *asked)
    return [tokens_of(found[prompt.id]) for prompt in asked]


def submit(parts, prompts):
    for at, prompt in enumerate(prompts):
        parts.engine.submit(greedy(str(at), prompt, ANSWER))


def rows_of(prompts):
    return tuple(tuple(prompt) for prompt in prompts)


def spilled(parts):
    """Requests that were spilled as they ran."""
    return parts.cache.tiers.pools.counters.snapshot()["spilled"]


def by_name(outputs, count):
    found = [[] for _ in range(count)]
    for output in outputs:
        found[int(output.request)].append(output)
    return found
