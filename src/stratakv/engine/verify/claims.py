"""Hit == recompute, run on an engine: every way that a prefix can come, and a run without a cache.

Owns the ways, the comparison, and where a prompt is worth cutting: one token on either side of
whatever an engine or a model could decide by. Builds no engine: it is given what starts one. Says
what it has found, and asserts nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, assert_never

import numpy as np
import torch

from stratakv.cache.records import CachedTokens, CacheUse
from stratakv.core.clock import Clock, MonotonicClock
from stratakv.core.ids import TokenIds
from stratakv.engine.executor import TokenSource
from stratakv.engine.verify.report import (
    Differs,
    Exact,
    NotRun,
    Verdict,
    VerifyReport,
    Way,
    WayResult,
)
from stratakv.engine.verify.session import Scribe, VerifyOutput, VerifySession, VerifySubject
from stratakv.policy.checkpoints import last_end
from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import first_key, needed
from stratakv.tree.nodes import Tier

StartSubject: TypeAlias = Callable[[TokenSource, int | None], VerifySubject]
"""A fresh engine that has its tokens chosen there, over the same store each time; int: the most
tokens of a prompt in one step, None: as it is set up."""

Oracle: TypeAlias = Callable[[TokenIds, int], VerifyOutput]
"""What follows a prompt (int32 [n]), greedily, in that many tokens, without any cache."""

Compare: TypeAlias = Callable[[VerifyOutput, VerifyOutput, float], tuple[int | None, float]]
"""``compare``, or what judges as it does."""


def compare(expected: VerifyOutput, got: VerifyOutput, bound: float) -> tuple[int | None, float]:
    """The first token at which an answer differs, if one does, and the largest error; logits are
    equal within ``bound`` parts of the largest one. NaN never is, nor what a request that failed
    did not generate."""
    if got.failure is not None:
        count = len(got.tokens)
        begun = replace(expected, tokens=expected.tokens[:count], logits=expected.logits[:count])
        wrong = compare(begun, replace(got, failure=None), bound)[0] if count else None
        return (count if wrong is None else wrong), math.inf
    scale = expected.logits.abs().max().item()
    errors = (got.logits - expected.logits).abs().amax(dim=1) / scale
    wrong = ~(errors <= bound) | (torch.tensor(got.tokens) != torch.tensor(expected.tokens))
    at = torch.nonzero(wrong)
    return (int(at[0]) if len(at) else None), errors.max().item()


# -- what should have been reused ----------------------------------------------------------------

HOST_WAYS: Final = frozenset((Way.HOST, Way.HOST_TURN, Way.HOST_BATCHED))
STORAGE_WAYS: Final = frozenset((Way.STORAGE, Way.STORAGE_TURN, Way.STORAGE_BATCHED, Way.RESTART))
"""Ways of which something has to come from there."""


def cached_on(spec: CacheSpec, end_tokens: int, tier: Way) -> CachedTokens:
    """A prefix of ``end_tokens`` that came one way, with what every group needs of it."""
    page = spec.page_tokens
    spans = tuple(len(needed(g.retention, end_tokens, page)) * page for g in spec.groups)
    none = (0,) * len(spans)
    host, storage = tier in HOST_WAYS, tier in STORAGE_WAYS
    device = not host and not storage
    return CachedTokens(
        device=end_tokens * device,
        host=end_tokens * host,
        storage=end_tokens * storage,
        groups_device=spans if device else none,
        groups_host=spans if host else none,
        groups_storage=spans if storage else none,
    )


SinglePromptWay: TypeAlias = Literal[
    Way.DEVICE, Way.HOST, Way.STORAGE, Way.TURN, Way.HOST_TURN, Way.STORAGE_TURN, Way.RETRACTED
]
"""Ways of one prompt that was computed once and is asked again."""
BatchedWay: TypeAlias = Literal[Way.BATCHED, Way.HOST_BATCHED, Way.STORAGE_BATCHED]
"""Ways of all prompts at once."""

REUSES: Final = frozenset((Way.COMPUTED, Way.CUT, Way.DEVICE, Way.HOST, Way.STORAGE, Way.RESTART))
"""Ways of which it is known to the token what must have been reused."""
_OFF: Final[Mapping[Way, tuple[Tier, ...]]] = {
    **dict.fromkeys(HOST_WAYS, (Tier.DEVICE,)),
    **dict.fromkeys(STORAGE_WAYS, (Tier.DEVICE, Tier.HOST)),
}
"""Which tiers are emptied before a prompt is asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``bound``: of two logits that are equal, in parts of the largest. ``salt``: one that nobody
    else uses, so that what is in a store already has no part in it. ``cuts``: sizes of the chunks
    that the longest prompt is computed in too (``cut_sizes``)."""

    bound: float
    salt: str
    output_tokens: int = 4
    cuts: tuple[int, ...] = ()


def _unwatched(way: Way) -> None:
    pass


class Verifier:
    """``prompts``: int32 [n] each, of several pages. ``oracle``: None: the engine itself, with a
    request that neither reads nor leaves a page. ``judge``: what says whether two outputs are
    equal."""

    def __init__(
        self,
        start: StartSubject,
        prompts: Sequence[TokenIds],
        settings: Settings,
        oracle: Oracle | None = None,
        clock: Clock | None = None,
        judge: Compare = compare,
    ) -> None:
        self._start = start
        self._judge = judge
        self._prompts = prompts
        self._settings = settings
        self._clock = clock or MonotonicClock()
        self._oracle = oracle or self._uncached
        self._known: dict[bytes, VerifyOutput] = {}
        self._asked: set[bytes] = set()
        self._salts = 0
        self._there: dict[bytes, VerifyOutput] = {}
        self._session = self._begin()

    def _begin(self, chunk_tokens: int | None = None) -> VerifySession:
        scribe = Scribe()
        return VerifySession(self._start(scribe, chunk_tokens), scribe, self._clock)

    def _begin_again(self, chunk_tokens: int | None = None) -> None:
        self._session.subject.cache.progress.settle()
        self._session.subject.engine.check()
        self._session.subject.close()
        self._there.clear()
        self._session = self._begin(chunk_tokens)
        self._session.subject.scrub()

    def run(
        self, ways: Sequence[Way] = tuple(Way), began: Callable[[Way], None] = _unwatched
    ) -> VerifyReport:
        """Try ``ways`` one after the other and close the engine. ``began``: is called before each.
        AssertionError where the engine's own books are wrong, TimeoutError where it hangs."""
        results: list[WayResult] = []
        try:
            for way in ways:
                began(way)
                results.append(self._try(way))
            return VerifyReport(tuple(results))
        finally:
            self._session.subject.close()

    def _try(self, way: Way) -> WayResult:
        if why := self._lacks(way):
            return WayResult(way=way, verdict=NotRun(why))
        computed_s = hit_s = error = 0.0
        verdict: Verdict | None = None
        came = 0
        for at, (tokens, got) in enumerate(self._replies(way)):
            expected = self._expected(tokens)
            computed_s, hit_s = computed_s + expected.first_s, hit_s + got.first_s
            came += _came(way, got.cached)
            wrong, off = self._judge(expected, got, self._settings.bound)
            error = max(error, off)
            if verdict is None and (wrong is not None or not off <= self._settings.bound):
                what = f"{got.tokens} instead of {expected.tokens}; logits by {off:.1e}"
                what += "" if got.failure is None else f"; it failed: {got.failure.value}"
                verdict = Differs(at, wrong, off, what)
            elif verdict is None and (right := self._reuse(way, tokens)) not in (None, got.cached):
                verdict = Differs(at, None, off, f"reused {got.cached} instead of {right}")
        if verdict is None and way in _OFF and not came:
            verdict = Differs(0, None, error, "nothing came from there")
        self._session.subject.engine.check()
        return WayResult(
            way=way, verdict=verdict or Exact(error), computed_s=computed_s, hit_s=hit_s
        )

    def _lacks(self, way: Way) -> str | None:
        if way is Way.CUT and not self._cuts():
            return "no chunk is smaller than a prompt"
        if way in HOST_WAYS and not self._session.has_host():
            return "there is no host tier"
        if way in STORAGE_WAYS and not self._session.has_storage():
            return "there is no storage"
        return None

    def _reuse(self, way: Way, tokens: TokenIds) -> CachedTokens | None:
        spec = self._session.subject.cache.spec
        end = last_end(len(tokens), spec.page_tokens) * spec.page_tokens
        if way in (Way.COMPUTED, Way.CUT):
            end = 0
        return cached_on(spec, end, way) if way in REUSES else None

    # -- without a cache -------------------------------------------------------------------------

    def _expected(self, tokens: TokenIds) -> VerifyOutput:
        known = tokens.tobytes()
        if known not in self._known:
            reply = self._oracle(tokens, self._settings.output_tokens)
            assert reply.failure is None, f"without a cache it fails: {reply.failure.value}"
            self._known[known] = reply
        return self._known[known]

    def _uncached(self, tokens: TokenIds, count: int) -> VerifyOutput:
        return self._session.ask(tokens, count, self._settings.salt, CacheUse.NOTHING)

    # -- the ways --------------------------------------------------------------------------------

    def _replies(self, way: Way) -> Iterator[tuple[TokenIds, VerifyOutput]]:
        match way:
            case Way.CUT:
                yield from self._cut()
            case Way.BATCHED | Way.HOST_BATCHED | Way.STORAGE_BATCHED:
                yield from self._batched(way)
            case Way.RESTART:
                for tokens in self._prompts:
                    self._cached(tokens)
                self._begin_again()
                yield from ((tokens, self._ask(tokens)) for tokens in self._prompts)
            case Way.COMPUTED:
                for tokens in self._prompts:
                    yield tokens, self._computed(tokens)
            case (
                Way.DEVICE
                | Way.HOST
                | Way.STORAGE
                | Way.TURN
                | Way.HOST_TURN
                | Way.STORAGE_TURN
                | Way.RETRACTED
            ):
                for tokens in self._prompts:
                    yield self._single_prompt(way, tokens)
            case _:
                assert_never(way)

    def _ask(self, tokens: TokenIds, salt: str = "") -> VerifyOutput:
        return self._session.ask(tokens, self._settings.output_tokens, self._settings.salt + salt)

    def _single_prompt(
        self, way: SinglePromptWay, tokens: TokenIds
    ) -> tuple[TokenIds, VerifyOutput]:
        before = self._cached(tokens)
        if off := _OFF.get(way, ()):
            self._forget(tokens, *off)
        match way:
            case Way.DEVICE | Way.HOST | Way.STORAGE:
                pass
            case Way.TURN | Way.HOST_TURN | Way.STORAGE_TURN:
                answer = np.array(before.tokens, np.int32)
                # Of each tier its own, or the second would find all that the first has left.
                more = np.roll(tokens, len(off))[: len(tokens) // 3 + 1]
                tokens = np.concatenate((tokens, answer, more))
            case Way.RETRACTED:
                return tokens, self._retracted(tokens)
            case _:
                assert_never(way)
        return tokens, self._ask(tokens)

    def _computed(self, tokens: TokenIds) -> VerifyOutput:
        """Under a salt of its own where something of the prompt may be cached already."""
        if tokens.tobytes() not in self._asked:
            reply = self._cached(tokens)
            if reply.cached == self._reuse(Way.COMPUTED, tokens):
                return reply
        self._salts += 1
        return self._ask(tokens, f" computed {self._salts}")

    def _cached(self, tokens: TokenIds) -> VerifyOutput:
        """See that the prompt's pages are there; the outputs when they were computed."""
        name = tokens.tobytes()
        if name not in self._there:
            self._asked.add(name)
            self._there[name] = self._ask(tokens)
        return self._there[name]

    def _forget(self, tokens: TokenIds, *tiers: Tier) -> None:
        """Of all prompts; this one is asked again."""
        self._session.forget(*tiers)
        name = tokens.tobytes()
        self._there = {name: self._there[name]}

    def _retracted(self, tokens: TokenIds) -> VerifyOutput:
        session = self._session
        name = session.submit(tokens, self._settings.output_tokens, self._settings.salt)
        session.step_until(lambda outputs: any(output.request == name for output in outputs))
        if not session.has_ended(name):
            session.subject.engine.retract(name)
        session.drain()
        return session.reply(name)

    def _longest(self) -> TokenIds:
        return max(self._prompts, key=len)

    def _cuts(self) -> list[int]:
        return [size for size in self._settings.cuts if size < len(self._longest())]

    def _cut(self) -> Iterator[tuple[TokenIds, VerifyOutput]]:
        tokens = self._longest()
        self._expected(tokens)  # as the engine is set up
        for size in self._cuts():
            self._begin_again(size)
            yield tokens, self._ask(tokens, f" in chunks of {size}")
        self._begin_again()

    def _batched(self, way: BatchedWay) -> Iterator[tuple[TokenIds, VerifyOutput]]:
        session, count = self._session, self._settings.output_tokens
        if off := _OFF.get(way, ()):
            for tokens in self._prompts:
                self._cached(tokens)
            session.forget(*off)
        else:
            session.subject.cache.progress.flush()
            self._there.clear()
            self._ask(self._prompts[0])
        gone = session.submit(self._prompts[-1][::-1].copy(), count, self._settings.salt)
        names = [
            (session.submit(tokens, count, self._settings.salt), tokens)
            for tokens in (*self._prompts, *self._prompts)
        ]
        session.step()
        session.subject.engine.abort(gone)
        session.drain()
        for name, tokens in names:
            yield tokens, session.reply(name)


def _came(way: Way, cached: CachedTokens | None) -> int:
    """Tokens of a prompt that came from where this way takes them."""
    if cached is None:
        return 0
    if way in HOST_WAYS:
        return cached.host
    return cached.storage if way in STORAGE_WAYS else cached.device


SCAN_TOKENS: Final = 64
"""Of a chunk of Hugging Face's scans of a state, where the config does not say."""
FARTHEST_TOKENS: Final = 1 << 17
"""Where windows that are wider are taken for none."""
SCAN_KEYS: Final = ("chunk_size", "mamba_chunk_size")
"""The config's names for it."""


def cut_sizes(spec: CacheSpec, config: Mapping[str, object], tokens: int) -> tuple[int, ...]:
    """Sizes of chunks, in tokens, that cut a prompt of ``tokens``: one and two, which some layers
    compute on other paths than several; and a page, a window, a chunk of chunked attention or of a
    state's scan, one token less and one more. ``config``: as for ``spec_of``."""
    whole = {spec.page_tokens, *_reaches(spec, tokens), *_scans(spec, config)}
    sizes = {1, 2, *(size + by for size in whole for by in (-1, 0, 1))}
    return tuple(sorted(size for size in sizes if 0 < size < tokens))


def widest_reach(spec: CacheSpec) -> int:
    """Tokens that a window or a chunk reads at most, of those that end; 0 where none does."""
    return max(_reaches(spec, FARTHEST_TOKENS), default=0)


def _reaches(spec: CacheSpec, tokens: int) -> Iterator[int]:
    """How many tokens each group reads at most, where a prompt has more."""
    positions = np.arange(tokens, dtype=np.int64)
    for group in spec.groups:
        if not group.stateful:
            moved = np.flatnonzero(first_key(group.retention, positions))
            yield from moved[:1].tolist()


def _scans(spec: CacheSpec, config: Mapping[str, object]) -> Iterator[int]:
    if any(group.stateful for group in spec.groups):
        yield SCAN_TOKENS
        yield from (size for key in SCAN_KEYS if isinstance(size := config.get(key), int))
