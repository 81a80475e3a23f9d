"""Prompts for an engine that is being verified, and its outputs, logits included.

Owns the bookkeeping between steps and replies. Must not judge them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from stratakv.cache.kv_cache import KVCache
from stratakv.cache.records import CachedTokens, CacheUse
from stratakv.core.clock import Clock
from stratakv.core.ids import RequestId, TokenIds
from stratakv.engine.batch import SamplingBatch
from stratakv.engine.executor import OwnTokens, TokenSource
from stratakv.engine.forward import Forward
from stratakv.engine.loop import Engine
from stratakv.engine.request import Failure, FinishReason, Output, Prompt, SamplingParams
from stratakv.engine.sampling import Sampled
from stratakv.tree.nodes import Tier

HANG_S: Final = 600.0
"""An engine that does nothing for so long hangs; a copy or a store ends in far less."""


class VerifySubject(Protocol):
    """An engine to be verified, its store attached if it has one. ``scrub``: overwrite every page
    that nobody owns, so that a page which was never copied cannot be right by chance."""

    @property
    def engine(self) -> Engine: ...

    @property
    def cache(self) -> KVCache: ...

    def scrub(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class VerifyOutput:
    """What an engine put out: logits float32 [n, vocab] that the n tokens were chosen from, and
    seconds until the first one. ``failure``: why it stopped, if it did not end well."""

    tokens: tuple[int, ...]
    logits: torch.Tensor
    first_s: float
    cached: CachedTokens | None = None
    failure: Failure | None = None


class Scribe:
    """Keeps the logits of the step that has just run, of rows that go on; chooses as ever. They are
    kept on the CPU, where tokens are: a device may have given their memory to another step."""

    def __init__(self, token_source: TokenSource | None = None) -> None:
        self._token_source = token_source or OwnTokens()
        self.logits = torch.empty(0, 0)

    def choose(self, forward: Forward, params: SamplingBatch) -> Sampled:
        sampled = self._token_source.choose(forward, params)
        broken = np.isin(np.flatnonzero(forward.sampled), sampled.broken)
        self.logits = forward.logits.cpu()[torch.from_numpy(~broken & (sampled.tokens >= 0))]
        return sampled

    def idle(self) -> None:
        self._token_source.idle()


class VerifySession:
    """Prompts for one engine, and its outputs. ``scribe``: the engine's token_source."""

    def __init__(self, subject: VerifySubject, scribe: Scribe, clock: Clock) -> None:
        self.subject = subject
        self._scribe = scribe
        self._clock = clock
        self._asked = 0
        self._begun_s: dict[RequestId, float] = {}
        self._first: dict[RequestId, tuple[float, CachedTokens | None]] = {}
        self._answers: dict[RequestId, tuple[list[int], list[torch.Tensor]]] = {}
        self._ended: list[RequestId] = []
        self._failed: dict[RequestId, Failure] = {}

    def submit(
        self,
        tokens: TokenIds,
        count: int,
        salt: str,
        use: CacheUse = CacheUse.ALL,
        name: RequestId | None = None,
    ) -> RequestId:
        """Queue a prompt, under ``name`` or the next free one."""
        self._asked += 1
        name = RequestId(f"verify-{self._asked}") if name is None else name
        sampling = SamplingParams(max_tokens=count, temperature=0.0)
        self._begun_s[name] = self._clock.now_s()
        self._answers[name] = ([], [])
        self.subject.engine.submit(
            Prompt(id=name, tokens=tokens, sampling=sampling, salt=salt, use=use)
        )
        return name

    def step(self) -> list[Output]:
        """One step; the logits of a step are in the order of its tokens."""
        outputs = self.subject.engine.step()
        sampled = [output for output in outputs if output.token is not None]
        for output, logits in zip(sampled, self._scribe.logits if sampled else (), strict=True):
            tokens, scores = self._answers[output.request]
            if not tokens:
                took_s = self._clock.now_s() - self._begun_s[output.request]
                self._first[output.request] = (took_s, output.cached)
            assert output.token is not None
            tokens.append(output.token)
            scores.append(logits)
        for output in outputs:
            self._end(output)
        return outputs

    def _end(self, output: Output) -> None:
        if output.finish is FinishReason.ABORT:
            for book in (self._begun_s, self._first, self._answers):
                book.pop(output.request, None)
        elif output.finish is not None:
            self._ended.append(output.request)
            if output.failure is not None:
                self._failed[output.request] = output.failure

    def step_until(self, done: Callable[[list[Output]], bool]) -> None:
        """Step until ``done``, which is shown each step's outputs. TimeoutError where the engine
        has nothing left to do before that, or has run no batch and had no output for ``HANG_S``."""
        engine = self.subject.engine
        moved_s, steps = self._clock.now_s(), engine.stats().steps
        while not done(outputs := self.step()):
            if not engine.has_work():
                raise TimeoutError("the engine has nothing left to do, and what is awaited is not")
            now_s, ran = self._clock.now_s(), engine.stats().steps
            if outputs or ran != steps:
                moved_s, steps = now_s, ran
            elif now_s - moved_s > HANG_S:
                raise TimeoutError(f"the engine has not moved for {HANG_S:g} s")

    def drain(self) -> None:
        """Serve all to their ends; TimeoutError as in ``step_until``, AssertionError where the
        engine has forgotten somebody."""
        engine = self.subject.engine
        if engine.has_work():
            self.step_until(lambda _: not engine.has_work())
        forgotten = self._answers.keys() - set(self._ended)
        assert not forgotten, f"{', '.join(sorted(forgotten))}: no end was given"

    def has_ended(self, name: RequestId) -> bool:
        return name in self._ended

    def reply(self, name: RequestId) -> VerifyOutput:
        """Of a request that has ended, once."""
        self._ended.remove(name)
        del self._begun_s[name]
        tokens, logits = self._answers.pop(name)
        first_s, cached = self._first.pop(name, (0.0, None))
        scores = torch.stack(logits) if logits else torch.empty(0, 0)
        return VerifyOutput(tuple(tokens), scores, first_s, cached, self._failed.pop(name, None))

    def replies(self) -> dict[RequestId, VerifyOutput]:
        """Of all that have ended and were not aborted, in that order, once."""
        return {name: self.reply(name) for name in tuple(self._ended)}

    def ask(
        self, tokens: TokenIds, count: int, salt: str, use: CacheUse = CacheUse.ALL
    ) -> VerifyOutput:
        """One prompt alone, to its end."""
        name = self.submit(tokens, count, salt, use)
        self.drain()
        return self.reply(name)

    def forget(self, *tiers: Tier) -> None:
        """Take what is cached off ``tiers``, and overwrite what nobody owns."""
        for tier in tiers:
            self.subject.cache.progress.push_out(tier)
        self.subject.scrub()

    def has_host(self) -> bool:
        pools = self.subject.cache.tiers.pools.stats()
        return any(pool.total for pool in pools if pool.tier == Tier.HOST.name.lower())

    def has_storage(self) -> bool:
        return self.subject.engine.storage_stats() is not None
