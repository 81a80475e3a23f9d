"""Random traffic over the real engine with ``TokenRunner``: prompts that share prefixes, tight
pools, copies that are slow or fail, aborts at any moment. Every answer must be right, every page
accounted for, and nothing may stay behind.
"""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from stratakv.assembly.models import EngineParts
from stratakv.cache.records import CacheUse
from stratakv.core.config import EngineConfig
from stratakv.engine.request import FinishReason, Prompt
from stratakv.spec.groups import CacheSpec
from stratakv.transfer.numpy_copy import NumpyCopier
from tests.engines import VOCABULARY, expected_tokens, greedy, token_engine, tokens_of


class UnevenCopier(NumpyCopier):
    """Fails every ``fail``-th gather, and lets copies through only now and then."""

    def __init__(self, seed: int, fail: int) -> None:
        super().__init__()
        self._random = np.random.default_rng(seed)
        self._fail = fail
        self._lock = threading.Lock()

    def _slow(self) -> float:
        with self._lock:
            return float(self._random.random())

    def gather(self, *arguments):
        threading.Event().wait(2e-3 if self._slow() < 0.2 else 0)
        if self._fail and self._slow() < 1 / self._fail:
            raise OSError("the host is gone")
        super().gather(*arguments)

    def scatter(self, *arguments):
        threading.Event().wait(2e-3 if self._slow() < 0.2 else 0)
        super().scatter(*arguments)


@dataclass
class Traffic:
    """``aborts``: chance of an abort, and of one more, before a step, of any request; after
    ``most_aborts`` nothing more is sent. ``aborted_in`` counts them by the phase they met.
    ``between``: called before each step."""

    seed: int
    requests: int = 40
    at_once: int = 6
    prompt_tokens: int = 60
    output_tokens: int = 40
    aborts: float = 0.0
    most_aborts: int | None = None
    check_every: int = 1
    between: Callable[[EngineParts], None] = lambda parts: None
    aborted_in: Counter[str] = field(default_factory=Counter)
    outputs: dict[str, list] = field(default_factory=dict)
    prompts: dict[str, tuple[list[int], int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.aborted = 0
        self.stems = [self._tokens(self.prompt_tokens // 2) for _ in range(3)]

    def _tokens(self, count: int) -> list[int]:
        return self.random.integers(0, VOCABULARY, count).tolist()

    def _prompt(self) -> list[int]:
        kind = self.random.random()
        if kind < 0.3 and self.outputs:  # a conversation goes on
            name = self.random.choice(list(self.outputs))
            known = self.prompts[name][0] + tokens_of(self.outputs[name])
            return known[: self.prompt_tokens * 2] + self._tokens(int(self.random.integers(1, 8)))
        stem = self.stems[self.random.integers(len(self.stems))] if kind < 0.8 else []
        keep = int(self.random.integers(0, len(stem) + 1))
        return stem[:keep] + self._tokens(int(self.random.integers(1, self.prompt_tokens // 2)))

    def _draw(self, prompt: Prompt) -> Prompt:
        """In one of two namespaces, of any priority, and with any use of the cache."""
        salt = "" if self.random.random() < 0.8 else "other"
        use = CacheUse.ALL if self.random.random() < 0.8 else CacheUse(int(self.random.integers(3)))
        return replace(prompt, salt=salt, priority=int(self.random.integers(0, 101)), use=use)

    def _more(self, sent: int) -> bool:
        return sent < self.requests and self.aborted != self.most_aborts

    def _abort(self, engine, live: list[str]) -> None:
        name = live[self.random.integers(len(live))]
        request = engine.status(name)
        if request is None or self.aborted == self.most_aborts:
            return
        self.aborted_in[request.phase.name] += 1
        self.aborted += 1
        engine.abort(name)

    def run(self, parts, most: int) -> None:
        engine, sent, live = parts.engine, 0, []
        while self._more(sent) or engine.has_work():
            while self._more(sent) and len(live) < self.at_once:
                prompt = self._prompt()[: most - 2]
                count = int(
                    self.random.integers(1, min(self.output_tokens, most - len(prompt)) + 1)
                )
                name = f"r{sent}"
                self.prompts[name] = (prompt, count)
                self.outputs[name] = []
                engine.submit(self._draw(greedy(name, prompt, count)))
                live.append(name)
                sent += 1
            while live and self.random.random() < self.aborts:
                self._abort(engine, live)
            self.between(parts)
            for output in engine.step():
                self.outputs[output.request].append(output)
                if output.finish is not None:
                    live.remove(output.request)
            if self.random.random() < 1 / self.check_every:
                engine.check()
        self._verify()

    def _verify(self) -> None:
        for name, (prompt, count) in self.prompts.items():
            outputs = self.outputs[name]
            assert all(output.finish is None for output in outputs[:-1])
            generated = tokens_of(outputs)
            expected = expected_tokens(prompt, count)
            if outputs[-1].finish is FinishReason.ABORT:
                expected = expected[: len(generated)]
            assert generated == expected, f"{name}: {generated}, not {expected}"


def churn(
    spec: CacheSpec,
    config: EngineConfig,
    device: list[int],
    host: list[int],
    traffic: Traffic,
    copier=None,
):
    """Run ``traffic`` to its end; the cache's counters."""
    with token_engine(spec, config, device, host, copier or NumpyCopier()) as parts:
        traffic.run(parts, config.max_model_len)
        parts.cache.progress.settle()
        parts.engine.check()
        stats = parts.engine.stats()
        cached = stats.cached_device_tokens + stats.cached_host_tokens + stats.cached_storage_tokens
        assert stats.known_tokens == cached + sum(stats.lost_tokens.values()), (
            "a loss has no reason"
        )
        assert parts.cache.progress.flush(), "something still holds a page"
        assert all(pool.free == pool.total for pool in parts.cache.tiers.pools.stats())
        return parts.cache.tiers.pools.counters
